"""The uvicorn server of the gateway and its limits.

For untrusted networks, put a reverse proxy in front: uvicorn has no timeout for slow requests or TLS handshakes.
"""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from quartet.gateway.settings import GatewaySettings

MAX_CONNECTIONS = 512
"""Open connections. Beyond them, uvicorn answers each request with 503."""
MAX_INCOMPLETE_HEADER_BYTES = 32 * 1024
"""Size of headers that have not been received completely. uvicorn answers larger ones with 400."""
KEEP_ALIVE_SECONDS = 30
"""Time for which an idle connection stays open after a response."""
SHUTDOWN_SECONDS = 1
"""Time that active requests have to complete after the server is asked to stop."""


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """Return the uvicorn config for an app. It serves HTTPS if the settings have a certificate."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        # The header limit below exists for h11 only.
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Forwarded addresses are ignored: any client can send these headers.
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_INCOMPLETE_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
