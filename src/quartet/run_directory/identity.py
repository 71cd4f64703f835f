"""A run's identity: its own id, and the settings and data that decide what a step learns. Imports no torch."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, TypeGuard, get_args

from pydantic_core import PydanticUndefined, to_jsonable_python

from quartet.config.rewards import HttpScorerConfig, RetryConfig
from quartet.config.root import Config
from quartet.config.section import Section, flattened
from quartet.contract.generation import EngineProperties
from quartet.contract.status import Role
from quartet.contract.trajectory import PromptSetContent
from quartet.errors import ConfigError
from quartet.model_files.hub_models import looks_local
from quartet.system.durable_files import sha256, storage_errors, write_durably

CHANGEABLE_SETTINGS = (
    "run.steps",
    "run.directory",
    "data.prompts",
    "data.max_dropped_fraction",
    "actor.gradient_checkpointing",
    "critic.gradient_checkpointing",
    "evaluation.generators",
    "evaluation.judge",
    "evaluation.timeout_seconds",
    "evaluation.quote_texts",
    "environment.timeout_seconds",
    "environment.num_workers",
    "environment.max_sessions",
    "environment.session_idle_seconds",
    "environment.quote_texts",
    "environment.agent.url",
    "environment.agent.api_key_file",
    "environment.agent.certificate_authority_file",
    "environment.agent.pass_variables",
    "environment.agent.timeout_seconds",
    "environment.agent.max_concurrent",
    "environment.agent.listen",
    "environment.agent.advertise",
    "reward.shadow_timeout_seconds",
    "rollout.max_sampling_rounds",
    "rollout.triton.url",
    "rollout.triton.timeout_seconds",
    "rollout.triton.certificate_authority_file",
    "rollout.vllm_server.url",
    "rollout.vllm_server.weights_directory",
    "rollout.vllm_server.api_key_file",
    "rollout.vllm_server.timeout_seconds",
    "rollout.vllm_server.load_timeout_seconds",
    "rollout.vllm_server.certificate_authority_file",
    "rollout.vllm_server.verify_weights",
    "rollout.sglang_server.url",
    "rollout.sglang_server.weights_directory",
    "rollout.sglang_server.api_key_file",
    "rollout.sglang_server.timeout_seconds",
    "rollout.sglang_server.load_timeout_seconds",
    "rollout.sglang_server.certificate_authority_file",
    "rollout.tensorrt_llm",
    "rollout.vllm",
    "rollout.generators",
    "guards",
    "checkpoint",
    "buffer",
    "services",
    "timeouts",
    "recovery",
    "security",
    "gateway",
    "telemetry",
)
"""Settings that may differ when a run resumes, because they do not decide what a step learns.

The path of the prompts may change, their content may not. Evaluations are compared with the one before the first step, so their
prompts stay the same. How often a run is evaluated may change if it was evaluated from the start.
"""
_CHANGEABLE = tuple(f"{name}." for name in CHANGEABLE_SETTINGS)


SCORER_CONNECTION = (
    *RetryConfig.model_fields,
    *HttpScorerConfig.model_fields,
    "url",
    "urls",
    "address",
    "start_timeout_seconds",
    "batch_size",
    "cache_entries",
    "input_price",
    "output_price",
)
"""Settings of a scorer that may differ when a run resumes: where it is and how it is called, but not what it scores."""

NO_SETS: Mapping[str, PromptSetContent] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Identity:
    """The id, settings and data of a run.

    ``id`` distinguishes the run from any other with its name. ``settings`` (by key) and ``prompts_sha256`` must not change when
    the run resumes. ``micro_batch_tokens`` holds the micro-batch size that each role's service determined at the first start,
    because the split of a mini-batch affects the last bits of an update. ``hub_models`` are the models that are hub ids; in
    another working directory, a relative path looks like one. ``prompt_sets`` are the contents of the sets, by key of the config.
    ``model_files`` are the digests of the models' files, see ``RoleStatus.model_files`` in proto/quartet/v1/status.proto.
    ``engines`` are what the engines declared when the run last started. They may change.
    """

    id: str
    settings: dict[str, Any]
    prompts_sha256: str
    micro_batch_tokens: dict[str, int] = field(default_factory=dict)
    hub_models: tuple[str, ...] = ()
    prompt_sets: dict[str, PromptSetContent] = field(default_factory=dict)
    model_files: dict[str, str] = field(default_factory=dict)
    engines: tuple[EngineProperties, ...] = ()

    @classmethod
    def new(
        cls,
        config: Config,
        micro_batch_tokens: Mapping[Role, int],
        prompt_sets: Mapping[str, PromptSetContent] = NO_SETS,
    ) -> Identity:
        """Return the identity of a new run with this config. Reads the prompts file.

        ``micro_batch_tokens`` is used for roles whose size the config leaves open.
        """
        configured = {Role.ACTOR: config.actor.micro_batch_tokens, Role.CRITIC: config.critic.micro_batch_tokens}
        sizes = {role.value: configured[role] or measured for role, measured in micro_batch_tokens.items()}
        hub_models = tuple(sorted({model for model in config.models.values() if not looks_local(model)}))
        prompts_sha256 = "" if config.data.prompts is None else sha256(config.data.prompts)
        id, settings = secrets.token_hex(8), fixed_settings(config)
        return cls(id, settings, prompts_sha256, sizes, hub_models, dict(prompt_sets))

    def write(self, path: Path) -> None:
        """Write the identity to ``run.json``. Raises StorageFailed if the disk refuses it."""
        content = {
            "id": self.id,
            "prompts_sha256": self.prompts_sha256,
            "micro_batch_tokens": self.micro_batch_tokens,
            "hub_models": self.hub_models,
            "prompt_sets": {key: asdict(each) for key, each in self.prompt_sets.items()},
            "model_files": self.model_files,
            "engines": [asdict(each) for each in self.engines],
            "settings": self.settings,
        }
        with storage_errors(path):
            write_durably(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """Read a ``run.json``. Return None if the file is missing. Raises ConfigError if it cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            sizes = {str(role): int(tokens) for role, tokens in content["micro_batch_tokens"].items()}
            hub_models = tuple(str(model) for model in content.get("hub_models", ()))
            id, settings, prompts = str(content["id"]), dict(content["settings"]), str(content["prompts_sha256"])
            sets = {str(key): PromptSetContent(**each) for key, each in content.get("prompt_sets", {}).items()}
            files = {str(name): str(digest) for name, digest in content["model_files"].items()}
            engines = tuple(EngineProperties(**each) for each in content.get("engines", ()))
            return cls(id, settings, prompts, sizes, hub_models, sets, files, engines)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"run {path}: cannot be read; put the file back, or start a new run") from None

    def micro_batch_tokens_of(self, role: Role) -> int:
        """Return the maximum number of tokens of a micro-batch in updates of ``role``; 0 if the service decides."""
        return self.micro_batch_tokens.get(role, 0)

    def with_micro_batch_tokens(self, micro_batch_tokens: Mapping[Role, int]) -> Identity:
        """Return a copy with the sizes of roles that have none yet, such as the critic that a fork has added."""
        new = {role.value: size for role, size in micro_batch_tokens.items() if not self.micro_batch_tokens_of(role)}
        return replace(self, micro_batch_tokens={**self.micro_batch_tokens, **new})

    def with_model_files(self, files: Mapping[str, str]) -> Identity:
        """Return a copy with the files of models of which none is known yet, such as those of a new run or fork."""
        known = {_model_key(name) for name in self.model_files}
        new = {name: digest for name, digest in files.items() if _model_key(name) not in known}
        return replace(self, model_files=dict(sorted({**self.model_files, **new}.items())))

    def check_models(self, files: Mapping[str, str], root: Path) -> None:
        """Raise ConfigError if a model among ``files`` has another file than when the run in ``root`` started."""
        keys = {_model_key(name) for name in files}
        before = {name: digest for name, digest in self.model_files.items() if _model_key(name) in keys}
        known = {_model_key(name) for name in before}
        # The commit of a hub model tells more than the first of its files.
        for name in sorted(dict.fromkeys([*files, *before]), key=lambda name: not name.endswith("/commit")):
            key, file = _model_key(name), name.partition("/")[2]
            if key not in known or before.get(name) == files.get(name):
                continue
            change = f"{file} differs from the file"
            if name not in files:
                change = f"{file} is missing among the files"
            elif name not in before:
                change = f"{file} is not among the files"
            elif file == "commit":
                change = f"the cache has commit {files[name]}, not {before[name]},"
            model = self.settings.get(key)
            raise ConfigError(
                f"{key}{f' {model}' if model else ''}: {change} that the run in {root} started with; restore the files of that "
                f"model, or train from one of the run's checkpoints with the model as it is now: quartet fork {quote(str(root))} "
                "STEP --name NAME"
            )

    @property
    def revisions(self) -> dict[str, str]:
        """Commits of the sets that are data sets on the hub, by key of the config."""
        return {key: each.revision for key, each in self.prompt_sets.items() if each.revision}

    def check(self, config: Config, root: Path, prompt_sets: Mapping[str, PromptSetContent] = NO_SETS) -> None:
        """Raise ConfigError unless the run in ``root`` can resume with this config, whose sets have these contents."""
        check_settings(self.settings, fixed_settings(config), root)
        for key, content in prompt_sets.items():
            before = self.prompt_sets.get(key)
            if before is not None and content.sha256 != before.sha256:
                raise ConfigError(
                    f"{key}: its rows differ from those that the run in {root} started with; restore them, or start a new run"
                )
        if config.data.prompts is None:
            return
        try:
            prompts_sha256 = sha256(config.data.prompts)
        except OSError as error:
            raise ConfigError(
                f"data.prompts {config.data.prompts}: cannot be read ({error.strerror}); give the file that the run in {root} "
                "started with"
            ) from None
        if prompts_sha256 != self.prompts_sha256:
            raise ConfigError(
                f"data.prompts {config.data.prompts}: differs from the file that the run in {root} started with; "
                "give that file, or start a new run"
            )


def _model_key(name: str) -> str:
    return name.partition("/")[0]


def fixed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a step learns, by key. They stay the same for the whole run."""
    tree = config.model_dump(mode="json")
    for source in (tree["reward"], *tree["reward"]["parts"]):
        for name in ("timeout_seconds", "quote_texts"):
            del source[name]
        for section in ("http", "triton", "service", "judge"):
            if source[section] is not None:
                source[section] = {
                    name: value for name, value in source[section].items() if name not in SCORER_CONNECTION
                }
    for each in (*tree["data"]["sets"], tree["data"]["validation_set"] or {}, *tree["evaluation"]["sets"]):
        # The places of a set's rows. Their content stays the same.
        for name in ("path", "dataset", "revision"):
            each.pop(name, None)
    flat = flattened(tree)
    # With off-policy steps, the checkpoints decide which policy generates a step.
    also_fixed = {"checkpoint.every_steps"} if config.rollout.max_off_policy_steps else set()
    return {key: value for key, value in flat.items() if key in also_fixed or not f"{key}.".startswith(_CHANGEABLE)}


def check_settings(before: dict[str, Any], now: dict[str, Any], root: Path) -> None:
    """Raise ConfigError naming the first setting that differs from the one of the run in ``root``.

    A run that started before a setting existed had the default.
    """
    before = {key: default_of(key) for key in now if not _is_known(key, before)} | before
    # A key on one side only follows from another setting that differs. Report that one first.
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key not in before or key not in now, key)):
        if key == "evaluation.every_steps":
            if not before.get(key) and now.get(key):
                raise ConfigError(
                    f"--resume: {key} is {now[key]!r}, the run in {root} had none: evaluations are compared with one before the "
                    "first step; leave it at 0, or start a new run"
                )
        # As JSON, because for a chat template or an environment 0 is not false, although they are equal.
        elif _as_json(before.get(key)) != _as_json(now.get(key)):
            raise ConfigError(
                f"--resume: {key} is {now.get(key)!r}, the run in {root} had {before.get(key)!r}; "
                f"give the run's own config ({root}/config.yaml), or train from one of its checkpoints with the new value: "
                f"quartet fork {quote(str(root))} STEP --name NAME --set {quote(f'{key}={_as_text(now.get(key))}')}"
            )


def _is_known(key: str, settings: Mapping[str, Any]) -> bool:
    """Return whether settings have a key, or have None for a section that contains it."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in settings for end in range(1, len(parts) + 1))


def default_of(key: str) -> Any:
    """Return the default of a setting of ``Config``, as in JSON; None for one without a default."""
    section: type[Section] = Config
    names = key.split(".")
    for index, name in enumerate(names):
        if (field := section.model_fields.get(name)) is None:
            return None
        sections = [each for each in (field.annotation, *get_args(field.annotation)) if _is_section(each)]
        if index == len(names) - 1:
            default = field.get_default(call_default_factory=True)
            return None if default is PydanticUndefined else to_jsonable_python(default)
        if not sections:
            return None
        section = sections[0]
    return None


def _is_section(value: Any) -> TypeGuard[type[Section]]:
    return isinstance(value, type) and issubclass(value, Section)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) and value != "null" else json.dumps(value)
