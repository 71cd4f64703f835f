"""Commands to active runs that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quartet.cli.remote.control import _wait
from quartet.contract.control import RunState
from quartet.errors import ServiceFailed


def test_waiting_for_a_checkpoint_before_the_first_step_of_a_paused_run_ends() -> None:
    def get(path: str = "") -> dict[str, Any]:
        return {"items": []} if path else {"state": RunState.PAUSED, "step": 0, "live": True}

    api: Any = SimpleNamespace(get=get, target=SimpleNamespace(given="runs/my"))
    with pytest.raises(ServiceFailed, match="runs/my: is paused before its first step, so there is nothing to save"):
        _wait(api, "checkpoint", 0)
