"""Fixtures: the four model services with tiny randomly initialized models, each with its own server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.deployment import TimeoutsConfig
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.generation import GenerationBatch, SamplingParameters, requests_of
from quartet.contract.status import MODEL_ROLES, Role
from quartet.contract.trajectory import Prompt
from quartet.rpc.clients import (
    ActorClient,
    CriticClient,
    GenerationClient,
    ReferenceClient,
    RewardClient,
    ServiceClient,
)
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.replica_set import FrozenReplicas
from quartet.rpc.server import HostedRole, Server
from quartet.services.roles import build_model_role
from tests.unit.models import tiny

TIMEOUTS = TimeoutsConfig(load_seconds=30, generate_seconds=60, score_seconds=60, update_seconds=60, save_seconds=60)
CLIENTS: dict[Role, type[ServiceClient]] = {
    Role.ACTOR: ActorClient,
    Role.CRITIC: CriticClient,
    Role.REWARD: RewardClient,
    Role.REFERENCE: ReferenceClient,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def save_checkpoint(model: Any, directory: Path) -> Path:
    """Save a model with the tests' tokenizer; return the directory."""
    model.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of a causal LM of each kind, by kind, and of a reward model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    results = {kind: save_checkpoint(tiny.causal(kind, seed=3), folder / kind) for kind in tiny.KINDS}
    results["reward"] = save_checkpoint(tiny.classifier("llama", seed=4), folder / "reward")
    return results


def start_generation(
    actor: Any,
    run: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParameters,
    samples: int = 1,
    first_sample: int = 0,
    step: int = 1,
    **batch: Any,
) -> Future[int]:
    """Start a Generate call at the process of an actor's client. ``batch``: further fields of ``GenerationBatch``."""
    client = GenerationClient(actor.channel.address, actor.timeouts, role=Role.ACTOR)
    requests = requests_of(run, step, prompts, samples, first_sample)
    fields = {"leader_epoch": 1, "seed": 0, "policy_version": 0, **batch}
    return client.generate(GenerationBatch(run, step, requests=requests, sampling=sampling, **fields))


def replicas_of(client: Any) -> FrozenReplicas[Any]:
    """Return the process of a client as the only replica of its role. The caller closes the client."""
    return FrozenReplicas(client.role, [client.channel.address], lambda _: client, lambda note: None)


class Services:
    """Factory of servers and clients, which ``stack`` stops and closes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def serve(self, *roles: HostedRole) -> Server:
        server = Server(roles, "127.0.0.1:0")
        self._stack.callback(server.stop, 5.0)
        return server

    def build(self, role: Role, config: Config) -> HostedRole:
        return build_model_role(role, config, ComputeThread(), threads=1)

    def client(self, role: Role, server: Server, timeouts: TimeoutsConfig = TIMEOUTS) -> Any:
        client = CLIENTS[role](server.address, timeouts)
        self._stack.callback(client.close)
        return client

    def start(self, role: Role, config: Config) -> Any:
        """Start a new service and return a client of it."""
        return self.client(role, self.serve(self.build(role, config)))


@pytest.fixture(scope="session")
def session_services() -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(stack)


@pytest.fixture
def services() -> Iterator[Services]:
    """Factory of services for one test."""
    with ExitStack() as stack:
        yield Services(stack)


@pytest.fixture(scope="session")
def make_config(
    checkpoints: dict[str, Path], redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Config]:
    """Factory of configs with the tiny checkpoints; ``actor`` and ``critic`` are keys of ``checkpoints``."""

    def make(actor: str = "llama", critic: str = "reward", **sections: Any) -> Config:
        tree = {
            "run": {"directory": tmp_path_factory.mktemp("runs"), "name": "run"},
            "data": {"prompts": "none.jsonl"},
            # Both are set, so that no start measures the memory of updates.
            "actor": {"model": str(checkpoints[actor]), "micro_batch_tokens": 64, "gradient_checkpointing": False},
            "critic": {"model": str(checkpoints[critic])},
            "reward": {"model": str(checkpoints["reward"])},
            "rollout": {"max_concurrent_sequences": 4},
            "buffer": {"url": redis_url},
        }
        return parse_config({**tree, **sections}, "test")

    return make


@pytest.fixture(scope="session")
def clients(session_services: Services, make_config: Callable[..., Config]) -> dict[Role, Any]:
    """Clients of four services that no test updates."""
    config = make_config()
    return {role: session_services.start(role, config) for role in MODEL_ROLES}
