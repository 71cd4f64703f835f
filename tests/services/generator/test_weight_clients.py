"""Connections of a generator to the sources of its weights."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.contract.status import Role
from quartet.errors import Cancelled
from quartet.rpc.security.credentials import LOCAL
from quartet.services.generator.factory import WeightClients
from quartet.weight_transfer.messages import WeightsRequest


def test_connections_to_sources_of_an_update_stay_and_all_others_are_closed() -> None:
    clients = WeightClients(LOCAL)
    actor, first, second = (Role.ACTOR, "127.0.0.1:1"), (Role.GENERATOR, "127.0.0.1:2"), (Role.GENERATOR, "127.0.0.1:3")
    before: list[Any] = clients([first, actor, actor])
    assert before[1] is before[2]
    after: list[Any] = clients([second, actor])
    assert after[1] is before[1]
    assert after[0].address == "generator at 127.0.0.1:3"
    with pytest.raises(Cancelled, match="the channel is closed"):
        next(before[0].get_weights(WeightsRequest("run", 0, bytes(16)), 1.0))
    clients([])
