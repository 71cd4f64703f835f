"""Update, Save and Restore with experience in a real buffer: applied once, in order, for the newest leader only."""

from __future__ import annotations

import hashlib
import re
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import Role
from quartet.contract.trajectory import Prompt
from quartet.contract.update import OptimizationSettings, PolicyLossSettings, UpdateResult, ValueLossSettings
from quartet.contract.weights import SaveKind
from quartet.errors import (
    BufferFailed,
    FailedPrecondition,
    InvalidRequest,
    ModelError,
    ServiceBusy,
    ServiceFailed,
    StorageFailed,
)
from quartet.models.weights.snapshot import write_model
from quartet.rpc.limits import MAX_PENDING_SAVES
from quartet.services import trainable_model as trained
from quartet.services.critic import critic
from quartet.services.orchestrator.service_clients import wait_for_all
from tests.buffer.samples import experience
from tests.services.model_services import Services, start_generation
from tests.unit.models import tiny
from tests.waiting import LIMIT

SETTINGS = OptimizationSettings(num_epochs=2, num_mini_batches=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
LOSSES: dict[Role, Any] = {Role.ACTOR: PolicyLossSettings(), Role.CRITIC: ValueLossSettings()}
BATCH = tiny.batch([3, 2], [4, 7])
TRAINED = [Role.ACTOR, Role.CRITIC]
SAVED = [SaveKind.CHECKPOINT, SaveKind.MODEL]
LORA = {"rank": 2}
pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run name derived from the name of the test."""
    return re.sub(r"[^a-z_]", "-", request.node.name)


@pytest.fixture
def store(redis_client: Redis, redis_url: str, run: str) -> ExperienceStore:
    """Sealed experience of steps 1 to 3."""
    result = ExperienceStore(redis_client, redis_url, run)
    for step in (1, 2, 3):
        result.seal(experience(run, step))
    return result


def update(client: Any, run: str, step: int, epoch: int = 1) -> UpdateResult:
    result: UpdateResult = client.update(run, step, epoch, SETTINGS, LOSSES[client.role]).result()
    return result


def outputs(client: Any) -> bytes:
    """Return the bytes of the model's outputs."""
    result = client.log_probs(BATCH, 1.0) if client.role is Role.ACTOR else client.values(BATCH).result()
    return bytes(result.tobytes())


@pytest.mark.parametrize("role", TRAINED)
def test_an_update_changes_the_model_and_reports_metrics(
    role: Role, services: Services, make_config: Callable[..., Config], run: str
) -> None:
    client = services.start(role, make_config())
    before = outputs(client)
    result = update(client, run, 1)
    assert (result.step, result.policy_version) == (1, 1)
    assert result.metrics["optimizer_steps"] == 2
    assert result.metrics["learning_rate"] == 1e-2
    assert result.metrics["grad_norm"] > 0
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert outputs(client) != before
    status = client.wait_until_ready()
    assert (status.run, status.step, status.policy_version) == (run, 1, 1)
    assert status.busy_seconds["update"] > 0


@pytest.mark.parametrize("role", TRAINED)
def test_a_repeated_update_returns_the_same_result_and_changes_nothing(
    role: Role, services: Services, make_config: Callable[..., Config], run: str, store: ExperienceStore
) -> None:
    client = services.start(role, make_config())
    update(client, run, 1)
    second = update(client, run, 2)
    after = outputs(client)
    # A repeated update needs no experience and ignores its settings.
    store.discard([2])
    assert update(client, run, 2) == second
    other = OptimizationSettings(num_epochs=9, num_mini_batches=1, learning_rate=1.0, max_grad_norm=0.0, seed=1)
    assert client.update(run, 2, 1, other, LOSSES[role]).result() == second
    assert outputs(client) == after
    assert update(client, run, 3).policy_version == 3
    assert outputs(client) != after


def test_an_update_out_of_order_of_another_run_or_of_a_former_leader_is_refused(
    services: Services, make_config: Callable[..., Config], run: str, redis_client: Redis, redis_url: str
) -> None:
    ExperienceStore(redis_client, redis_url, "other").seal(experience("other", 2))
    client = services.start(Role.ACTOR, make_config())
    with pytest.raises(FailedPrecondition, match="the next is 1"):
        update(client, run, 2)
    update(client, run, 1, epoch=3)
    after = outputs(client)
    with pytest.raises(FailedPrecondition, match="the next is 2"):
        update(client, run, 3, epoch=3)
    with pytest.raises(FailedPrecondition, match="run other: this model is at step 1"):
        update(client, "other", 2, epoch=3)
    for step in (1, 2):
        with pytest.raises(FailedPrecondition, match="leader_epoch 2: an orchestrator of epoch 3 has taken over"):
            update(client, run, step, epoch=2)
    assert outputs(client) == after
    assert client.wait_until_ready().policy_version == 1
    update(client, run, 2, epoch=3)


def test_missing_or_damaged_experience_is_an_error_and_the_step_can_be_retried(
    services: Services,
    make_config: Callable[..., Config],
    run: str,
    store: ExperienceStore,
    redis_client: Redis,
) -> None:
    client = services.start(Role.CRITIC, make_config())
    store.discard([1])
    with pytest.raises(FailedPrecondition, match=f"experience of step 1 of run {run}: not in the buffer"):
        update(client, run, 1)
    redis_client.hset(store.key(1), "manifest", b"\xff")
    with pytest.raises(BufferFailed, match="the manifest does not match its SHA-256"):
        update(client, run, 1)
    store.seal(experience(run, 1))
    assert update(client, run, 1).policy_version == 1


def test_a_policy_is_saved_in_hugging_face_format_with_hashes(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = make_config()
    actor = services.start(Role.ACTOR, config)
    update(actor, run, 1)
    files = actor.save(run, 1, "policy", SaveKind.MODEL).result()
    root = config.run_directory
    assert {file.path for file in files} >= {"policy/model.safetensors", "policy/config.json", "policy/tokenizer.json"}
    assert {file.path for file in files} == {
        path.relative_to(root).as_posix() for path in (root / "policy").rglob("*") if path.is_file()
    }
    for file in files:
        contents = (root / file.path).read_bytes()
        assert (file.bytes, file.sha256) == (len(contents), hashlib.sha256(contents).hexdigest())
    reloaded = services.start(Role.REFERENCE, make_config(reference={"model": str(root / "policy")}))
    np.testing.assert_array_equal(reloaded.log_probs(BATCH, 1.0).result(), actor.log_probs(BATCH, 1.0))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    assert loaded.config.vocab_size == tiny.VOCABULARY


def test_two_saves_of_a_model_are_identical(services: Services, make_config: Callable[..., Config], run: str) -> None:
    actor = services.start(Role.ACTOR, make_config())
    first = actor.save(run, 1, "policy", SaveKind.MODEL).result()
    assert actor.save(run, 1, "policy", SaveKind.MODEL).result() == first


@pytest.mark.parametrize("role", TRAINED)
def test_a_checkpoint_contains_the_optimizer_state_and_a_model_does_not(
    role: Role, services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = make_config()
    client = services.start(role, config)
    update(client, run, 1)
    checkpoint = {file.path for file in client.save(run, 1, f"c/{role}", SaveKind.CHECKPOINT).result()}
    model = {file.path for file in client.save(run, 1, f"m/{role}", SaveKind.MODEL).result()}
    assert {path.removeprefix("c/") for path in checkpoint} - {path.removeprefix("m/") for path in model} == {
        f"{role}/optimizer.safetensors"
    }
    moments = safetensors.numpy.load_file(config.run_directory / f"c/{role}/optimizer.safetensors")
    assert any(np.abs(moment).max() > 0 for moment in moments.values())


@dataclass
class BlockedWriter:
    """A writer of saves that blocks until the test sets ``proceed``."""

    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    proceed: threading.Event = field(default_factory=threading.Event)

    def write(self, directory: Path, *writers: Any) -> None:
        self.started.release()
        assert self.proceed.wait(LIMIT)
        write_model(directory, *writers)


@pytest.fixture
def blocked_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedWriter]:
    result = BlockedWriter()
    monkeypatch.setattr(trained, "write_model", result.write)
    yield result
    result.proceed.set()


def generate(client: Any, run: str, step: int, policy_version: int) -> int:
    """Generate; return the number of trajectories."""
    prompts = [Prompt(0, np.array([3, 4], np.int32), "")]
    sampling = SamplingParameters(4, 1.0, 1.0, 0)
    return start_generation(
        client, run, prompts, sampling, samples=2, step=step, policy_version=policy_version
    ).result()


@pytest.mark.parametrize(("role", "lora"), [(Role.ACTOR, LORA), (Role.CRITIC, None)], ids=["actor-lora", "critic-full"])
def test_a_model_works_during_a_save_and_the_save_has_the_earlier_state(
    role: Role,
    lora: dict[str, Any] | None,
    services: Services,
    make_config: Callable[..., Config],
    run: str,
    blocked_writer: BlockedWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = make_config().model_dump()
    tree[role]["lora"] = lora
    config = parse_config(tree, "test")
    client = services.start(role, config)
    update(client, run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(trained, "write_model", write_model)
        expected = {kind: client.save(run, 1, f"before/{kind}", kind).result() for kind in SAVED}
    before = outputs(client)
    saving = [client.save(run, 1, f"during/{kind}", kind, 1) for kind in SAVED]
    assert blocked_writer.started.acquire(timeout=30)
    assert outputs(client) == before
    if role is Role.ACTOR:
        assert generate(client, run, 2, policy_version=1) == 2
    assert client.wait_until_ready().busy_seconds["save"] > 0
    assert not any(save.done() for save in saving)
    assert not (config.run_directory / "during").exists()
    blocked_writer.proceed.set()
    # The second save is of the same step. It is copied after the first is written.
    for kind, save in zip(SAVED, saving, strict=True):
        during = {(file.path.removeprefix("during/"), file.sha256) for file in save.result()}
        assert during == {(file.path.removeprefix("before/"), file.sha256) for file in expected[kind]}


def test_an_update_during_a_save_does_not_change_its_files(
    services: Services, make_config: Callable[..., Config], run: str, blocked_writer: BlockedWriter
) -> None:
    client = services.start(Role.ACTOR, make_config())
    update(client, run, 1)
    saving = client.save(run, 1, "checkpoint", SaveKind.CHECKPOINT, 1)
    assert blocked_writer.started.acquire(timeout=30)
    before = outputs(client)
    assert update(client, run, 2).step == 2
    after = outputs(client)
    assert not saving.done()
    blocked_writer.proceed.set()
    saving.result()
    assert client.restore(run, 1, 1, "checkpoint").result() == 1
    assert outputs(client) == before != after
    update(client, run, 2)
    assert outputs(client) == after, "the optimizer state is not that of the save"


def test_two_saves_to_one_directory_are_written_one_after_the_other(
    services: Services, make_config: Callable[..., Config], run: str, blocked_writer: BlockedWriter
) -> None:
    config = make_config()
    client = services.start(Role.CRITIC, config)
    saving = [client.save(run, 1, "same", SaveKind.MODEL) for _ in range(2)]
    assert blocked_writer.started.acquire(timeout=30)
    assert not blocked_writer.started.acquire(timeout=0.3), "both saves are written at the same time"
    blocked_writer.proceed.set()
    first, second = (save.result() for save in saving)
    assert first == second
    assert [path.name for path in config.run_directory.iterdir()] == ["same"]


def test_a_cancelled_save_is_not_written(
    services: Services, make_config: Callable[..., Config], run: str, blocked_writer: BlockedWriter
) -> None:
    config = make_config()
    client = services.start(Role.ACTOR, config)
    first = client.save(run, 1, "first", SaveKind.MODEL)
    assert blocked_writer.started.acquire(timeout=30)
    cancelled = client.save(run, 1, "cancelled", SaveKind.MODEL)
    cancelled.cancel()
    blocked_writer.proceed.set()
    first.result()
    client.save(run, 1, "last", SaveKind.MODEL).result()
    assert sorted(path.name for path in config.run_directory.iterdir()) == ["first", "last"]


def test_saves_beyond_the_limit_are_refused(
    services: Services, make_config: Callable[..., Config], run: str, blocked_writer: BlockedWriter
) -> None:
    client = services.start(Role.ACTOR, make_config())
    saving = [client.save(run, 1, "same", SaveKind.MODEL) for _ in range(MAX_PENDING_SAVES + 1)]
    with pytest.raises(ServiceBusy, match="saves are pending already"):
        wait_for_all(saving)
    assert client.wait_until_ready().role is Role.ACTOR
    blocked_writer.proceed.set()
    assert sum(1 for save in saving if not isinstance(failure(save), ServiceBusy)) == MAX_PENDING_SAVES


def failure(call: Any) -> Exception | None:
    try:
        call.result()
    except Exception as error:
        return error
    return None


def test_a_save_of_another_step_than_the_models_is_refused(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = make_config()
    client = services.start(Role.ACTOR, config)
    for kind in SAVED:
        client.save(run, 1, f"zero-{kind}", kind, 0).result()
    for step in (1, 2):
        update(client, run, step)
    for step in (0, 1, 3):
        with pytest.raises(FailedPrecondition, match=f"save of step {step}: this model is at step 2"):
            client.save(run, 1, "wrong", SaveKind.CHECKPOINT, step).result()
    assert not (config.run_directory / "wrong").exists()
    client.save(run, 1, "right", SaveKind.CHECKPOINT, 2).result()


@pytest.mark.usefixtures("capsys")  # Without it, the limit on the file size also affects the log file.
def test_a_save_that_does_not_fit_on_the_disk_fails_and_the_service_continues(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = make_config()
    client = services.start(Role.ACTOR, config)
    update(client, run, 1)
    good = client.save(run, 1, "one", SaveKind.CHECKPOINT, 1).result()
    update(client, run, 2)
    largest = max(file.bytes for file in good)
    # The kernel refuses the largest file. Redis is a separate process, so the limit does not affect it.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, before[1]))
    try:
        for directory in ("one", "two"):
            saving = client.save(run, 1, directory, SaveKind.CHECKPOINT, 2)
            with pytest.raises(StorageFailed, match=rf"actor at .*: Save: model directory .*/{directory}: .*too large"):
                saving.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in config.run_directory.iterdir()] == ["one"]
    for file in good:
        assert hashlib.sha256((config.run_directory / file.path).read_bytes()).hexdigest() == file.sha256
    assert update(client, run, 3).step == 3
    client.save(run, 1, "two", SaveKind.CHECKPOINT, 3).result()


def test_a_saved_critic_gives_the_same_values(services: Services, make_config: Callable[..., Config], run: str) -> None:
    config = make_config()
    critic = services.start(Role.CRITIC, config)
    update(critic, run, 1)
    critic.save(run, 1, "critic", SaveKind.MODEL).result()
    tree = make_config().model_dump()
    tree["critic"]["model"] = str(config.run_directory / "critic")
    reloaded = services.start(Role.CRITIC, Config.model_validate(tree))
    np.testing.assert_array_equal(reloaded.values(BATCH).result(), critic.values(BATCH).result())


@pytest.mark.parametrize(("role", "lora"), [(Role.ACTOR, LORA), (Role.CRITIC, None)], ids=["actor-lora", "critic-full"])
def test_updates_after_a_restore_are_bit_identical(
    role: Role,
    lora: dict[str, Any] | None,
    services: Services,
    make_config: Callable[..., Config],
    run: str,
) -> None:
    tree = make_config().model_dump()
    tree[role]["lora"] = lora
    config = parse_config(tree, "test")
    client = services.start(role, config)
    initial = outputs(client)
    results = [update(client, run, 1)]
    client.save(run, 1, "checkpoints/one", SaveKind.CHECKPOINT).result()
    after_one = outputs(client)
    results += [update(client, run, step) for step in (2, 3)]
    after_three = outputs(client)

    assert client.restore(run, 1, 1, "checkpoints/one").result() == 1
    assert outputs(client) == after_one
    assert [update(client, run, step) for step in (2, 3)] == results[1:], "the optimizer state was not restored"
    assert outputs(client) == after_three

    assert client.restore(run, 0, 1, "").result() == 0
    assert outputs(client) == initial
    assert [update(client, run, step) for step in (1, 2, 3)] == results
    assert outputs(client) == after_three

    fresh = services.start(role, config)
    assert fresh.restore(run, 1, 1, "checkpoints/one").result() == 1
    assert [update(fresh, run, step) for step in (2, 3)] == results[1:]
    assert outputs(fresh) == after_three


def test_after_an_interrupted_update_the_model_is_broken_until_a_restore(
    services: Services, make_config: Callable[..., Config], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = critic.update_value

    def fail_after_update(*arguments: Any) -> Any:
        real(*arguments)
        raise OSError("no memory left")

    client = services.start(Role.CRITIC, make_config())
    with monkeypatch.context() as patch:
        patch.setattr(critic, "update_value", fail_after_update)
        with pytest.raises(ServiceFailed):
            update(client, run, 1)
    assert client.wait_until_ready().broken
    with pytest.raises(FailedPrecondition, match="was interrupted"):
        update(client, run, 1)
    assert client.restore(run, 0, 1, "").result() == 0
    assert update(client, run, 1).step == 1
    assert not client.wait_until_ready().broken


def test_values_of_another_version_are_refused(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    """A critic that restarts in the middle of a step has its initial weights."""
    client = services.start(Role.CRITIC, make_config())
    update(client, run, 1)
    assert len(client.values(BATCH, 1).result()) == 11
    with pytest.raises(FailedPrecondition, match="Values: the value model is version 1, expected 0"):
        client.values(BATCH, 0).result()


def test_after_a_failed_restore_the_model_is_unusable_until_another_succeeds(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = make_config()
    client = services.start(Role.CRITIC, config)
    update(client, run, 1)
    client.save(run, 1, "one", SaveKind.CHECKPOINT).result()
    (config.run_directory / "one" / "optimizer.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"optimizer\.safetensors: cannot be read"):
        client.restore(run, 1, 1, "one").result()
    with pytest.raises(FailedPrecondition, match="was interrupted"):
        update(client, run, 2)
    assert client.restore(run, 0, 1, "").result() == 0
    assert update(client, run, 1).step == 1


def test_a_restore_with_an_invalid_directory_or_of_a_former_leader_is_refused(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    client = services.start(Role.ACTOR, make_config())
    update(client, run, 1, epoch=3)
    after = outputs(client)
    for step, directory in ((1, "../elsewhere"), (1, ""), (0, "one")):
        with pytest.raises(InvalidRequest, match="directory"):
            client.restore(run, step, 3, directory).result()
    with pytest.raises(FailedPrecondition, match="leader_epoch 2"):
        client.restore(run, 0, 2, "").result()
    assert outputs(client) == after
    assert update(client, run, 2, epoch=3).step == 2
