"""The wait for the services at the start of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.errors import ConfigError
from quartet.services.orchestrator import handshake
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.service_clients import ServiceClients


def test_a_service_at_an_address_that_does_not_answer_is_named_while_the_run_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "NOTE_AFTER_SECONDS", 0.0)
    config = parse_config(
        {
            "run": {"name": "tiny", "directory": str(tmp_path)},
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "buffer": {"url": "redis://nowhere/0"},
            "services": {role: {"address": "127.0.0.1:1"} for role in ("actor", "critic", "reward", "reference")},
            "timeouts": {"load_seconds": 0.3},
        },
        "here",
    )
    board, clients = ProgressBoard("tiny", 1), ServiceClients(config)
    run: Any = SimpleNamespace(config=config, board=board, clients=clients, control=SimpleNamespace(stopping=False))
    with pytest.raises(ConfigError, match=r"actor at 127\.0\.0\.1:1: no Quartet service responded within 0\.3 s"):
        handshake.ServiceHandshake(run).start()
    clients.close_replicas()
    assert list(board.current().notes) == [
        "waiting up to 0.3 s for services.actor.address 127.0.0.1:1, which does not answer yet; start it, or correct the address"
    ]
