"""Settings of the environment for trajectories of several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from quartet.config.agent import AgentConfig
from quartet.config.section import Count, FunctionName, Positive, Section
from quartet.config.traffic import TrafficConfig


class EnvironmentConfig(Section):
    """The environment of trajectories with several turns. It runs in a separate process. See docs/environments.md."""

    kind: Literal["class", "agent", "traffic"] = "class"
    """class: an environment that answers each turn. agent: a program with a loop of its own, which calls the policy as it likes,
    in the section `agent`. traffic: users, whose requests the policy answers, see the section `traffic`. Used if
    rollout.max_turns is above 0."""
    agent: AgentConfig = AgentConfig()
    """The agent of kind agent. Kind traffic uses its listen, max_branches and max_tokens."""
    traffic: TrafficConfig = TrafficConfig()
    """Keys and limits of kind traffic."""
    class_name: FunctionName | None = None
    """Class derived from quartet.environments.Environment, as package.module:Class. Null: the environment at
    services.environment.address. Used if rollout.max_turns is above 0."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, values as in JSON."""
    observations: Literal["text", "chat"] = "text"
    """text: an observation is text, which is appended as it is. chat: an observation is one or more messages, written by the
    chat template; text is a message of the user. Prompts are then messages, too, and the template opens the policy's turns."""
    chat_template: Path | None = None
    """File with a chat template that replaces that of the policy's tokenizer, such as one that keeps earlier turns unchanged. For
    observations chat, and for kinds agent and traffic."""
    timeout_seconds: Positive = 60.0
    """Time limit for one reset or step of the environment, in seconds. After that, the outcome is timeout, and the process that
    ran it is replaced."""
    num_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of processes that run environments. Each has many sessions and makes one call at a time. An environment that
    computes or waits for long needs more. Of kind agent: number of processes that share the agents. Each runs many at once, on
    one event loop."""
    max_sessions: Count = 1024
    """Maximum number of open sessions. Calls that would open more wait. Of kind agent: see agent.max_concurrent."""
    session_idle_seconds: Positive = 120.0
    """Time without a call, in seconds, after which a session may make room for another, if max_sessions are open. If its caller
    still needs it, it repeats the session."""
    quote_texts: bool = False
    """Include the text of exceptions of the environment in logs and notes, although it may quote prompts and responses. False:
    only type, file and line. Of kind agent: also the last line that a command which fails writes to standard error."""

    @field_validator("arguments")
    @classmethod
    def _is_json(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected values as in JSON ({error})") from None
        return arguments

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentConfig:
        if self.kind != "traffic" and self.traffic != TrafficConfig():
            raise ValueError(f"traffic: not used with kind {self.kind}; set kind traffic, or remove the section")
        if self.kind != "class":
            self._check_requests()
            return self
        # A deployment sets the addresses of all runs.
        if self.agent.model_copy(update={"listen": None, "advertise": None}) != AgentConfig():
            raise ValueError("agent: not used with kind class; set kind agent, or remove the section")
        if self.class_name is None and self.arguments:
            raise ValueError("arguments: not used without class_name; set class_name, or remove them")
        if self.chat_template is not None and self.observations != "chat":
            raise ValueError("chat_template: not used with observations text; set observations chat, or remove it")
        return self

    def _check_requests(self) -> None:
        """Raise ValueError for settings that contradict a kind whose turns are requests to the policy."""
        try:
            self.agent.check()
        except ValueError as error:
            raise ValueError(f"agent.{error}") from None
        if self.kind == "traffic":
            if self.agent.kind:
                raise ValueError(
                    f"agent.{self.agent.kind}: not used with kind traffic, whose requests come from users; remove it"
                )
            if self.traffic.operator_keys_file is None:
                raise ValueError(
                    "traffic.operator_keys_file: missing; name a file with the keys of operators, who give the rewards"
                )
        for name in ("class_name", "arguments"):
            if getattr(self, name):
                raise ValueError(f"{name}: not used with kind {self.kind}; remove it")
        if self.observations != "text":
            raise ValueError(
                f"observations chat: not used with kind {self.kind}, whose requests have messages; remove it (chat_template "
                "still replaces the template of the tokenizer)"
            )
