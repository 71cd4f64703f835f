"""docs/reference/rest-api.md, compared with the routes of the gateway."""

from __future__ import annotations

import re
from pathlib import Path

from quartet.gateway.app import create_app
from quartet.gateway.settings import GatewaySettings

PAGE = (Path(__file__).parents[3] / "docs/reference/rest-api.md").read_text(encoding="utf-8")


def test_the_page_documents_exactly_the_methods_of_the_api(tmp_path: Path) -> None:
    app = create_app(GatewaySettings(tmp_path, None, "127.0.0.1:1", "a-token-of-twenty-signs"))
    routes = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/api/v1")
    }
    assert set(re.findall(r"^## ((?:GET|POST|PATCH) /.*)$", PAGE, re.MULTILINE)) == routes
