"""The config tree: what it refuses and how it says so, overrides, the shipped files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.cli.reference import reference
from quartet.config import Config, is_redacted, load_config, parse_config, redact_url
from quartet.errors import ConfigError
from quartet.topology import roles_of

ROOT = Path(__file__).parents[2]
SHIPPED = [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "src/quartet/demo/demo.yaml"]

MINIMAL = """\
data:
  prompts: prompts.jsonl
actor:
  model: policy
reward:
  model: reward
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, list(overrides))
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_parses(path: Path) -> None:
    config = load_config(path)
    assert config.run.steps >= 1


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_resolved_yaml_parses_to_the_same_tree(path: Path) -> None:
    config = load_config(
        path, ["algorithm.clip_ratio_high=0.3", "services.actor.devices=[0, 1]", "actor.model='a: b #é'"]
    )
    assert parse_config(yaml.safe_load(config.to_yaml()), "again") == config


def test_the_resolved_yaml_names_every_key(minimal: Path) -> None:
    def keys(tree: dict[str, Any]) -> set[str]:
        inner = {f"{key}.{below}" for key, value in tree.items() if isinstance(value, dict) for below in keys(value)}
        return inner | set(tree)

    tree = yaml.safe_load(load_config(minimal).to_yaml())
    assert {"run.seed", "algorithm.kl_controller.horizon", "services.orchestrator.listen"} <= keys(tree)


def test_every_key_is_documented() -> None:
    def undocumented(section: Any, name: str) -> list[str]:
        found = []
        for key, field in section.model_fields.items():
            below = field.annotation
            if isinstance(below, type) and hasattr(below, "model_fields"):
                found += undocumented(below, f"{name}{key}.")
            elif not field.description:
                found.append(name + key)
        return found

    assert undocumented(Config, "") == []


def test_a_critic_without_model_starts_from_the_reward_model_and_a_reference_from_the_actor(minimal: Path) -> None:
    config = load_config(minimal)
    assert (config.critic_model, config.reference_model) == ("reward", "policy")
    config = load_config(minimal, ["critic.model=c", "reference.model=r"])
    assert (config.critic_model, config.reference_model) == ("c", "r")


def test_the_tree_is_immutable(minimal: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(minimal).run.steps = 3


# Each: what is appended to the minimal config, and what the error says besides the file.
WRONG = {
    "an unknown section": ("rum: {}\n", ":7: rum: unknown key; did you mean 'run'?"),
    "an unknown key": ("run:\n  step: 10\n", ":8: run.step: unknown key; did you mean 'steps'?"),
    "an unknown nested key": (
        "algorithm:\n  kl_controller:\n    kind: fixed\n    targett: 3\n",
        ":10: algorithm.kl_controller.targett: unknown key; did you mean 'target'?",
    ),
    "a key like no other": ("checkpoint:\n  zzz: 1\n", ":8: checkpoint.zzz: unknown key; known here: every, keep"),
    "steps of 0": ("run:\n  steps: 0\n", ":8: run.steps: Input should be greater than or equal to 1, not 0"),
    "a word for a number": ("run:\n  steps: many\n", ":8: run.steps: Input should be a valid integer"),
    "a negative seed": ("run:\n  seed: -1\n", ":8: run.seed: Input should be greater than or equal to 0, not -1"),
    "a seed of 2^63": ("run:\n  seed: 9223372036854775808\n", ":8: run.seed: Input should be less than"),
    "a run name with a slash": ("run:\n  name: a/b\n", ":8: run.name: String should match pattern"),
    "gamma above 1": ("algorithm:\n  gamma: 1.5\n", ":8: algorithm.gamma: Input should be less than or equal to 1"),
    "NaN": ("algorithm:\n  gamma: .nan\n", ":8: algorithm.gamma: Input should be a finite number, not nan"),
    "infinity": ("algorithm:\n  clip_ratio: .inf\n", ":8: algorithm.clip_ratio: Input should be a finite number"),
    "a dual clip of 1": ("algorithm:\n  dual_clip: 1\n", ":8: algorithm.dual_clip: Input should be greater than 1"),
    "temperature 0": (
        "rollout:\n  temperature: 0\n",
        ":8: rollout.temperature: Input should be greater than or equal to 0.001",
    ),
    "top_p 0": ("rollout:\n  top_p: 0\n", ":8: rollout.top_p: Input should be greater than 0"),
    "an unknown choice": (
        "algorithm:\n  kl_estimator: k9\n",
        ":8: algorithm.kl_estimator: Input should be 'k1' or 'absolute', not 'k9'",
    ),
    "a wrong element of a list": (
        "services:\n  actor:\n    devices: [0, -1]\n",
        ":9: services.actor.devices.1: Input should be greater than or equal to 0, not -1",
    ),
    "a list that is too short": (
        "critic:\n  optimizer:\n    betas: [0.9]\n",
        ":9: critic.optimizer.betas.1: missing",
    ),
    "a scalar for a section": ("rollout: 3\n", ":7: rollout: Input should be a valid dictionary"),
    "an address without port": (
        "services:\n  actor:\n    address: localhost\n",
        ":9: services.actor.address: 'localhost': expected HOST:PORT",
    ),
    "a port that is none": (
        "services:\n  actor:\n    listen: 127.0.0.1:70000\n",
        ":9: services.actor.listen: '127.0.0.1:70000': expected HOST:PORT",
    ),
    "a url of another kind": ("buffer:\n  url: http://h\n", ":8: buffer.url: expected redis://HOST:PORT/DB"),
    "more mini-batches than responses": (
        "rollout: {prompts_per_step: 4}\nalgorithm: {mini_batches: 5}\n",
        "algorithm.mini_batches 5: expected at most the 4 responses of a step",
    ),
    "a KL loss without weight": ("algorithm: {kl_loss: k3}\n", "set kl_loss_coefficient above 0, or kl_loss none"),
    "a section that stands twice": ("actor: {model: other}\n", ":7: actor: stands twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_file_line_key_and_expectation(name: str, tmp_path: Path) -> None:
    text, expected = WRONG[name]
    path = write(tmp_path, MINIMAL + text)
    said = refusal(path)
    assert said.startswith(f"config {path}:")
    assert expected in said


def test_a_missing_key_is_named_with_its_section_and_a_missing_section_with_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "data:\n  prompts: p\nactor:\n  dtype: float32\n")
    said = refusal(path)
    assert f"config {path}:3: actor.model: missing; it has no default" in said
    assert f"config {path}: reward: missing; it has no default" in said


def test_every_wrong_key_is_named_at_once(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, MINIMAL + "run:\n  steps: 0\n  seed: -1\n"))
    assert ":8: run.steps" in said
    assert ":9: run.seed" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {name: 'open\n", "config {path}:2: not YAML"),
        ("run:\n\tsteps: 1\n", "config {path}:2: not YAML"),
        ("", "config {path}: expected a mapping of sections"),
        ("- a\n", "config {path}: expected a mapping of sections"),
        ("run: &run {more: *run}\n", "config {path}: "),
        ("[" * 500, "config {path}: "),
        ("!!python/object/apply:os.system [true]\n", "config {path}:1: not YAML"),
        ("3: 4\n" + MINIMAL, "config {path}:1: 3: Keys should be strings"),
    ],
)
def test_what_is_no_config_is_refused_with_file_and_line(text: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    assert refusal(path).startswith(expected.format(path=path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.yaml")
    assert "directory" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}\n")
    assert "not UTF-8 at byte 12" in refusal(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.steps=10", "run", "steps", 10),
        ("actor.learning_rate=1e-5", "actor", "learning_rate", 1e-5),
        ("actor.learning_rate=2.5E-4", "actor", "learning_rate", 2.5e-4),
        ("algorithm.clip_ratio_high=null", "algorithm", "clip_ratio_high", None),
        ("algorithm.whiten_rewards=true", "algorithm", "whiten_rewards", True),
        ("actor.model=some/where=else", "actor", "model", "some/where=else"),
        ("run.name=1e5x", "run", "name", "1e5x"),
        ("data.prompts=/tmp/a b.jsonl", "data", "prompts", Path("/tmp/a b.jsonl")),
    ],
)
def test_an_override_is_read_as_yaml(override: str, section: str, key: str, value: object, minimal: Path) -> None:
    assert getattr(getattr(load_config(minimal, [override]), section), key) == value


def test_overrides_reach_nested_keys_and_lists_and_the_last_one_counts(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "algorithm.kl_controller.horizon=1e4",
            "actor.optimizer.betas=[0.8, 0.9]",
            "services.actor.devices=[1]",
            "run.steps=5",
            "run.steps=6",
        ],
    )
    assert config.algorithm.kl_controller.horizon == 10_000
    assert config.actor.optimizer.betas == (0.8, 0.9)
    assert config.services.actor.devices == (1,)
    assert config.run.steps == 6
    assert config.actor.model == "policy"


@pytest.mark.parametrize("override", ["run.steps", "=1", "run..steps=1", ".steps=1"])
def test_an_override_that_is_no_assignment_is_refused(override: str, minimal: Path) -> None:
    assert refusal(minimal, override) == f"--set {override}: expected KEY.KEY=VALUE, for example run.steps=10"


def test_an_override_below_a_value_is_refused(minimal: Path) -> None:
    assert "model is a value, not a section" in refusal(minimal, "actor.model.name=x")


def test_a_wrong_override_is_blamed_and_not_the_line_that_it_replaces(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "run:\n  steps: 10\n")
    said = refusal(path, "run.steps=0")
    assert "--set run.steps" in said
    assert ":8" not in said
    assert "did you mean 'steps'" in refusal(path, "run.stepz=1")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@host:6379/0",  # pragma: allowlist secret - an example
        "redis://user:s3cret@host:6379/0",  # pragma: allowlist secret - an example
        "redis://user:s3cret:s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://user:s3cret@s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://me@mail:s3cret@host/0",  # pragma: allowlist secret - an example
        "unix:///run/redis.sock?password=s3cret&db=1",
        "unix://user:s3cret@/run/redis.sock",  # pragma: allowlist secret - an example
        "rediss://host/0?db=2&password=s3cret",
        "rediss://q@host/0?ssl_password=s3cret&db=2",
        "redis://host/0?PASSWORD=s3cret",
        "redis://host/0?%70assWord=s3cret",
    ],
)
def test_a_password_is_never_shown(url: str, minimal: Path) -> None:
    assert "s3cret" not in redact_url(url)
    assert is_redacted(redact_url(url))
    assert not is_redacted(url)
    shown = load_config(minimal, [f"buffer.url={url}"]).to_yaml()
    assert "s3cret" not in shown
    assert "***" in shown
    assert yaml.safe_load(shown)["buffer"]["url"].split("://")[0] == url.split("://")[0]


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis:///0",
        "redis://host:6379/0",
        "redis://user@host:6379/0",
        "unix:///run/my redis.sock?db=1",
        "redis://[::1]:6379/0",
        "rediss://user@[::1]:6379/0?ssl_ca_certs=/home/a@b/ca.crt&timeout=3",
    ],
)
def test_a_url_without_password_is_taken_and_shown_as_it_is(url: str, minimal: Path) -> None:
    assert redact_url(url) == url
    assert not is_redacted(url)
    assert yaml.safe_load(load_config(minimal, [f"buffer.url={url}"]).to_yaml())["buffer"]["url"] == url


@pytest.mark.parametrize(
    "url",
    [
        "redsi://:s3cret@host:6379/0",  # pragma: allowlist secret - an example
        "redis://:s3cret/s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://me@mail:s3cret/s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://:s3cret#s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://host:6379/0#password=s3cret",
        "redis://host/0?db=1#s3cret@s3cret",
        "unix:///run/redis.sock#s3cret",
        "redis://q:s3cret",
        "redis://q:s3cret/0",
        "redis://q:123-s3cret",
        "redis://me@host:s3cret/0",
        "redis://[::1]:s3cret/0",
        "redis://q:12/s3cret@host",  # pragma: allowlist secret - an example
        "redis://host/0?pass\tword=s3cret",
    ],
)
def test_a_malformed_url_is_refused_without_its_password(url: str, tmp_path: Path) -> None:
    said = refusal(write(tmp_path, MINIMAL + yaml.safe_dump({"buffer": {"url": url}})))
    assert ":8: buffer.url: expected redis://HOST:PORT/DB" in said
    assert "s3cret" not in said


REQUIRED: dict[str, Any] = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"services": {"actor": {"address": "far:1"}}}, "buffer.url: an actor or critic at an address needs a Redis"),
        ({"actor": {"model": "a", "optimizer": {"betas": [0.9, 1.0]}}}, "should be less than 1"),
        ({"algorithm": {"kl_loss_coefficient": 0.1}}, "it weighs nothing"),
        ({"algorithm": {"kl_loss": "k3"}}, "set kl_loss_coefficient above 0"),
        ({"algorithm": {"kl_coefficient": 0, "kl_controller": {"kind": "adaptive"}}}, "kl_coefficient, which is 0"),
        ({"algorithm": {"kl_controller": {"kind": "adaptive", "horizon": 12.8}}}, "expected more than 12.8"),
        ({"algorithm": {"kl_controller": {"kind": "simple", "horizon": 1}}}, "expected more than 1 step"),
        ({"services": {"orchestrator": {"devices": [0]}}}, "unknown key; known here: address"),
        ({"algorithm": {"estimator": "rloo"}}, "compares the samples of a prompt; set rollout.samples_per_prompt to 2"),
        ({"algorithm": {"estimator": "grpo"}}, "compares the samples of a prompt"),
        ({"algorithm": {"estimator": "reinforce"}, "rollout": {"prompts_per_step": 1}}, "needs 2 responses or more"),
        ({"algorithm": {"estimator": "reinforce", "gamma": 0.9}}, "algorithm.gamma 0.9: .* leave it at 1"),
        ({"algorithm": {"estimator": "reinforce", "whiten_rewards": True}}, "has no token rewards"),
        ({"algorithm": {"ratio_level": "sequence"}}, "gives each token its own advantage"),
        ({"algorithm": {"estimator": "reinforce", "critic_warmup_steps": 2}}, "has no critic"),
        (
            {
                "algorithm": {"estimator": "reinforce"},
                "services": {"critic": {"address": "h:1"}},
                "buffer": {"url": "redis://h"},
            },
            "services.critic.address: .* has no critic",
        ),
        ({"algorithm": {"critic_warmup_steps": 100}}, "the policy would never learn; expected less than run.steps 100"),
        (
            {"reward": {"source": "ensemble", "timeout": 1, "parts": [{"name": "a", "model": "m"}]}},
            "timeout: not used with source ensemble; give it to each of the parts",
        ),
        ({"algorithm": {"overlong_penalty": {"buffer_tokens": 65}}}, "expected at most rollout.max_response_tokens 64"),
        ({"actor": {"model": "a", "warmup_steps": 101}}, "actor.warmup_steps 101: expected at most run.steps 100"),
        ({"actor": {"model": "a", "final_learning_rate": 1}}, "final_learning_rate 1: expected at most learning_rate"),
        ({"actor": {"model": "a", "lora": {}, "freeze": ["x"]}}, "freeze: with lora all but the adapters is frozen"),
        ({"evaluation": {"every": 5}}, "evaluation.every: data.validation names no prompts"),
        (
            {"actor": {"model": "a", "lora": {}}, "services": {"reference": {"address": "h:1"}}},
            "services.reference.address: the actor answers as reference",
        ),
        ({"reward": {}}, "model: missing; source model needs it"),
        ({"reward": {"source": "function"}}, "function: missing; source function needs it"),
        ({"reward": {"model": "r", "function": "a.b:c"}}, "function: not used with source model"),
        ({"reward": {"source": "function", "function": "a.b"}}, "function: expected package.module:callable"),
        ({"reward": {"source": "ensemble"}}, "parts: source ensemble needs at least one"),
        ({"reward": {"model": "r", "parts": [{"name": "a", "model": "m"}]}}, "parts: not used with source model"),
        (
            {"reward": {"source": "ensemble", "parts": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]}},
            "the name a stands twice",
        ),
        ({"reward": {"source": "ensemble", "parts": [{"name": "a"}]}}, "parts.0: model: missing"),
        (
            {"reward": {"source": "ensemble", "parts": [{"name": "a", "model": "m", "wait": 1}]}},
            "unknown key; did you mean .weight.",
        ),
        ({"guards": {"kl_runaway": {"below": 3}}}, "guards.kl_runaway.below: unknown key; known here: action, above"),
    ],
)
def test_what_does_not_fit_together_is_an_error_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**REQUIRED, **changes}, "test")


def test_a_hash_in_an_override_is_no_comment(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {prompts: p}\nactor: {model: a}\nreward: {model: r}\n")
    config = load_config(path, ["data.prompts=/tmp/a #b/x.jsonl", "run.name=123"])
    assert str(config.data.prompts) == "/tmp/a #b/x.jsonl"
    assert config.run.name == "123"


def test_the_reference_of_settings_is_the_one_in_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run: quartet config reference > docs/configuration.md"


def test_an_estimator_without_critic_needs_no_critic_and_lora_no_reference() -> None:
    config = parse_config(REQUIRED, "test")
    assert (config.has_critic, config.has_reference) == (True, True)
    assert list(config.models) == ["actor.model", "reward.model", "critic.model", "reference.model"]
    assert [str(role) for role in roles_of(config)] == ["actor", "critic", "reward", "reference"]
    bare = {**REQUIRED, "actor": {"model": "a", "lora": {}}, "algorithm": {"estimator": "reinforce"}}
    config = parse_config(bare, "test")
    assert list(config.models) == ["actor.model", "reward.model"]
    assert [str(role) for role in roles_of(config)] == ["actor", "reward"]
    config = parse_config({**bare, "reference": {"model": "other"}}, "test")
    assert [str(role) for role in roles_of(config)] == ["actor", "reward", "reference"]


def test_the_models_of_an_ensemble_are_named_by_their_part() -> None:
    parts = [
        {"name": "tone", "model": "t"},
        {"name": "length", "source": "function", "function": "a:b", "weight": -0.5},
    ]
    config = parse_config({**REQUIRED, "reward": {"source": "ensemble", "parts": parts}}, "test")
    assert config.models["reward.parts.tone.model"] == "t"
    assert [key for key in config.models if key.startswith("reward")] == ["reward.parts.tone.model"]
    assert (config.critic_model, config.reward_tokenizer) == ("a", "a"), "without a reward model, the actor's"
    assert config.reward.has_functions


def test_a_guard_whose_action_is_set_keeps_its_bound() -> None:
    guards = parse_config({**REQUIRED, "guards": {"kl_runaway": {"action": "stop"}}}, "test").guards
    assert (guards.kl_runaway.action, guards.kl_runaway.above) == ("stop", 50.0)


@pytest.mark.parametrize(
    ("estimator", "chosen", "normalized"),
    [
        ("gae", None, True),
        ("reinforce_plus_plus", None, True),
        ("rloo", None, False),
        ("grpo", True, True),
        ("gae", False, False),
    ],
)
def test_advantages_are_normalised_as_the_estimator_does_unless_told(
    estimator: str, chosen: bool | None, normalized: bool
) -> None:
    tree = {**REQUIRED, "algorithm": {"estimator": estimator, "normalize_advantages": chosen}}
    config = parse_config({**tree, "rollout": {"samples_per_prompt": 2}}, "test")
    assert config.algorithm.normalizes_advantages is normalized


@pytest.mark.parametrize(
    "telemetry",
    [
        {"traces": "http://bob:secret@collector:4318"},  # pragma: allowlist secret - an example
        {"traces": "http://bob:sec/secret@collector:4318"},  # pragma: allowlist secret - an example
        {"traces": "http://collector:4318/v1/traces?password=secret"},
        {"traces": "http://collector:4318/v1/traces?a=b&api_%50assword=secret"},
        {"traces": "http://collector:4318#password=secret"},
        {"traces": "otlp://bob:secret@collector"},  # pragma: allowlist secret - an example
        {"mlflow": {"uri": "https://bob:secret@tracking"}},  # pragma: allowlist secret - an example
        # pragma: allowlist nextline secret - an example
        {"mlflow": {"uri": "postgresql+psycopg2://bob:secret@database/figures"}},
    ],
)
def test_passwords_of_telemetry_have_no_place_in_a_config(telemetry: dict[str, Any]) -> None:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}, "telemetry": telemetry}
    with pytest.raises(
        ConfigError, match="expected no user and password in it; give them in the environment"
    ) as caught:
        parse_config(tree, "test")
    assert "telemetry." in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["mlruns", "file:///home/a@b/mlruns", "http://[::1]:5000", "http://tracking:5000/a@b"])
def test_addresses_of_telemetry_without_a_password_are_taken(uri: str) -> None:
    config = parse_config({**REQUIRED, "telemetry": {"mlflow": {"uri": uri}}}, "test")
    assert config.telemetry.mlflow is not None
    assert config.telemetry.mlflow.uri == uri


def test_a_config_laid_over_another_wins_key_by_key_and_overrides_win_over_both(tmp_path: Path) -> None:
    run, above, last = tmp_path / "run.yaml", tmp_path / "above.yaml", tmp_path / "last.yaml"
    run.write_text(
        yaml.safe_dump({**REQUIRED, "services": {"actor": {"devices": [3], "threads": 2}}, "run": {"name": "a"}})
    )
    above.write_text("services:\n  actor: {devices: [0]}\n  critic: {threads: 5}\n")
    last.write_text("services: {critic: {threads: 6}}\n")
    config = load_config(run, ["services.actor.threads=7"], [above, last])
    assert (config.services.actor.devices, config.services.actor.threads) == ((0,), 7)
    assert (config.services.critic.threads, config.run.name) == (6, "a")


def test_what_is_wrong_in_a_config_is_named_by_the_file_that_it_stands_in(tmp_path: Path) -> None:
    run, above = tmp_path / "run.yaml", tmp_path / "above.yaml"
    run.write_text(yaml.safe_dump(REQUIRED))
    above.write_text("security:\n  certificats: here\n")
    with pytest.raises(ConfigError, match=rf"^config {re.escape(str(above))}:2: security\.certificats: unknown key"):
        load_config(run, [], [above])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(run, [], [tmp_path / "none.yaml"])


@pytest.mark.parametrize("given", [{"certificate": "c.pem"}, {"key": "k.pem"}])
def test_a_certificate_of_the_gateway_goes_with_its_key(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="certificate and key: one is given without the other"):
        parse_config({**REQUIRED, "gateway": given}, "test")
