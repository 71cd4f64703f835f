"""Utilisation of the devices in a step: tokens per second, and the share of a measured peak that the models' arithmetic takes.

The model FLOP utilisation (MFU; Chowdhery et al. 2022, appendix B) counts the FLOPs that the models need, by
``quartet.planner.roofline``: neither padding nor what is computed again. A prompt that several responses share counts once. The
peak is that of a large matmul, see ``RoleStatus.peak_flops``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import structlog

from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.contract.update import Experience
from quartet.errors import ConfigError
from quartet.planner.roofline import UpdateWork, forward_flops, update_flops
from quartet.planner.workload import RoleWork, model_work
from quartet.services.orchestrator.rollout.generation import Generation
from quartet.services.orchestrator.service_clients import ServiceStatuses
from quartet.services.orchestrator.telemetry.step_profiler import CallSeconds

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of a step. ``distinct``: those that a model computes, with prompts that responses share once.

    ``context``: length of the sequence that a token is in, on average. ``generated``: of all trajectories, used or not.
    """

    distinct: int
    response: int
    context: float
    generated: int

    @classmethod
    def of(cls, experience: Experience, generated: int) -> StepTokens:
        """Return the tokens of the experience of a step."""
        batch = experience.batch
        lengths = batch.prompt_lengths.astype(np.int64) + batch.response_lengths
        # An id is RUN/STEP/PROMPT/SAMPLE.
        prompts = {
            id.rpartition("/")[0]: length for id, length in zip(experience.ids, batch.prompt_lengths, strict=True)
        }
        response, context = int(batch.response_lengths.sum()), float((lengths**2).sum() / lengths.sum())
        return cls(int(sum(prompts.values())) + response, response, context, generated)


class Utilisation:
    """Metrics of the utilisation of a run's devices."""

    def __init__(self, config: Config, statuses: ServiceStatuses, generation: Generation) -> None:
        """``statuses`` have the peak of each role. A model whose FLOPs cannot be counted has no MFU."""
        self._config, self._generation = config, generation
        self._peaks = {role: status.peak_flops for role, status in statuses.items()}
        self._models: dict[Role, RoleWork] = {}
        for key, model in config.models.items():
            role = Role(key.partition(".")[0])
            if role in TRAINED_ROLES:
                try:
                    self._models[role] = model_work(config, key, model)
                except ConfigError as error:
                    log.info("no MFU: the model cannot be counted", role=role, reason=str(error))

    def metrics(self, step: int, experience: Experience, generated_tokens: int, calls: CallSeconds) -> dict[str, float]:
        """Return the metrics of a step, by name. ``generated_tokens``: those of all trajectories, trained on or not."""
        tokens = StepTokens.of(experience, generated_tokens)
        return {**self._of_updates(step, tokens, calls), **self._of_generation(tokens, calls)}

    def _of_updates(self, step: int, tokens: StepTokens, calls: CallSeconds) -> dict[str, float]:
        metrics, algorithm = {}, self._config.algorithm
        for role in TRAINED_ROLES:
            if role is Role.ACTOR and algorithm.pretrains_values(step):
                continue
            if seconds := calls.busy.get((role, "update"), 0.0):
                seconds *= getattr(self._config.services, role).num_ranks
                metrics[f"tokens_per_second_{role}"] = algorithm.num_epochs * tokens.distinct / seconds
                if (work := self._models.get(role)) is not None and (peak := self._peaks[role]):
                    metrics[f"mfu_{role}"] = _update_flops(work, tokens, algorithm.num_epochs) / seconds / peak
        return metrics

    def _of_generation(self, tokens: StepTokens, calls: CallSeconds) -> dict[str, float]:
        in_generators = self._config.has_generators
        devices = self._devices_of_generator() if in_generators else self._config.services.actor.num_ranks
        seconds = devices * sum(value for (_, phase), value in calls.busy.items() if phase == "generate")
        if not seconds:
            return {}
        metrics = {"tokens_per_second_generation": tokens.generated / seconds}
        peak = self._generation.peak_flops() if in_generators else self._peaks[Role.ACTOR]
        if peak and (work := self._models.get(Role.ACTOR)) is not None:
            computed = tokens.distinct - tokens.response + tokens.generated
            flops = forward_flops(work.shape, computed, tokens.generated, tokens.context)
            metrics["mfu_generation"] = flops / seconds / peak
        return metrics

    def _devices_of_generator(self) -> int:
        rollout = self._config.rollout
        engine = rollout.vllm if rollout.engine == "vllm" else rollout.tensorrt_llm
        return engine.tensor_parallel_size if engine is not None else 1


def _update_flops(work: RoleWork, tokens: StepTokens, epochs: int) -> float:
    """Return the FLOPs that an update needs."""
    return update_flops(
        work.shape,
        UpdateWork(
            tokens=tokens.distinct,
            response_tokens=tokens.response,
            recomputed=0,
            context=tokens.context,
            epochs=epochs,
            mini_batches=1,
            micro_batch_tokens=0,
            checkpointing=False,
            has_logits=work.has_logits,
            parameters=work.parameters,
            trained=work.trained,
        ),
    )
