"""Growth of a step's duration with the number of prompts, the length of responses and the size of the model.

Uses one process, one thread, random weights, and responses of the maximum length. A step uses REINFORCE with a reward that
takes no time. It runs generation, the reference's log-probs, advantages and an update of one epoch in sequence; `python -m
benchmarks orchestration` measures services and buffer. Writes the results below build/ and the tables into
docs/evidence/performance.md.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, publish
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.arrays import FloatArray
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TokenBatch, Trajectory, TrajectoryId
from quartet.contract.update import Experience
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.services.orchestrator.algorithm.experience import prepare_step
from quartet.services.orchestrator.algorithm.update_request import optimization_at, policy_loss_of
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory

VOCABULARY = 2_048
PROMPT = 8
"""Tokens of each prompt."""
MODELS = {"1M": (128, 2), "5M": (256, 5), "20M": (512, 6), "60M": (768, 8)}
"""Width and layers of a Llama, by its approximate number of parameters."""
PHASES = ("generation", "update", "step")


@dataclass(frozen=True)
class Point:
    """Size of a step: ``prompts``, with one response of ``tokens`` tokens each, and a model."""

    prompts: int = 64
    tokens: int = 32
    model: str = "1M"


AXES: dict[str, tuple[Point, ...]] = {
    "prompts": tuple(Point(prompts=count) for count in (16, 32, 64, 128, 256, 512)),
    "tokens": tuple(Point(tokens=count) for count in (16, 32, 64, 128, 256)),
    "model": tuple(Point(prompts=16, model=name) for name in MODELS),
}
"""Points of each axis, by the name of the field that grows. The other fields are constant."""


@dataclass(frozen=True)
class Result:
    """Parameters of the model at one point, and the median seconds of each phase."""

    point: Point
    parameters: int
    seconds: dict[str, float]

    def rate(self, phase: str) -> float:
        """Return the response tokens per second of a phase."""
        return self.point.prompts * self.point.tokens / self.seconds[phase]

    def growth(self, first: Result, axis: str, phase: str) -> float:
        """Return the seconds over those of ``first`` scaled by the size: 1 is proportional growth, less is better."""
        return self.seconds[phase] / first.seconds[phase] * first.size(axis) / self.size(axis)

    def size(self, axis: str) -> int:
        """Return the size along an axis."""
        return self.parameters if axis == "model" else int(getattr(self.point, axis))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("growth", __doc__)
    add_shared(parser, "build/growth", rounds=3, threads=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    host = machine.describe()
    results = {axis: [measure(point, options.rounds) for point in points] for axis, points in AXES.items()}
    report = {
        "machine": host,
        "results": {axis: [asdict(result) for result in measured] for axis, measured in results.items()},
    }
    publish(parser, options, report, tables(results, host, options.threads))
    return 0


def policy(name: str) -> Any:
    """Return a Llama with random weights from a fixed seed."""
    width, layers = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=-(-8 * width // 48) * 16,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def measure(point: Point, rounds: int) -> Result:
    """Measure steps at one point, after a warm-up step."""
    model = policy(point.model)
    step = Step(point, model)
    timed = [step.seconds(number) for number in range(rounds + 1)][1:]
    seconds = {phase: statistics.median(each[phase] for each in timed) for phase in PHASES}
    return Result(point, sum(parameter.numel() for parameter in model.parameters()), seconds)


class Step:
    """Steps on one model at one point."""

    def __init__(self, point: Point, model: Any) -> None:
        self._point, self._config = point, _config(point)
        self._model, self._reference = model, copy.deepcopy(model)
        self._engine = TorchEngine(model, frozenset(), self._config.rollout.max_concurrent_sequences)
        self._optimizer = create_optimizer(model, self._config.actor.learning_rate)
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (point.prompts, PROMPT)).astype(np.int32)
        self._prompts = list(ids)

    def seconds(self, step: int) -> dict[str, float]:
        """Run a step. Return the seconds of each phase."""
        start = time.perf_counter()
        generated = self._generate(step)
        generation_end = time.perf_counter()
        experience = self._experience(generated, step)
        update_start = time.perf_counter()
        actor = self._config.actor
        settings = optimization_at(self._config, actor, 1)
        loss = policy_loss_of(self._config.algorithm, self._config.rollout)
        update_policy(self._model, self._optimizer, experience, settings, loss, actor.max_forward_tokens)
        end = time.perf_counter()
        return {"generation": generation_end - start, "update": end - update_start, "step": end - start}

    def _generate(self, step: int) -> list[Trajectory]:
        requests = [
            GenerationRequest(TrajectoryId("growth", step, index, 0), ids) for index, ids in enumerate(self._prompts)
        ]
        sampling = SamplingParameters(self._point.tokens, ignore_eos=True)
        return self._engine.trajectories(requests, sampling, 0)

    def _experience(self, generated: Sequence[Trajectory], step: int) -> Experience:
        tokens, limit = self._point.tokens, self._config.reference.micro_batch_tokens
        rows: list[FloatArray] = []
        for first in range(0, len(generated), self._config.rollout.score_batch_size):
            batch = generated[first : first + self._config.rollout.score_batch_size]
            log_probs = response_log_probs(self._reference, TokenBatch.of(batch), 1.0, limit)
            rows += np.split(log_probs, len(batch))
        scored = [
            ScoredTrajectory(item, float(item.response_ids[-1] % 7), row, np.zeros(tokens, np.float32))
            for item, row in zip(generated, rows, strict=True)
        ]
        return prepare_step("growth", step, step, scored, self._config.algorithm, None, tokens).experience


def _config(point: Point) -> Config:
    return parse_config(
        {
            "run": {"name": "growth", "steps": 1},
            "data": {"prompts": "none"},
            "algorithm": {"estimator": "reinforce", "num_epochs": 1},
            "rollout": {"prompts_per_step": point.prompts, "max_response_tokens": point.tokens},
            "actor": {"model": "random", "learning_rate": 1e-5},
            "reward": {"model": "none"},
        },
        "benchmarks.growth",
    )


def tables(results: dict[str, list[Result]], host: str, threads: int) -> str:
    """Return a table for each axis."""
    lines = [
        f"{host}; {threads} of {os.cpu_count()} cores, float32, prompts of {PROMPT} tokens. tokens/s counts response tokens. "
        "The growth compares the seconds with those of the first row, scaled by the size: 1 is proportional, less is better."
    ]
    for axis, measured in results.items():
        first = measured[0]
        lines += ["", f"| {axis} | at | " + " | ".join(f"{phase}, s | tokens/s | growth" for phase in PHASES) + " |"]
        lines.append("|" + "---|" * (2 + 3 * len(PHASES)))
        for result in measured:
            point = result.point
            others = {"prompts": f"{point.prompts} prompts", "tokens": f"{point.tokens} tokens", "model": point.model}
            constant = ", ".join(text for name, text in others.items() if name != axis)
            cells = [
                f"{result.seconds[phase]:.3f} | {result.rate(phase):,.0f} | **{result.growth(first, axis, phase):.2f}**"
                for phase in PHASES
            ]
            shown = f"{result.parameters / 1e6:.1f}M" if axis == "model" else str(result.size(axis))
            lines.append(f"| {shown} | {constant} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
