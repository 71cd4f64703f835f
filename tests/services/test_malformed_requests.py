"""A malformed request fails with INVALID_ARGUMENT and the name of the field, and the service continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from quartet.buffer.connection import Redis, connect
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.codec.messages import to_message
from quartet.config.root import Config
from quartet.contract.status import MODEL_ROLES, Role
from quartet.contract.weights import SaveKind
from quartet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    critic_pb2,
    critic_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    tensor_pb2,
    trajectory_pb2,
    update_pb2,
)
from tests.buffer.samples import experience
from tests.contract.tensors import tensor_message
from tests.every_case import every_case
from tests.services.model_services import Services
from tests.unit.models import tiny

RUN = "malformed"
NAN = float("nan")


def ints(*values: int) -> tensor_pb2.Tensor:
    return tensor_message(np.array(values, np.int32))


def floats(*values: float) -> tensor_pb2.Tensor:
    return tensor_message(np.array(values, np.float32))


def valid_batch() -> trajectory_pb2.TokenBatch:
    return to_message(trajectory_pb2.TokenBatch, tiny.batch([2, 3], [4, 1]))


def valid_requests() -> dict[str, Any]:
    """Return a valid request for every RPC of the four services."""
    optimization = update_pb2.OptimizationSettings(num_epochs=1, num_mini_batches=1, learning_rate=1e-3)
    policy_loss = update_pb2.PolicyLossSettings(
        temperature=1.0,
        clip_low=0.2,
        clip_high=0.2,
        kl_loss=update_pb2.KL_LOSS_NONE,
        ratio_level=update_pb2.RATIO_LEVEL_TOKEN,
        aggregation=update_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
        policy_loss="clipped",
        rollout_correction=update_pb2.RolloutCorrection(
            level=update_pb2.CORRECTION_LEVEL_TOKEN, treatment=update_pb2.CORRECTION_TREATMENT_TRUNCATE, upper=2.0
        ),
        old_log_probs=update_pb2.OLD_LOG_PROBS_TRAINER,
    )
    update = {"run": RUN, "step": 1, "leader_epoch": 1, "optimization": optimization}
    save = {"run": RUN, "leader_epoch": 1, "directory": "saved", "kind": update_pb2.SAVE_KIND_MODEL}
    return {
        "generation.Generate": generation_pb2.GenerateRequest(
            run=RUN,
            step=1,
            leader_epoch=1,
            prompt_ids=ints(5, 6, 7),
            prompt_lengths=ints(1, 2),
            prompts=[3, 9],
            trajectory_prompts=[0, 0, 1, 1],
            trajectory_samples=[0, 1, 0, 1],
            sampling=trajectory_pb2.SamplingParameters(max_response_tokens=3, temperature=1.0, top_p=1.0),
            seed=1,
        ),
        "actor.LogProbs": actor_pb2.ActorServiceLogProbsRequest(batch=valid_batch(), temperature=1.0),
        "actor.Update": update_pb2.UpdateRequest(**update, policy_loss=policy_loss),
        "actor.Save": update_pb2.SaveRequest(**save),
        "critic.Values": critic_pb2.ValuesRequest(batch=valid_batch()),
        "critic.Update": update_pb2.UpdateRequest(**update, value_loss=update_pb2.ValueLossSettings()),
        "critic.Save": update_pb2.SaveRequest(**save),
        "reward.Score": reward_pb2.ScoreRequest(batch=valid_batch()),
        "reference.LogProbs": reference_pb2.ReferenceServiceLogProbsRequest(batch=valid_batch(), temperature=1.0),
    }


Change = Callable[[Any], None]


def put(path: str, value: Any) -> Change:
    """Return a change that sets the field at this path."""

    def change(message: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, tensor_pb2.Tensor):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, list):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)

    return change


def drop(name: str) -> Change:
    return lambda message: message.ClearField(name)


def all_of(*changes: Change) -> Change:
    def apply(message: Any) -> None:
        for change in changes:
            change(message)

    return apply


BATCH: dict[str, tuple[Change, str]] = {
    "no batch": (drop("batch"), "batch.token_ids: expected dtype int32, got none"),
    "ids as floats": (put("batch.token_ids", floats(*range(10))), "token_ids: expected dtype int32"),
    "lengths as floats": (put("batch.response_lengths", floats(4, 1)), "response_lengths: expected dtype int32"),
    "too few ids": (put("batch.token_ids", ints(1, 2, 3)), "token_ids"),
    "too many lengths": (put("batch.prompt_lengths", ints(2, 3, 1)), "of the same length"),
    "an empty response": (put("batch.response_lengths", ints(5, 0)), "at least one token"),
    "a negative length": (put("batch.prompt_lengths", ints(6, -1)), "at least one token"),
    "an id outside the vocabulary": (put("batch.token_ids", ints(*range(9), tiny.VOCABULARY)), "0..60"),
    "a negative id": (put("batch.token_ids", ints(*range(9), -1)), "got -1"),
    "a sequence longer than the model's positions": (
        all_of(
            put("batch.token_ids", ints(*[1] * 70)),
            put("batch.prompt_lengths", ints(1)),
            put("batch.response_lengths", ints(69)),
        ),
        "positions for 64",
    ),
    "bytes that do not fit the shape": (put("batch.token_ids.data", b"\0" * 7), "needs 40 bytes, got 7"),
    "a shape beyond memory": (put("batch.token_ids.shape", [2**60]), "bytes, got 40"),
}
TEMPERATURE: dict[str, tuple[Change, str]] = {
    f"temperature {value}": (put("temperature", value), "temperature")
    for value in (0.0, -1.0, NAN, float("inf"), 1e300)
}
GENERATE: dict[str, tuple[Change, str]] = {
    "no run": (drop("run"), "expected a run"),
    "no trajectories": (all_of(drop("trajectory_prompts"), drop("trajectory_samples")), "0 trajectory_prompts and 0"),
    "fewer samples than trajectories": (
        put("trajectory_samples", [0]),
        "4 trajectory_prompts and 1 trajectory_samples",
    ),
    "a trajectory twice": (put("trajectory_samples", [0, 0, 0, 1]), "a pair of prompt and sample repeats"),
    "a trajectory of no prompt": (put("trajectory_prompts", [0, 0, 1, 2]), "below the number of prompts, 2"),
    "a digest of another size": (put("weights_digest", b"123"), "weights_digest: expected 16 bytes, got 3"),
    "no prompts": (all_of(drop("prompts"), put("prompt_lengths", ints())), "expected a run"),
    "a prompt twice": (put("prompts", [3, 3]), "expected distinct indices"),
    "fewer indices than prompts": (put("prompts", [3]), "prompt_lengths: expected 1 elements, got 2"),
    "an empty prompt": (put("prompt_lengths", ints(0, 3)), "prompts of 1 token or more"),
    "a negative length": (put("prompt_lengths", ints(-1, 4)), "prompts of 1 token or more"),
    "too few ids": (put("prompt_ids", ints(5)), "prompt_ids: expected 3 elements, got 1"),
    "ids as floats": (put("prompt_ids", floats(5, 6, 7)), "prompt_ids: expected dtype int32"),
    "an id outside the vocabulary": (put("prompt_ids", ints(5, 6, tiny.VOCABULARY)), "0..60"),
    "a negative id": (put("prompt_ids", ints(5, 6, -1)), "0..60"),
    "too many trajectories": (
        all_of(put("trajectory_prompts", [0] * 65_537), put("trajectory_samples", list(range(65_537)))),
        "expected the same number of both, 1 to 65536",
    ),
    "no sampling": (drop("sampling"), "max_response_tokens"),
    "no room for a response": (put("sampling.max_response_tokens", 0), "max_response_tokens"),
    "a response beyond the model's positions": (put("sampling.max_response_tokens", 63), "positions for 64"),
    "a response beyond memory": (put("sampling.max_response_tokens", 2**32 - 1), "expected 1 to 1048576"),
    "a negative temperature": (put("sampling.temperature", -1.0), "temperature"),
    "temperature NaN": (put("sampling.temperature", NAN), "temperature"),
    "top_p 0": (put("sampling.top_p", 0.0), "top_p"),
    "top_p NaN": (put("sampling.top_p", NAN), "top_p"),
}
UPDATE: dict[str, tuple[Change, str]] = {
    "no optimization": (drop("optimization"), "num_mini_batches 0"),
    "more mini-batches than sequences": (
        all_of(put("step", 2), put("optimization.num_mini_batches", 3)),
        "num_mini_batches 3: expected 1 to 2",
    ),
    "epochs without end": (put("optimization.num_epochs", 2**32 - 1), "num_epochs 4294967295: expected 0 to 1000"),
    "a negative learning rate": (put("optimization.learning_rate", -1.0), "learning_rate"),
    "a learning rate beyond single precision": (put("optimization.learning_rate", 1e300), "expected 0 to 1e+30"),
    "learning rate NaN": (put("optimization.learning_rate", NAN), "learning_rate"),
    "a negative gradient norm": (put("optimization.max_grad_norm", -1.0), "max_grad_norm"),
}
POLICY_LOSS: dict[str, tuple[Change, str]] = {
    "no loss": (drop("policy_loss"), "loss: expected policy_loss or value_loss"),
    "loss temperature 0": (put("policy_loss.temperature", 0.0), "temperature"),
    "a negative clip": (put("policy_loss.clip_low", -0.1), "clip_low"),
    "a clip beyond single precision": (put("policy_loss.clip_high", 1e300), "clip_high 1e+300: expected 0 to 1e+30"),
    "dual clip 1": (put("policy_loss.dual_clip", 1.0), "dual_clip"),
    "an unknown KL loss": (put("policy_loss.kl_loss", 9), "kl_loss 9"),
    "no ratio level": (put("policy_loss.ratio_level", 0), "ratio_level 0"),
    "an unknown aggregation": (put("policy_loss.aggregation", 9), "aggregation 9"),
    "no rollout correction": (
        lambda message: message.policy_loss.ClearField("rollout_correction"),
        "rollout_correction.level 0",
    ),
    "an unknown correction level": (put("policy_loss.rollout_correction.level", 9), "level 9"),
    "an unknown treatment": (put("policy_loss.rollout_correction.treatment", 9), "treatment 9"),
    "a negative weight bound": (put("policy_loss.rollout_correction.upper", -1.0), "upper"),
    "a lower bound above the upper one": (
        all_of(put("policy_loss.rollout_correction.lower", 3.0), put("policy_loss.rollout_correction.upper", 2.0)),
        "lower 3.0: expected at most upper 2.0",
    ),
    "no old log-probs": (put("policy_loss.old_log_probs", 0), "old_log_probs 0"),
    "a limit of NaN": (put("policy_loss.target_kl", NAN), "target_kl"),
    "an unknown parameter of the loss": (
        lambda message: message.policy_loss.parameters.update({"tau": 1.0}),
        "policy_loss_parameters.tau: policy loss clipped has no such parameter",
    ),
    "a parameter of NaN": (lambda message: message.policy_loss.parameters.update({"tau": NAN}), "parameters tau nan"),
    "many parameters": (
        lambda message: message.policy_loss.parameters.update({f"p{number}": 1.0 for number in range(33)}),
        "parameters: 33, expected at most 32",
    ),
    "no divisor": (
        put("policy_loss.aggregation", update_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM_NORM),
        "loss_divisor 0: expected more than 0",
    ),
}
SAVE: dict[str, tuple[Change, str]] = {
    **{
        f"directory {path!r}": (put("directory", path), "directory")
        for path in ("", ".", "..", "../x", "a/../../x", "/tmp/x", "a\\b")
    },
    "a directory below a file": (put("directory", "saved/config.json/x"), "saved/config.json is a file"),
    "a file for a directory": (put("directory", "saved/config.json"), "saved/config.json is a file"),
    "a name that no file may have": (put("directory", "x" * 300), "expected at most 1000 bytes, 200 in each name"),
    "a path that no file may have": (put("directory", "d/" * 1000), "directory of 2000 characters"),
    "a directory that fills the answer": (put("directory", "../" + "\u540d" * 100_000), "(100"),
    "no kind": (drop("kind"), "kind 0"),
    "an unknown kind": (put("kind", 9), "kind 9"),
}
CASES: dict[str, dict[str, tuple[Change, str]]] = {
    "generation.Generate": GENERATE,
    "actor.LogProbs": BATCH | TEMPERATURE,
    "actor.Update": UPDATE | POLICY_LOSS,
    "actor.Save": SAVE,
    "critic.Values": BATCH,
    "critic.Update": UPDATE
    | {
        "a negative clip": (put("value_loss.value_clip", -0.1), "value_clip"),
        "no loss": (drop("value_loss"), "loss: expected policy_loss or value_loss"),
        "the actor's loss": (
            lambda message: message.policy_loss.CopyFrom(valid_requests()["actor.Update"].policy_loss),
            "loss: expected ValueLossSettings, got PolicyLossSettings",
        ),
    },
    "critic.Save": SAVE,
    "reward.Score": BATCH,
    "reference.LogProbs": BATCH | TEMPERATURE,
}
STUBS: dict[str, Callable[[grpc.Channel], Any]] = {
    "actor": actor_pb2_grpc.ActorServiceStub,
    "generation": generation_pb2_grpc.GenerationServiceStub,
    "critic": critic_pb2_grpc.CriticServiceStub,
    "reward": reward_pb2_grpc.RewardServiceStub,
    "reference": reference_pb2_grpc.ReferenceServiceStub,
}


@pytest.fixture(scope="module")
def channels(
    session_services: Services, make_config: Callable[..., Config], redis_url: str, clients: dict[Role, Any]
) -> dict[str, grpc.Channel]:
    """Channels to four services, with sealed experience of steps 1 and 2, and to an actor that is never updated."""
    client = connect(redis_url)
    store = ExperienceStore(client, redis_url, RUN)
    for step in (1, 2):
        store.seal(experience(RUN, step))
    RolloutStream(client, redis_url, RUN).reset()
    client.close()
    config = make_config()
    results = {str(role): session_services.start(role, config).channel.grpc_channel for role in MODEL_ROLES}
    return {**results, "generation": clients[Role.ACTOR].channel.grpc_channel}


def call(channels: dict[str, grpc.Channel], method: str, request: Any) -> Any:
    service, name = method.split(".")
    response = getattr(STUBS[service](channels.get(method, channels[service])), name)(request, timeout=30)
    return list(response)[-1] if method == "generation.Generate" else response


@every_case(("method", "case"), [(method, case) for method, cases in CASES.items() for case in cases])
def test_a_malformed_request_is_refused_and_a_valid_one_after_it_succeeds(
    method: str, case: str, channels: dict[str, grpc.Channel]
) -> None:
    change, expected = CASES[method][case]
    request = valid_requests()[method]
    if method.endswith(("Update", "Save")):
        # After step 1, the service checks a request for step 2 and accepts a repeated step 1. The saved files make
        # directories below them invalid.
        call(channels, method, request)
    change(request)
    with pytest.raises(grpc.RpcError) as refused:
        call(channels, method, request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    assert expected in refused.value.details()
    assert "\n" not in refused.value.details()
    call(channels, method, valid_requests()[method])


@pytest.mark.parametrize("method", CASES)
def test_bytes_that_are_not_a_message_are_refused_and_a_valid_request_after_them_succeeds(
    method: str, channels: dict[str, grpc.Channel]
) -> None:
    service, name = method.split(".")
    path = f"/quartet.v1.{service.capitalize()}Service/{name}"
    raw = channels.get(method, channels[service]).unary_unary(path, lambda data: data, lambda data: data)  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as refused:
        raw(b"\xff\xff\xff", timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    call(channels, method, valid_requests()[method])


def test_every_rpc_refuses_an_empty_request(channels: dict[str, grpc.Channel]) -> None:
    for method, request in valid_requests().items():
        with pytest.raises(grpc.RpcError) as refused:
            call(channels, method, type(request)())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method


def test_the_largest_integers_are_accepted(channels: dict[str, grpc.Channel], redis_client: Redis) -> None:
    request = valid_requests()["generation.Generate"]
    request.run, request.step, request.seed = "large", 2**64 - 1, 2**64 - 1
    request.prompts[:] = [0, 2**64 - 1]
    request.sampling.top_k = 2**32 - 1
    assert call(channels, "generation.Generate", request).finished.trajectories == 4
    redis_client.delete("quartet:large:rollouts")


def test_a_save_outside_the_run_writes_nothing(services: Services, make_config: Callable[..., Config]) -> None:
    config = make_config()
    actor = services.start(Role.ACTOR, config)
    (config.run_directory / "logs").mkdir(parents=True)
    (config.run_directory / "link").symlink_to(config.run.directory)
    before = sorted(config.run.directory.rglob("*"))
    for path in (".", "..", "../other", "link/other"):
        with pytest.raises(Exception, match="directory"):
            actor.save("run", 1, path, SaveKind.MODEL).result()
    assert sorted(config.run.directory.rglob("*")) == before
