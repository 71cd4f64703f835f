"""Construction of what sessions need, from the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from quartet.buffer.traffic import TrafficStore
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.root import Config
from quartet.data.chat_template import TemplateInputs
from quartet.data.evaluation import run_sampling
from quartet.engines.engine import ServedModel
from quartet.errors import ConfigError
from quartet.rpc.agent_client import AgentClient
from quartet.rpc.limits import MAX_CALL_SECONDS
from quartet.rpc.security.credentials import Credentials
from quartet.services.generator.sessions.session import SessionLimits
from quartet.services.generator.sessions.sessions import AgentAccess
from quartet.services.generator.sessions.texts import PolicyTexts
from quartet.system.secret_files import CERTIFICATE, KEY, read_tokens

if TYPE_CHECKING:
    from quartet.services.generator.sessions.app import SessionServer
    from quartet.services.generator.sessions.traffic import TrafficSessions

log = structlog.get_logger()

WAIT_FRACTION = 0.8
"""Fraction of the time limit of a call after which it ends by itself, if no session comes: its generator is not lost."""


def agent_access(
    config: Config, credentials: Credentials, model: ServedModel, records: Callable[[str], TurnRecordStore]
) -> AgentAccess | None:
    """Start the server of sessions, and return the access to the agents at services.environment.address; None without one.

    ``records`` returns the turn records of a run by its name. Raises ConfigError, ModelError.
    """
    address = config.services.environment.address
    if not config.has_agents or address is None:
        return None
    agent, folder = config.environment.agent, credentials.folder
    texts, server = _texts(config, model), _server(config, credentials)
    client = AgentClient(
        address,
        agent.timeout_seconds,
        config.timeouts,
        config.recovery,
        credentials,
        needs_reward=not config.has_reward,
    )
    server.start()
    return AgentAccess(
        server,
        client,
        texts,
        lambda batch: records(batch.run).records_of(batch),
        client.endpoint_url(agent, server.address, folder is not None),
        agent.max_concurrent,
        agent.max_branches,
        agent.max_tokens,
        config.data.max_prompt_tokens,
        model.max_sequence_tokens,
        config.recovery.max_attempts,
    )


def traffic_sessions(
    config: Config, credentials: Credentials, model: ServedModel, store: TrafficStore
) -> TrafficSessions | None:
    """Start the server of sessions for users, and return their sessions; None in a run without them.

    Raises ConfigError, ModelError.
    """
    if not config.has_traffic:
        return None
    from quartet.services.generator.sessions.traffic import Access, TrafficSessions

    rollout, agent, traffic = config.rollout, config.environment.agent, config.environment.traffic
    keys: dict[str, Access] = {}
    files = {Access.VIEWER: traffic.viewer_keys_file, Access.OPERATOR: traffic.operator_keys_file}
    for access, path in files.items():
        for key in () if path is None else read_tokens(path, f"environment.traffic.{access}_keys_file"):
            if keys.setdefault(key, access) is not access:
                raise ConfigError(
                    f"environment.traffic.{access}_keys_file {path}: has a key of environment.traffic.viewer_keys_file, too; "
                    "give each file other keys"
                )
    sequence = config.data.max_prompt_tokens + rollout.max_response_tokens
    sessions = TrafficSessions(
        _server(config, credentials),
        store,
        _texts(config, model),
        keys,
        traffic,
        config.run.name,
        config.run.seed,
        SessionLimits(
            rollout.max_turns,
            rollout.max_turn_tokens or 0,
            rollout.max_response_tokens,
            min(sequence, model.max_sequence_tokens or sequence),
            agent.max_branches,
            agent.max_tokens,
        ),
        run_sampling(rollout),
        rollout.max_off_policy_steps,
        rollout.max_concurrent_sequences,
        WAIT_FRACTION * min(config.timeouts.generate_seconds, MAX_CALL_SECONDS),
    )
    log.info("users are answered", base_url=sessions.base_url(agent, credentials.folder is not None))
    return sessions


def _texts(config: Config, model: ServedModel) -> PolicyTexts:
    """Return the tokenizer and chat template of the policy. Raises ConfigError, ModelError."""
    environment = config.environment
    try:
        from quartet.models.weights.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"environment.kind {environment.kind}: a generator needs the tokenizer of the policy: {error}; install transformers "
            "in its environment"
        ) from None
    template = environment.chat_template
    return PolicyTexts(
        load_tokenizer(config.actor.model),
        model.vocabulary_size,
        model.stop_ids,
        TemplateInputs.of_config(config),
        None if template is None else template.read_text(encoding="utf-8"),
        config.rollout.stop_strings,
    )


def _server(config: Config, credentials: Credentials) -> SessionServer:
    """Return the server of sessions, which only listens. Raises ConfigError."""
    # Loads the HTTP server, which other runs do not need.
    from quartet.services.generator.sessions.app import SessionServer

    folder = credentials.folder
    return SessionServer(
        config.environment.agent.listen or "127.0.0.1:0",
        None if folder is None else (folder / CERTIFICATE, folder / KEY),
    )
