"""Checks of Update, Save and Restore: order, idempotence and fencing. They train the model, and restore the initial one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from quartet.buffer.connection import connect
from quartet.buffer.experience_store import ExperienceStore
from quartet.conformance.batch_checks import BatchMethod
from quartet.conformance.check import Check, within
from quartet.conformance.model_checks import ACTOR_LOG_PROBS, VALUES
from quartet.conformance.outcome import Skipped, expect
from quartet.conformance.target import Refusal, Target, TokenPair
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience
from quartet.v1 import update_pb2

UPDATE = "proto/quartet/v1/update.proto"
EPOCH = "proto/quartet/v1/update.proto: leader_epoch"
STEPS = 3
OTHER = "-other"
"""Ending of the name of the second run."""
LEARNING_RATE = 1e-3


@dataclass
class TrainedModel:
    """A trained model under test, in a run with a random name, whose experience is in the buffer."""

    target: Target
    run: str
    epoch: int
    sequences: list[TokenPair]

    @property
    def method(self) -> BatchMethod:
        """The method whose values show the weights."""
        return ACTOR_LOG_PROBS if self.target.role is Role.ACTOR else VALUES

    def outputs(self) -> NDArray[np.float32]:
        """Return values that show the weights."""
        return self.method.values(self.target, self.sequences)

    def request(self, step: int, epoch: int | None = None, run: str | None = None) -> Any:
        """Return a valid request for the update of a step."""
        request = update_pb2.UpdateRequest(
            run=run or self.run,
            step=step,
            leader_epoch=self.epoch if epoch is None else epoch,
            optimization=update_pb2.OptimizationSettings(
                num_epochs=1, num_mini_batches=1, learning_rate=LEARNING_RATE, max_grad_norm=1.0, seed=step
            ),
        )
        if self.target.role is Role.ACTOR:
            request.policy_loss.CopyFrom(
                update_pb2.PolicyLossSettings(
                    temperature=1.0,
                    clip_low=0.2,
                    clip_high=0.2,
                    kl_loss=update_pb2.KL_LOSS_NONE,
                    ratio_level=update_pb2.RATIO_LEVEL_TOKEN,
                    aggregation=update_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
                    policy_loss="clipped",
                    rollout_correction=update_pb2.RolloutCorrection(
                        level=update_pb2.CORRECTION_LEVEL_NONE, treatment=update_pb2.CORRECTION_TREATMENT_TRUNCATE
                    ),
                    old_log_probs=update_pb2.OLD_LOG_PROBS_TRAINER,
                )
            )
        else:
            request.value_loss.CopyFrom(update_pb2.ValueLossSettings())
        return request

    def update(self, step: int) -> Any:
        """Apply the update of a step, and return the response."""
        return self.target.call(self.target.stub.Update, self.request(step))

    def refused(self, request: Any, code: grpc.StatusCode, what: str) -> Refusal:
        """Return the error of an update that must fail with ``code``. Raises Violation."""
        before = self.target.status().policy_version
        refusal = self.target.refusal(self.target.stub.Update, request)
        expect(refusal.code is code, f"{what} is refused with {refusal}; expected {code.name}")
        after = self.target.status().policy_version
        expect(before == after, f"{what} was refused, but policy_version went from {before} to {after}")
        return refusal

    def restore(self) -> Any:
        """Restore the initial model."""
        request = update_pb2.RestoreRequest(run=self.run, step=0, leader_epoch=self.epoch)
        return self.target.call(self.target.stub.Restore, request)


@contextmanager
def trained_model(target: Target) -> Iterator[TrainedModel]:
    """Yield the model of a service that has taken no updates, with experience of STEPS steps in the buffer.

    Restores the initial model at the end. Raises Skipped if the options do not allow it, or the service has taken updates.
    """
    url = target.limits.buffer_url
    if url is None:
        raise Skipped("needs the service's buffer; give --buffer")
    status = target.status()
    if status.policy_version:
        raise Skipped(
            f"the model has taken {status.policy_version} updates, of run {status.run}; start a fresh service"
        )
    run = f"conformance-{secrets.token_hex(4)}"
    client = connect(url)
    # The second run has experience, too: a service must refuse its updates for another reason than missing experience.
    stores = [ExperienceStore(client, url, name) for name in (run, f"{run}{OTHER}")]
    model = TrainedModel(target, run, int(status.leader_epoch) + 1, target.sequences([(3, 4), (2, 6), (1, 1), (4, 2)]))
    try:
        for store, name in zip(stores, (run, f"{run}{OTHER}"), strict=True):
            for step in range(1, STEPS + 1):
                store.seal(_experience(model, name, step))
        yield model
    finally:
        try:
            if target.status().policy_version:
                model.restore()
        finally:
            for store in stores:
                store.keep_only([])
            client.close()


def _experience(model: TrainedModel, run: str, step: int) -> Experience:
    """Return experience whose advantages differ from token to token."""
    sequences = model.sequences
    tokens = sum(len(response) for _, response in sequences)
    wave = np.sin(np.arange(tokens, dtype=np.float32) + step)
    old = np.full(tokens, -1.0, np.float32) if model.target.role is not Role.ACTOR else model.outputs()
    return Experience(
        run=run,
        step=step,
        policy_version=step - 1,
        ids=tuple(f"{run}/{step}/{number}/0" for number in range(len(sequences))),
        batch=TokenBatch(
            np.concatenate([part for pair in sequences for part in pair]),
            np.array([len(prompt) for prompt, _ in sequences], np.int32),
            np.array([len(response) for _, response in sequences], np.int32),
        ),
        scores=np.arange(len(sequences), dtype=np.float32),
        log_probs=old,
        reference_log_probs=old,
        values=np.zeros(tokens, np.float32),
        advantages=wave,
        returns=wave + 1,
        actor_mask=np.ones(tokens, np.float32),
    )


def _applies(model: TrainedModel) -> None:
    before = model.outputs()
    response = model.update(1)
    expect(response.step == 1, f"step of the response is {response.step}; expected 1")
    expect(response.policy_version == 1, f"policy_version of the response is {response.policy_version}; expected 1")
    status = model.target.status()
    shown = (status.policy_version, status.step, status.run)
    expect(shown == (1, 1, model.run), f"the status has version, step and run {shown}; expected {(1, 1, model.run)}")
    expect((before != model.outputs()).any(), "the update changed no value; expected another model")


def _metrics(model: TrainedModel) -> None:
    metrics = dict(model.update(1).metrics)
    names = ["optimizer_steps", "skipped_steps", "grad_norm", "learning_rate"]
    names.append("policy_loss" if model.target.role is Role.ACTOR else "value_loss")
    missing = [name for name in names if name not in metrics]
    expect(not missing, f"the metrics lack {', '.join(missing)}")
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    expect(not bad, f"the metrics {', '.join(bad)} are not finite")
    expect(metrics["optimizer_steps"] == 1, f"optimizer_steps is {metrics['optimizer_steps']}; expected 1")


def _idempotent(model: TrainedModel) -> None:
    first, after = model.update(1), model.outputs()
    second = model.update(1)
    expect(first == second, "a repeated update has another response; expected the recorded one")
    expect((after == model.outputs()).all(), "a repeated update changed the model; expected no change")
    expect(model.target.status().policy_version == 1, "a repeated update was counted again")


def _order(model: TrainedModel) -> None:
    model.refused(model.request(2), grpc.StatusCode.FAILED_PRECONDITION, "an update of step 2 before step 1")
    model.update(1)
    model.update(2)
    model.refused(model.request(1), grpc.StatusCode.FAILED_PRECONDITION, "an update of step 1 after step 2")


def _other_run(model: TrainedModel) -> None:
    model.update(1)
    request = model.request(2, run=f"{model.run}{OTHER}")
    model.refused(request, grpc.StatusCode.FAILED_PRECONDITION, "an update of another run")


def _missing_experience(model: TrainedModel) -> None:
    for step in range(1, STEPS + 1):
        model.update(step)
    before = model.outputs()
    model.refused(model.request(STEPS + 1), grpc.StatusCode.FAILED_PRECONDITION, "a step without experience")
    expect((before == model.outputs()).all(), "an update without experience changed the model")


def _fencing(model: TrainedModel) -> None:
    model.update(1)
    newer = model.request(1, epoch=model.epoch + 5)
    model.target.call(model.target.stub.Update, newer)
    stale = model.refused(
        model.request(2), grpc.StatusCode.FAILED_PRECONDITION, "an update with a lower leader_epoch than before"
    )
    model.epoch += 5
    expect(
        stale.reason in ("", "StaleLeaderEpoch"), f"its ErrorInfo.reason is {stale.reason}; expected StaleLeaderEpoch"
    )
    shown = model.target.status().leader_epoch
    expect(shown == model.epoch, f"leader_epoch of the status is {shown}; expected {model.epoch}")


def _fenced_restore(model: TrainedModel) -> None:
    model.epoch += 1
    model.update(1)
    request = update_pb2.RestoreRequest(run=model.run, step=0, leader_epoch=model.epoch - 1)
    refusal = model.target.refusal(model.target.stub.Restore, request)
    expect(
        refusal.code is grpc.StatusCode.FAILED_PRECONDITION,
        f"a restore with a lower leader_epoch is refused with {refusal}; expected FAILED_PRECONDITION",
    )
    expect(model.target.status().policy_version == 1, "a refused restore changed policy_version")


def _restore(model: TrainedModel) -> None:
    before = model.outputs()
    model.update(1)
    response = model.restore()
    expect(response.policy_version == 0, f"policy_version of the response is {response.policy_version}; expected 0")
    expect((before == model.outputs()).all(), "the restored initial model has other values than at the start")
    first = model.update(1)
    expect(first.policy_version == 1, "the update after a restore is not the first one")


def _invalid(model: TrainedModel) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    other = model.request(1)
    if model.target.role is Role.ACTOR:
        other.value_loss.CopyFrom(update_pb2.ValueLossSettings())
    else:
        other.policy_loss.CopyFrom(update_pb2.PolicyLossSettings(temperature=1.0))
    model.refused(other, invalid, "the loss of the other role")
    none = model.request(1)
    none.ClearField("policy_loss" if model.target.role is Role.ACTOR else "value_loss")
    model.refused(none, invalid, "an update without a loss")
    many = model.request(1)
    many.optimization.num_epochs = 1001
    model.refused(many, invalid, "an update of 1001 epochs")
    nan = model.request(1)
    nan.optimization.learning_rate = float("nan")
    model.refused(nan, invalid, "a learning rate that is NaN")
    if model.target.role is Role.ACTOR:
        unknown = model.request(1)
        unknown.policy_loss.parameters["no such parameter"] = 1.0
        model.refused(unknown, invalid, "an unknown parameter of the clipped policy loss")


def _save(model: TrainedModel) -> None:
    request = update_pb2.SaveRequest(
        run=model.run, directory=f"{model.run}/model", kind=update_pb2.SAVE_KIND_MODEL, leader_epoch=model.epoch
    )
    response = model.target.call(model.target.stub.Save, request)
    expect(response.files, "a save has no files")
    for file in response.files:
        inside = file.path.startswith(f"{request.directory}/") and ".." not in file.path.split("/")
        expect(inside, f"the saved file {file.path} is not in {request.directory}")
        expect(re.fullmatch("[0-9a-f]{64}", file.sha256), f"the saved file {file.path} has no SHA-256")


def _confined(model: TrainedModel) -> None:
    for directory in ("../outside", "/tmp/outside", "a/../../outside", ""):  # noqa: S108 - the service must refuse it
        request = update_pb2.SaveRequest(
            run=model.run, directory=directory, kind=update_pb2.SAVE_KIND_MODEL, leader_epoch=model.epoch
        )
        refusal = model.target.refusal(model.target.stub.Save, request)
        expect(
            refusal.code is grpc.StatusCode.INVALID_ARGUMENT,
            f"a save into {directory!r} is refused with {refusal}; expected INVALID_ARGUMENT",
        )


_LISTED: list[tuple[str, str, str, Callable[[TrainedModel], None]]] = [
    ("update.applies", "An update changes the model, and counts as one.", UPDATE, _applies),
    ("update.metrics", "The response has the metrics of the update; all are finite.", UPDATE, _metrics),
    ("update.idempotent", "A repeated update gets the same response and changes nothing.", UPDATE, _idempotent),
    ("update.order", "Steps rise by one; another step is FAILED_PRECONDITION.", UPDATE, _order),
    ("update.other_run", "An update of another run is FAILED_PRECONDITION.", UPDATE, _other_run),
    (
        "update.missing_experience",
        "A step without sealed experience is FAILED_PRECONDITION, and changes nothing.",
        "proto/quartet/v1/experience.proto",
        _missing_experience,
    ),
    ("update.fencing", "An update with a lower leader_epoch than the highest seen is refused.", EPOCH, _fencing),
    ("update.invalid", "Settings out of range, and the loss of another role, are INVALID_ARGUMENT.", UPDATE, _invalid),
    ("restore.initial", "Restore of step 0 brings the initial model back.", UPDATE, _restore),
    (
        "restore.fencing",
        "A restore with a lower leader_epoch than the highest seen is refused.",
        EPOCH,
        _fenced_restore,
    ),
    ("save.files", "A save lists its files with their SHA-256, below the requested directory.", UPDATE, _save),
    ("save.confined", "A directory outside the run's is INVALID_ARGUMENT.", UPDATE, _confined),
]


def update_checks() -> list[Check]:
    """Return the checks of a trained model."""
    return [
        Check(name, requirement, source, within(trained_model, check), changes_state=True)
        for name, requirement, source, check in _LISTED
    ]
