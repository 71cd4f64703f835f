"""Fixtures of the tests of traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.services.generator import factory
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import active_run_with_generators
from tests.training.runs import wait_for
from tests.training.traffic.endpoint import OPERATOR, OTHER, SESSIONS, STEPS, TEMPLATE, VIEWER, Endpoint, has_weights


@pytest.fixture(scope="module")
def settings(make: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that returns a config of a run with traffic, with changes."""
    folder = tmp_path_factory.mktemp("traffic")
    for name, text in {"template": TEMPLATE, "viewers": f"{VIEWER}\n{OTHER}\n", "operators": OPERATOR}.items():
        (folder / name).write_text(text)

    def config(traffic: dict[str, Any] | None = None, **changes: Any) -> Any:
        tree: dict[str, Any] = {
            "run": {"steps": STEPS},
            "data": {"prompts": None, "max_prompt_tokens": 60},
            "rollout": {
                "prompts_per_step": SESSIONS,
                "max_turns": 4,
                "max_turn_tokens": 5,
                "max_response_tokens": 60,
                "generators": 1,
                "max_off_policy_steps": 4,
                "in_flight_updates": True,
            },
            "checkpoint": {"every_steps": 2},
            "reward": {"source": "none", "model": None},
            "environment": {
                "kind": "traffic",
                "chat_template": str(folder / "template"),
                "traffic": {
                    "viewer_keys_file": str(folder / "viewers"),
                    "operator_keys_file": str(folder / "operators"),
                    "requests_per_minute": 100_000,
                    **(traffic or {}),
                },
            },
            "recovery": {"backoff_seconds": 0.01},
        }
        return make(**{name: {**tree.get(name, {}), **changes.get(name, {})} for name in {*tree, *changes}})

    return config


@pytest.fixture(scope="module")
def start(settings: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return a function that returns a context with the endpoint of a run."""

    @contextmanager
    def started(count: int = 1, traffic: dict[str, Any] | None = None, **changes: Any) -> Iterator[Endpoint]:
        endpoint, create = Endpoint(), factory.traffic_sessions

        def traffic_sessions(*arguments: Any) -> Any:
            result = create(*arguments)
            if result is not None:
                endpoint.servers.append(result)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory, "traffic_sessions", traffic_sessions)
            with active_run_with_generators(settings(traffic, **changes), count) as (active, generators):
                endpoint.active, endpoint.generators = active, generators
                wait_for(active, lambda: has_weights(endpoint))
                yield endpoint
                active.control.stop()

    return started
