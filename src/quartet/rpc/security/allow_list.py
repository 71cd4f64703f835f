"""The allow list: which role may call which method. A call that is not listed is refused.

The certificate names the caller (see ``quartet.rpc.security.credentials``). Without certificates, calls are accepted on loopback
only, or in a network that the config trusts explicitly; every caller may then call every method.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.contract.status import Role

GATEWAY = "gateway"
"""The gateway."""
OPERATOR = "operator"
"""The `quartet` command."""
PROMETHEUS = "prometheus"
"""Prometheus. It scrapes metrics and calls no method."""
REDIS = "redis"
"""The rollout buffer; it calls no method."""

PROCESSES = (*(str(role) for role in Role), GATEWAY, OPERATOR, PROMETHEUS, REDIS)
"""Every process that has a certificate."""

_ORCHESTRATOR = frozenset({str(Role.ORCHESTRATOR)})
_GENERATORS = frozenset({str(Role.GENERATOR)})
_REWARDS = frozenset({str(Role.REWARD)})
"""A reward service may use another one as its source."""
_EPISODES = frozenset({str(Role.ACTOR), str(Role.GENERATOR)})
_USERS = frozenset({GATEWAY, OPERATOR})
_ANY_CALLER = _ORCHESTRATOR | _USERS

CALLERS: dict[str, frozenset[str]] = {
    "quartet.v1.GenerationService/Generate": _ORCHESTRATOR,
    "quartet.v1.GenerationService/UpdateWeights": _ORCHESTRATOR,
    "quartet.v1.ActorService/LogProbs": _ORCHESTRATOR,
    "quartet.v1.ActorService/Update": _ORCHESTRATOR,
    "quartet.v1.ActorService/Save": _ORCHESTRATOR,
    "quartet.v1.ActorService/Restore": _ORCHESTRATOR,
    "quartet.v1.CriticService/Values": _ORCHESTRATOR,
    "quartet.v1.CriticService/Update": _ORCHESTRATOR,
    "quartet.v1.CriticService/Save": _ORCHESTRATOR,
    "quartet.v1.CriticService/Restore": _ORCHESTRATOR,
    "quartet.v1.RewardService/Score": _ORCHESTRATOR | _REWARDS,
    "quartet.v1.ReferenceService/LogProbs": _ORCHESTRATOR,
    "quartet.v1.EnvironmentService/Reset": _EPISODES,
    "quartet.v1.EnvironmentService/Step": _EPISODES,
    "quartet.v1.EnvironmentService/RestoreSession": _EPISODES,
    "quartet.v1.EnvironmentService/CloseSession": _EPISODES,
    "quartet.v1.EnvironmentService/RunAgent": _EPISODES,
    "quartet.v1.OrchestratorService/GetProgress": _USERS,
    "quartet.v1.OrchestratorService/WatchProgress": _USERS,
    "quartet.v1.OrchestratorService/Stop": _USERS,
    "quartet.v1.OrchestratorService/Pause": _USERS,
    "quartet.v1.OrchestratorService/Resume": _USERS,
    "quartet.v1.OrchestratorService/Checkpoint": _USERS,
    "quartet.v1.OrchestratorService/RollBack": _USERS,
    "quartet.v1.OrchestratorService/GetSettings": _USERS,
    "quartet.v1.OrchestratorService/ChangeSettings": _USERS,
    "quartet.v1.OrchestratorService/GetGenerators": _USERS,
    "quartet.v1.OrchestratorService/Profile": _USERS,
    "quartet.v1.ProfileService/StartProfile": _ORCHESTRATOR,
    "quartet.v1.ProfileService/TakeProfile": _ORCHESTRATOR,
    "quartet.v1.WeightService/GetWeights": _GENERATORS,
    "quartet.v1.StatusService/GetStatus": _ANY_CALLER | _REWARDS,
    "grpc.health.v1.Health/Check": _ANY_CALLER,
    "grpc.health.v1.Health/Watch": _ANY_CALLER,
}
"""The processes that may call each method."""

RANK_CALLERS: dict[str, frozenset[str]] = {"quartet.v1.GenerationService/Generate": frozenset({str(Role.ACTOR)})}
"""The processes that may call each method of a rank above 0 of an actor: rank 0."""


def may_call(processes: frozenset[str], method: str, callers: Mapping[str, frozenset[str]] = CALLERS) -> bool:
    """Return whether one of the ``processes`` in a certificate may call ``package.Service/Method``."""
    return bool(processes & callers.get(method, frozenset()))
