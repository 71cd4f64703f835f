"""Construction of what sessions need, from the config."""

from __future__ import annotations

from collections.abc import Callable

from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.root import Config
from quartet.data.chat_template import TemplateInputs
from quartet.engines.engine import ServedModel
from quartet.errors import ConfigError
from quartet.rpc.agent_client import AgentClient
from quartet.rpc.security.credentials import Credentials
from quartet.services.generator.sessions.sessions import AgentAccess
from quartet.services.generator.sessions.texts import PolicyTexts
from quartet.system.secret_files import CERTIFICATE, KEY


def agent_access(
    config: Config, credentials: Credentials, model: ServedModel, records: Callable[[str], TurnRecordStore]
) -> AgentAccess | None:
    """Start the server of sessions, and return the access to the agents at services.environment.address; None without one.

    ``records`` returns the turn records of a run by its name. Raises ConfigError, ModelError.
    """
    address = config.services.environment.address
    if not config.has_agents or address is None:
        return None
    # Loads the HTTP server, which other runs do not need.
    from quartet.services.generator.sessions.app import SessionServer

    try:
        from quartet.models.weights.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"environment.kind agent: a generator needs the tokenizer of the policy: {error}; install transformers in its "
            "environment"
        ) from None
    environment, agent, folder = config.environment, config.environment.agent, credentials.folder
    template = environment.chat_template
    texts = PolicyTexts(
        load_tokenizer(config.actor.model),
        model.vocabulary_size,
        model.stop_ids,
        TemplateInputs.of_config(config),
        None if template is None else template.read_text(encoding="utf-8"),
        config.rollout.stop_strings,
    )
    server = SessionServer(
        agent.listen or "127.0.0.1:0", None if folder is None else (folder / CERTIFICATE, folder / KEY)
    )
    client = AgentClient(
        address,
        agent.timeout_seconds,
        config.timeouts,
        config.recovery,
        credentials,
        needs_reward=not config.has_reward,
    )
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
