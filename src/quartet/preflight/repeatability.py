"""Reasons why the bits of a run depend on more than its config, seed and live changes, from what its engines declare."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from quartet.config.root import Config
from quartet.contract.generation import EngineProperties
from quartet.contract.status import Role
from quartet.engines.engine import find_engine
from quartet.errors import ConfigError

_OTHER_ENGINE = "set rollout.engine: torch and generate on a CPU"


def repeatability_notes(config: Config, engines: Collection[EngineProperties]) -> list[str]:
    """Return one line for each reason why the bits of a run depend on the number or timing of its generators.

    ``engines``: those that generate for the run. Each line names the reason, the effect, and what to set.
    """
    return list(dict.fromkeys(_notes(config, engines)))


def moved_note(before: Collection[EngineProperties], now: Collection[EngineProperties]) -> str:
    """Return a line if a run that resumes computes other bits than at its start, or "". ``before``: the engines at the start."""
    old, new = ({each.trial_digest: each.trial for each in engines if each.trial_digest} for engines in (before, now))
    if not old or not new or new.keys() <= old.keys():
        return ""
    return (
        f"this run started with engines that round differently (trials {'; '.join(sorted(set(old.values())))}; now "
        f"{'; '.join(sorted(set(new.values())))}): it ends with another policy than without the interruption; resume it on the "
        "kind of machine, and with the version of torch, of its start if the bits matter"
    )


def _notes(config: Config, engines: Collection[EngineProperties]) -> Iterator[str]:
    if config.has_traffic:
        return  # Users do not repeat themselves.
    for engine in engines:
        name = engine.name.split(" ")[0]
        # A Triton server names its model, and so whether it reads seeds, at the first generation.
        if not engine.seeded and engine.name != "triton":
            yield (
                f"engine {engine.name} draws random numbers that no seed decides: a repeated or recovered run ends with another "
                f"policy; {_remedies(name)[0]}"
            )
        if not engine.batch_invariant:
            trial = f" (trial {engine.trial})" if engine.trial else ""
            yield (
                f"engine {engine.name} is not batch-invariant{trial}: {_effect(config)}; {_batch_remedy(config, name, engine)}"
            )
    if config.rollout.in_flight_updates:
        yield (
            "rollout.in_flight_updates: the times at which updates arrive decide which weights generate a token, so a repeated "
            "run ends with another policy; set it to false for runs that repeat"
        )
    for role in (Role.ACTOR, Role.CRITIC):
        if getattr(config, role).optimizer.kind == "muon" and (role is Role.ACTOR or config.has_critic):
            yield (
                f"{role}.optimizer.kind muon: torch's Muon computes in bfloat16, which processors with other instructions round "
                "differently, so another kind of processor ends with another policy; set ONEDNN_MAX_CPU_ISA=AVX2 in the "
                "environment of all services, or kind adamw"
            )
    measured = {
        engine.trial_digest: engine.trial for engine in engines if engine.batch_invariant and engine.trial_digest
    }
    if len(measured) > 1:
        yield (
            f"the generators round differently (trials {'; '.join(sorted(set(measured.values())))}): the number of generators, "
            "and which of them generates a response, change the last bits of the policy; use machines of one kind, with the "
            "same version of torch, or set ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 in the "
            "environment of all generators"
        )


def _remedies(name: str) -> tuple[str, str]:
    """Return what to set so that an engine is seeded, and batch-invariant. A service in another language may name any engine."""
    try:
        kind = find_engine(name)
    except ConfigError:
        return _OTHER_ENGINE, _OTHER_ENGINE
    return kind.seed_remedy or _OTHER_ENGINE, kind.batch_remedy or _OTHER_ENGINE


def _effect(config: Config) -> str:
    """Return what changes the bits with an engine that is not batch-invariant."""
    if config.has_generators:
        return (
            "the number of generators, the times at which they become free, and the loss of one change the last bits of a "
            "response, so a repeated or recovered run ends with another policy"
        )
    if config.has_environment:
        return (
            "the times at which the environment answers change the last bits of a response, so a repeated or recovered run ends "
            "with another policy"
        )
    return (
        "this run repeats with the actor's own engine, but with generators (rollout.generators) or another "
        "rollout.max_concurrent_sequences it ends with another policy"
    )


def _batch_remedy(config: Config, name: str, engine: EngineProperties) -> str:
    if name != "torch":
        return _remedies(name)[1]
    remedy = torch_remedy(engine)
    if not config.has_generators or config.has_environment:
        return remedy
    return f"{remedy}, or set rollout.generators: 0 and services.generators: [], so that the actor generates"


def torch_remedy(engine: EngineProperties) -> str:
    """Return what to set so that a torch engine passes its trial."""
    if engine.trial.startswith("failed"):
        return "set MKL_CBWR=AVX2,STRICT in the environment of all services, and see what `quartet doctor` then prints"
    if engine.trial.startswith("not run: on a GPU"):
        return "generate on a CPU"
    return "use a dense model without sliding windows"
