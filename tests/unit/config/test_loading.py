"""Config loading: files, overrides, and the locations in its error messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from quartet.config.loading import FIRST_CONFIG_LINE, load_config, shareable_yaml
from quartet.errors import ConfigError
from tests.every_case import every_case
from tests.unit.config_files import MINIMAL, REQUIRED, refusal, write


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


# Text to append to the minimal config, and the expected error after the file name.
WRONG = {
    "an unknown section": ("rum: {}\n", ":7: rum: unknown key; did you mean 'run'?"),
    "an unknown key": ("run:\n  step: 10\n", ":8: run.step: unknown key; did you mean 'steps'?"),
    "an unknown nested key": (
        "algorithm:\n  kl_controller:\n    kind: fixed\n    targett: 3\n",
        ":10: algorithm.kl_controller.targett: unknown key; did you mean 'target'?",
    ),
    "a key without a similar one": (
        "checkpoint:\n  zzz: 1\n",
        ":8: checkpoint.zzz: unknown key; known keys: every_steps, keep_last",
    ),
    "steps of 0": ("run:\n  steps: 0\n", ":8: run.steps: expected at least 1, not 0"),
    "a word instead of a number": ("run:\n  steps: many\n", ":8: run.steps: expected a whole number, not 'many'"),
    "a negative seed": ("run:\n  seed: -1\n", ":8: run.seed: expected at least 0, not -1"),
    "a seed of 2^63": ("run:\n  seed: 9223372036854775808\n", ":8: run.seed: expected less than"),
    "a run name with a slash": ("run:\n  name: a/b\n", ":8: run.name: String should match pattern"),
    "gamma above 1": ("algorithm:\n  gamma: 1.5\n", ":8: algorithm.gamma: expected at most 1"),
    "NaN": ("algorithm:\n  gamma: .nan\n", ":8: algorithm.gamma: expected a finite number, not nan"),
    "a number above all limits": (
        "algorithm:\n  estimator_parameters: {x: 1.0e+31}\n",
        ":8: algorithm.estimator_parameters.x",
    ),
    "infinity": ("algorithm:\n  clip_ratio: .inf\n", ":8: algorithm.clip_ratio: expected a finite number"),
    "a dual clip of 1": ("algorithm:\n  dual_clip: 1\n", ":8: algorithm.dual_clip: expected more than 1"),
    "temperature 0": (
        "rollout:\n  temperature: 0\n",
        ":8: rollout.temperature: expected at least 0.001",
    ),
    "a number beyond the limit of messages": (
        "critic:\n  micro_batch_tokens: 5000000000\n",
        ":8: critic.micro_batch_tokens: expected at most 1000000000, not 5000000000",
    ),
    "a huge number": (
        "  micro_batch_tokens: 1.0e+23\n",
        ":7: reward.micro_batch_tokens: expected a smaller number, not 1e+23",
    ),
    "more concurrent sequences than a step may have": (
        "rollout:\n  max_concurrent_sequences: 65537\n",
        ":8: rollout.max_concurrent_sequences: expected at most 65536, not 65537",
    ),
    "true instead of an integer": (
        "rollout:\n  max_off_policy_steps: true\n",
        ":8: rollout.max_off_policy_steps: expected a number, not true",
    ),
    "true instead of an optional number": (
        "algorithm:\n  clip_ratio_high: true\n",
        ":8: algorithm.clip_ratio_high: expected a number, not true",
    ),
    "1 instead of true": (
        "critic:\n  gradient_checkpointing: 1\n",
        ":8: critic.gradient_checkpointing: expected true or false, not 1",
    ),
    "top_p 0": ("rollout:\n  top_p: 0\n", ":8: rollout.top_p: expected more than 0"),
    "an unknown choice": (
        "algorithm:\n  kl_estimator: k9\n",
        ":8: algorithm.kl_estimator: expected 'k1' or 'absolute', not 'k9'",
    ),
    "a wrong element of a list": (
        "services:\n  actor:\n    devices: [0, -1]\n",
        ":9: services.actor.devices.1: expected at least 0, not -1",
    ),
    "a list that is too short": (
        "critic:\n  optimizer:\n    betas: [0.9]\n",
        ":9: critic.optimizer.betas.1: missing",
    ),
    "a scalar instead of a section": (
        "checkpoint: 3\n",
        ":7: checkpoint: expected a section with the keys every_steps, keep_last, best_metric, best_mode, not 3",
    ),
    "true instead of a section": ("critic: {lora: true}\n", "lora: expected a section with the keys rank, alpha"),
    "another project's name": ("algorithm: {kl_coef: 0.1}\n", "did you mean 'algorithm.kl_coefficient'?"),
    "another project's name in the critic": (
        "critic: {lr: 1}\n",
        "critic.lr: unknown key; did you mean 'critic.learning_rate'?",
    ),
    "another project's name of a setting of this section": (
        "  model_path: m\n",
        ":7: reward.model_path: unknown key; did you mean 'reward.model'?",
    ),
    "another project's name beside a similar one": (
        "critic: {optimizer: {epsilon: 1}}\n",
        "critic.optimizer.epsilon: unknown key; did you mean 'eps'?",
    ),
    "another project's section": ("trainer: {}\n", "trainer: unknown key; known keys: run, data, algorithm"),
    "a key of another section": ("algorithm: {temperature: 1}\n", "did you mean 'rollout.temperature'?"),
    "another project's estimator": ("algorithm: {estimator: ppo}\n", "expected gae (PPO), reinforce, rloo"),
    "a text instead of a list": (
        "services: {actor: {devices: '0'}}\n",
        "devices: expected a list, such as [0], not '0'",
    ),
    "an address without port": (
        "services:\n  actor:\n    address: localhost\n",
        ":9: services.actor.address: 'localhost': expected HOST:PORT",
    ),
    "an invalid port": (
        "services:\n  actor:\n    listen: 127.0.0.1:70000\n",
        ":9: services.actor.listen: '127.0.0.1:70000': expected HOST:PORT",
    ),
    "a generator without a port": (
        "services:\n  generators: ['127.0.0.1:0']\n",
        ":8: services.generators: '127.0.0.1:0': expected HOST:PORT with the port at which the process listens",
    ),
    "a generator twice": (
        "services:\n  generators: ['h:1', 'g:1', 'h:1']\n",
        ":8: services.generators: h:1: given more than once; name each address once",
    ),
    "a url of another kind": ("buffer:\n  url: http://h\n", ":8: buffer.url: expected redis://HOST:PORT/DB"),
    "more mini-batches than responses": (
        "rollout: {prompts_per_step: 4}\nalgorithm: {num_mini_batches: 5}\n",
        "algorithm.num_mini_batches 5: expected at most the 4 responses of a step",
    ),
    "verl's weight of the KL loss": ("algorithm: {kl_loss_coef: 0.1}\n", "did you mean 'algorithm.kl_coefficient'?"),
    "a duplicate section": ("actor: {model: other}\n", ":7: actor: duplicate key"),
}


@every_case("name", WRONG)
def test_a_wrong_value_is_refused_with_file_line_key_and_expectation(name: str, tmp_path: Path) -> None:
    text, expected = WRONG[name]
    path = write(tmp_path, MINIMAL + text)
    message = refusal(path)
    assert message.startswith(f"config {path}:")
    assert expected in message


def test_missing_keys_and_sections_are_reported_with_their_location(tmp_path: Path) -> None:
    path = write(tmp_path, "data:\n  prompts: p\nactor:\n  dtype: float32\n")
    message = refusal(path)
    assert f"config {path}:3: actor.model: missing; it has no default" in message
    assert f"config {path}: reward: missing; it has no default" in message


def test_all_wrong_keys_are_reported_together(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, MINIMAL + "run:\n  steps: 0\n  seed: -1\n"))
    assert ":8: run.steps" in message
    assert ":9: run.seed" in message


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
def test_invalid_yaml_is_refused_with_file_and_line(text: str, expected: str, tmp_path: Path) -> None:
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
        ("algorithm.whiten_rewards=off", "algorithm", "whiten_rewards", False),
        ("rollout.max_concurrent_sequences=1e2", "rollout", "max_concurrent_sequences", 100),
        ("run.name=7", "run", "name", "7"),
        ("actor.model=some/where=else", "actor", "model", "some/where=else"),
        ("run.name=1e5x", "run", "name", "1e5x"),
        ("data.prompts=/tmp/a b.jsonl", "data", "prompts", Path("/tmp/a b.jsonl")),
    ],
)
def test_an_override_is_read_as_yaml(override: str, section: str, key: str, value: object, minimal: Path) -> None:
    assert getattr(getattr(load_config(minimal, [override]), section), key) == value


def test_overrides_set_nested_keys_and_lists_and_the_last_one_wins(minimal: Path) -> None:
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
def test_an_override_without_an_assignment_is_refused(override: str, minimal: Path) -> None:
    assert refusal(minimal, override) == f"--set {override}: expected KEY.KEY=VALUE, for example run.steps=10"


@pytest.mark.parametrize("value", ["{horizon:5}", "{horizon: 5, kind:fixed}"])
def test_a_mapping_without_a_space_after_a_colon_is_explained(value: str, minimal: Path) -> None:
    message = refusal(minimal, f"algorithm.kl_controller={value}")
    name = value.strip("{}").split(", ")[-1]
    spaced = name.replace(":", ": ")
    assert message == f"--set algorithm.kl_controller: {name} has no space after the colon; write {spaced}"


def test_a_value_of_several_types_is_one_problem(minimal: Path) -> None:
    message = refusal(minimal, "algorithm.estimator=grpo", "algorithm.estimator_parameters.normalize_std=maybe")
    assert message == (
        "--set algorithm.estimator_parameters.normalize_std: expected true or false, or a number, not 'maybe'"
    )


def test_values_are_quoted_as_in_the_file(minimal: Path) -> None:
    assert refusal(minimal, "run.steps=null") == "--set run.steps: expected a whole number, not null"


def test_an_override_of_a_section_is_reported_instead_of_the_lines_that_it_replaces(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "algorithm:\n  kl_controller: {kind: fixed}\n")
    assert refusal(path, "algorithm.kl_controller={kind: none}").startswith("--set algorithm.kl_controller.kind: ")


def test_an_override_below_a_value_is_refused(minimal: Path) -> None:
    assert "model is a value, not a section" in refusal(minimal, "actor.model.name=x")


def test_a_wrong_override_is_reported_instead_of_the_line_that_it_replaces(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "run:\n  steps: 10\n")
    message = refusal(path, "run.steps=0")
    assert "--set run.steps" in message
    assert ":8" not in message
    assert "did you mean 'steps'" in refusal(path, "run.stepz=1")


def test_a_section_that_only_an_override_names_is_located_there(minimal: Path) -> None:
    assert refusal(minimal, "actor.optim.lr=1").startswith("--set actor.optim: unknown key")


def test_a_hash_in_an_override_does_not_start_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {prompts: p}\nactor: {model: a}\nreward: {model: r}\n")
    config = load_config(path, ["data.prompts=/tmp/a #b/x.jsonl", "run.name=123"])
    assert str(config.data.prompts) == "/tmp/a #b/x.jsonl"
    assert config.run.name == "123"


def test_an_overlay_replaces_single_keys_and_overrides_replace_both(tmp_path: Path) -> None:
    run, above, last = tmp_path / "run.yaml", tmp_path / "above.yaml", tmp_path / "last.yaml"
    run.write_text(
        yaml.safe_dump({**REQUIRED, "services": {"actor": {"devices": [3], "num_threads": 2}}, "run": {"name": "a"}})
    )
    above.write_text("services:\n  actor: {devices: [0]}\n  critic: {num_threads: 5}\n")
    last.write_text("services: {critic: {num_threads: 6}}\n")
    config = load_config(run, ["services.actor.num_threads=7"], [above, last])
    assert (config.services.actor.devices, config.services.actor.num_threads) == ((0,), 7)
    assert (config.services.critic.num_threads, config.run.name) == (6, "a")


def test_an_error_in_an_overlay_is_reported_with_its_file(tmp_path: Path) -> None:
    run, above = tmp_path / "run.yaml", tmp_path / "above.yaml"
    run.write_text(yaml.safe_dump(REQUIRED))
    above.write_text("security:\n  certificats: here\n")
    with pytest.raises(ConfigError, match=rf"^config {re.escape(str(above))}:2: security\.certificats: unknown key"):
        load_config(run, [], [above])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(run, [], [tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    ("before", "changes", "expected"),
    [
        (["algorithm.estimator=grpo"], ["algorithm.estimator=rloo"], "none"),
        (["algorithm.estimator=rloo"], ["algorithm.estimator=grpo"], "k3"),
        (["algorithm.estimator=grpo"], ["algorithm.estimator_parameters={normalize_std: false}"], "none"),
        (["algorithm.estimator=grpo"], ["run.steps=7"], "k3"),
        (["algorithm.estimator=grpo", "algorithm.kl_loss=k2"], ["algorithm.estimator=rloo"], "k2"),
        (["algorithm.estimator=grpo", "algorithm.kl_loss=none"], ["run.steps=7"], "none"),
        (["algorithm.estimator=grpo"], ["algorithm.estimator=rloo", "algorithm.kl_loss=k3"], "k3"),
    ],
)
def test_a_resolved_default_in_the_config_of_a_run_follows_the_overrides(
    before: list[str], changes: list[str], expected: str, minimal: Path, tmp_path: Path
) -> None:
    samples = "rollout={samples_per_prompt: 4, prompts_per_step: 4}"
    stored = tmp_path / "stored.yaml"
    stored.write_text(FIRST_CONFIG_LINE + load_config(minimal, [samples, *before]).to_yaml())
    assert load_config(stored, changes).algorithm.kl_loss == expected
    stored.write_text(shareable_yaml(stored, changes))
    assert load_config(stored).algorithm.kl_loss == expected


def test_the_default_of_truncation_in_the_config_of_a_run_follows_the_overrides(minimal: Path, tmp_path: Path) -> None:
    stored = tmp_path / "stored.yaml"
    environment = ["environment.class_name=my_tasks:Task", "rollout.max_turns=2"]
    stored.write_text(FIRST_CONFIG_LINE + load_config(minimal).to_yaml())
    assert load_config(stored).algorithm.truncation.treatment == "penalty"
    assert load_config(stored, environment).algorithm.truncation.treatment == "keep"
    stored.write_text(FIRST_CONFIG_LINE + load_config(minimal, ["algorithm.truncation.treatment=mask"]).to_yaml())
    assert load_config(stored, environment).algorithm.truncation.treatment == "mask"


def test_a_value_in_a_config_of_the_user_stays(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + "algorithm: {estimator: rloo, kl_loss: none}\n")
    changes = ["algorithm.estimator=grpo", "rollout={samples_per_prompt: 4, prompts_per_step: 4}"]
    assert load_config(minimal, changes).algorithm.kl_loss == "none"
