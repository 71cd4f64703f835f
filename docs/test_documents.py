"""README and the pages below docs/, checked against the code: links, commands, settings, recipes, metrics and claims."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from typer.main import get_command

from benchmarks.__main__ import NAMES, summary
from quartet.cli.config_reference import settings
from quartet.cli.main import app
from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.config.guards import GuardConfig, GuardsConfig
from quartet.config.loading import parse_config
from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES, Aggregation
from quartet.config.root import Config
from quartet.config.supervised import RewardModelConfig
from quartet.errors import ConfigError
from quartet.telemetry.evaluation_metrics import EVALUATION_METRICS
from quartet.telemetry.step_metrics import STEP_METRICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
HAND_WRITTEN = {
    name: text
    for name, text in TEXTS.items()
    if not name.startswith("docs/reference/") or name.endswith(("exit-status.md", "run-directory.md"))
}
HYPERPARAMETERS, TUNING = TEXTS["docs/hyperparameters.md"], TEXTS["docs/tuning.md"]
PEERS = ["NeMo-Aligner", "TRL", "OpenRLHF"]
REQUIRED = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}

# Settings of NeMo-Aligner and of TRL's PPO that their users look up first.
PEER_NAMES = """
initial_policy_kl_penalty use_absolute_kl discount_factor gae_lambda normalize_advantages entropy_coefficient ratio_eps
num_rollout_samples rollout_micro_batch_size inference_micro_batch_size offload_adam_states length_params.max_length
loss_clip_val combine_rm_and_critic_server total_episodes num_ppo_epochs num_mini_batches missing_eos_penalty
whiten_rewards kl_coef kl_estimator cliprange cliprange_value vf_coef gamma lam response_length stop_token
local_rollout_forward_batch_size
"""

Row = dict[str, str]


def tables(text: str) -> list[list[Row]]:
    """Return every Markdown table as rows by column name."""
    parsed: list[list[Row]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        header, rule, rows = lines[0], lines[1], lines[2:]
        assert all(set(cell) == {"-"} for cell in rule), f"not a table: {block[:80]!r}"
        assert all(len(row) == len(header) for row in rows), f"missing cells below {header}"
        parsed.append([dict(zip(header, row, strict=True)) for row in rows])
    return parsed


def table(text: str, *columns: str) -> list[Row]:
    """Return the rows of all tables with these columns."""
    return [row for rows in tables(text) for row in rows if list(row) == list(columns)]


def code_blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced code blocks in these languages."""
    return [code for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if language in languages]


def prose(text: str) -> str:
    """Return a page without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_point_to_a_file_and_a_heading() -> None:
    broken = []
    for path in PAGES:
        name = path.relative_to(ROOT).as_posix()
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[name])):
            if re.match(r"\w+:", target):
                continue
            file, _, anchor = target.partition("#")
            linked = (path.parent / file).resolve() if file else path
            if not linked.exists():
                broken.append(f"{name}: {target}: no such file")
            elif anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text(encoding="utf-8")):
                broken.append(f"{name}: {target}: no such heading")
    assert not broken


def test_every_page_is_in_the_site_navigation() -> None:
    index = TEXTS["docs/index.md"]
    listed = {
        line.strip() for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for line in block.splitlines()
    }
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("adr/")} - {"index"} - listed == set()


def test_tests_named_in_the_threat_model_exist() -> None:
    named = {
        name
        for row in table(TEXTS["docs/threat-model.md"], "threat", "defence", "test")
        for name in re.findall(r"\b(\w+(?:/\w+)*/test_\w+)", row["test"])
    }
    assert len(named) > 15
    assert [
        name for name in sorted(named) if not any((ROOT / folder / f"{name}.py").is_file() for folder in ("tests", ""))
    ] == []


def test_source_files_and_modules_named_in_pages_exist() -> None:
    missing = set()
    folders = "src|services|gateway|tests|docs|docker|examples|helm|configs|benchmarks|proto|\\.ci|\\.github"
    for name, text in HAND_WRITTEN.items():
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            if not (ROOT / path).exists():
                missing.add(f"{name}: {path}")
        for module in re.findall(r"`(quartet(?:\.[a-z_0-9]+)+)", text):
            # The last part may be a name in the module.
            file = ROOT / "src" / module.replace(".", "/")
            if not any(
                path.exists() for path in (file, file.with_suffix(".py"), file.parent, file.parent.with_suffix(".py"))
            ):
                missing.add(f"{name}: {module}")
    assert not missing


def test_make_targets_named_in_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    missing = {
        f"{name}: make {target}"
        for name, text in TEXTS.items()
        for target in re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
        if target not in targets
    }
    assert not missing


def test_benchmarks_named_in_pages_exist() -> None:
    named = {name for text in TEXTS.values() for name in re.findall(r"python -m benchmarks ([a-z]\w*)", text)}
    assert named - set(NAMES) == set()
    assert all(summary(name) for name in NAMES)


def test_quartet_commands_named_in_pages_exist() -> None:
    known = {" ".join(path) for path in _commands(get_command(app), ())}
    groups = {command.split()[0] for command in known if " " in command}
    missing = set()
    for name, text in HAND_WRITTEN.items():
        for words in re.findall(r"(?:`|^|/)quartet ([a-z][a-z-]*(?: [a-z]+)?)", text, re.MULTILINE):
            command = words if words.split()[0] in groups else words.split()[0]
            if command not in known | groups:
                missing.add(f"{name}: quartet {words}")
    assert not missing


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, below in getattr(command, "commands", {}).items():
        if getattr(below, "commands", None):
            yield from _commands(below, (*path, name))
        else:
            yield (*path, name)


def test_measured_claims_of_the_readme_are_on_the_linked_page() -> None:
    claims = re.findall(
        r"- \*\*(.*?)\[`((?:make|python -m benchmarks) [a-z_]+)`\]\((docs/[a-z/]+\.md)\)", TEXTS["README.md"], re.S
    )
    assert len(claims) >= 3
    assert any("." in number for claim, *_ in claims for number in _numbers(claim))
    for claim, command, page in claims:
        assert f"`{command}`" in TEXTS[page], f"{page} does not name {command}"
        for number in _numbers(claim):
            assert number in TEXTS[page], f"{page} does not have {number}: {claim}"


def _numbers(claim: str) -> list[str]:
    return re.findall(r"\d+\.\d+|\d+ of \d+", claim)


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 150


def test_settings_named_in_pages_exist() -> None:
    every = [*settings(), *settings(RewardModelConfig)]
    known = {part for setting in every for part in _prefixes(setting.name)}
    known |= {name.replace("services.actor", "services.ROLE") for name in known}
    unknown = set()
    for name, text in HAND_WRITTEN.items():
        cells = [
            cell for rows in _tables_of(text) for row in rows for column, cell in row.items() if column not in PEERS
        ]
        lines = [line for line in text.splitlines() if not line.startswith("|")]
        named = re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[A-Za-z_.\[\]]+)", "\n".join([*lines, *cells]))
        unknown |= {f"{name}: {key}" for key in named if key not in known and not _is_a_file(key)}
    assert not unknown


def _tables_of(text: str) -> list[list[Row]]:
    return tables(re.sub(r"\\\|", "/", text))


def _is_a_file(name: str) -> bool:
    """Return whether a name is a file, or the name of a process in its certificate."""
    return name.rpartition(".")[2] in ("py", "yaml", "json", "jsonl", "md", "quartet")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def test_yaml_examples_are_accepted_as_configs() -> None:
    refused = []
    examples = [(name, code) for name, text in HAND_WRITTEN.items() for code in code_blocks(text, "yaml")]
    configs = [
        (name, example) for name, code in examples if set(example := yaml.safe_load(code)) <= set(Config.model_fields)
    ]
    assert len(configs) > 20
    for name, example in configs:
        try:
            parse_config(_with_required_sections(example), "example")
        except ConfigError as error:
            if not _needs_more_than_the_example(str(error)):
                refused.append(f"{name}: {example}: {error}")
    assert not refused


def _with_required_sections(example: dict[str, Any]) -> dict[str, Any]:
    """Return an example with the sections that every config needs."""
    data = example.get("data", {})
    kind = example.get("environment", {}).get("kind", "class")
    prompts = {} if "sets" in data or kind == "traffic" else {"prompts": "p"}
    validation = {} if "validation_set" in data else {"validation": "v"}
    required: dict[str, Any] = {"data": {**prompts, **validation}, "actor": {"model": "a"}}
    if "environment" in example:
        environment = {"class_name": "my_game:Game"} if kind == "class" else {}
        required |= {"rollout": {"max_turns": 4}, "environment": environment}
    if example.get("reward", {}).get("source", "model") == "model":
        required["reward"] = {"model": "r"}
    return {name: required.get(name, {}) | example.get(name, {}) for name in {**required, **example}}


def _needs_more_than_the_example(error: str) -> bool:
    """Return whether an error names a file of the example that is not on this machine."""
    return "no such" in error


def test_python_examples_of_the_extension_pages_run() -> None:
    import torch

    from quartet.ppo.advantages import EstimatorInput
    from quartet.ppo.losses import PolicyLossInput, checked_policy_loss

    reward = "".join(code_blocks(TEXTS["docs/rewards.md"], "python"))
    [estimator] = code_blocks(TEXTS["docs/extend.md"], "python")
    names: dict[str, Any] = {}
    exec(reward + estimator, names)  # noqa: S102 - the pages are part of the repository
    assert names["final_number"]("What is 6 times 7?", "It is 42", {"answer": 42}) == 1.0
    assert names["final_number"]("What is 6 times 7?", "It is 41", {"answer": 42}) == 0.0
    inputs = EstimatorInput(
        torch.tensor([1.0, 2.0, 6.0]), torch.zeros(6), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])
    )
    assert names["minus_median"](inputs).tolist() == [-1.0, 0.0, 4.0]
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = PolicyLossInput(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        rollout_log_probs=log_probs.detach(),
        advantages=torch.tensor([1.0, 3.0]),
        mask=torch.ones(2, dtype=torch.bool),
        weights=torch.full((2,), 0.5),
        lengths=torch.tensor([2]),
    )
    loss = checked_policy_loss(names["unclipped"], "my_algorithm:unclipped")(batch)
    assert loss.loss.item() == -2.0
    assert loss.approx_kl_sum.item() == 0.0


def recipes() -> Iterable[tuple[str, str]]:
    """Return the title and the YAML of each recipe."""
    section = HYPERPARAMETERS.partition("\n## Recipes\n")[2]
    return re.findall(r"\n\n\*\*((?:(?!```).)*?)\*\*(?:(?!```).)*?```yaml\n(.*?)```", section, re.DOTALL)


def test_every_built_in_estimator_has_a_recipe_that_is_a_config() -> None:
    used = set()
    for _, code in recipes():
        example = yaml.safe_load(code)
        config = parse_config(
            {name: REQUIRED.get(name, {}) | example.get(name, {}) for name in {*REQUIRED, *example}}, "recipe"
        )
        used.add(config.algorithm.estimator)
    assert used >= BUILT_IN_ESTIMATORS.keys()


def test_the_table_of_estimators_has_every_built_in_one() -> None:
    rows = table(HYPERPARAMETERS, "name", "advantage", "source", "other names")
    assert list(dict.fromkeys(row["name"].split("`")[1] for row in rows)) == list(BUILT_IN_ESTIMATORS)


def test_the_recipe_of_remax_sums_the_tokens_of_a_response() -> None:
    [algorithm] = [yaml.safe_load(code)["algorithm"] for title, code in recipes() if title == "ReMax"]
    assert algorithm["loss_aggregation"] == "sequence_mean_token_sum"


def test_the_config_of_dr_grpo_has_the_aggregation_of_its_recipe() -> None:
    [recipe] = [yaml.safe_load(code)["algorithm"] for title, code in recipes() if title == "Dr. GRPO"]
    shipped = yaml.safe_load((ROOT / "configs/reviews/dr_grpo.yaml").read_text())["algorithm"]
    for key in ("estimator", "estimator_parameters", "loss_aggregation"):
        assert shipped[key] == recipe[key]


def test_settings_of_other_projects_map_to_a_setting_or_an_explanation() -> None:
    rows = [row for rows in tables(HYPERPARAMETERS) for row in rows]
    missing = [
        name
        for name in PEER_NAMES.split()
        if not any(re.search(rf"`(?:[\w.]+\.)?{re.escape(name)}`", row.get(peer, "")) for row in rows for peer in PEERS)
    ]
    assert not missing


def test_every_setting_is_listed_once_in_the_hyperparameters() -> None:
    keys = [row["key"].strip("`") for rows in tables(HYPERPARAMETERS) for row in rows if "key" in row]
    assert len(keys) > 90
    assert len(keys) == len(set(keys))
    assert set(keys) - {setting.name for setting in settings()} == set()


def test_the_page_of_policy_losses_has_every_loss_with_its_defaults_and_parameters() -> None:
    defaults, parameters, aggregations = tables(TEXTS["docs/losses.md"])
    assert [row["`policy_loss`"].strip("`") for row in defaults] == list(BUILT_IN_POLICY_LOSSES)
    for row in defaults:
        spec = BUILT_IN_POLICY_LOSSES[row["`policy_loss`"].strip("`")]
        *clips, aggregation = row["clip range, aggregation"].split(", ")
        assert aggregation == f"`{spec.aggregation}`"
        expected = ["none"] if spec.clip_low is None else [f"{spec.clip_low:g}", f"{spec.clip_high:g}"]
        assert [clip if clip == "none" else f"{float(clip):g}" for clip in clips] == expected
    told = {
        name: row["`policy_loss_parameters`"]
        for row in parameters
        for name in re.findall(r"`(\w+)`", row["`policy_loss`"])
    }
    for name, spec in BUILT_IN_POLICY_LOSSES.items():
        values = dict(re.findall(r"`(\w+)` ([\d.]+)", told[name]))
        assert {key: float(value) for key, value in values.items()} == spec.resolve({}), name
    assert [row["`loss_aggregation`"].strip("`") for row in aggregations] == list(get_args(Aggregation))


def test_ratio_level_sequence_is_not_mapped_to_gspo() -> None:
    [row] = [row for row in table(HYPERPARAMETERS, "key", "why this default", *PEERS) if "ratio_level" in row["key"]]
    assert all("gspo" not in row[peer].lower() for peer in PEERS)
    assert "not GSPO" in row["why this default"]


def test_every_guard_has_a_symptom_and_a_remedy() -> None:
    rows = table(TUNING, "symptom", "cause", "remedy", "guard")
    assert len(rows) >= 15
    assert all(all(row.values()) for row in rows)
    guards = {name for name, field in GuardsConfig.model_fields.items() if isinstance(field.default, GuardConfig)}
    assert {f"`{guard}`" for guard in guards} <= {row["guard"] for row in rows}


METRICS = [item.name for item in (*STEP_METRICS, *EVALUATION_METRICS)]


def test_every_metric_is_defined_once() -> None:
    assert len(METRICS) > 30
    assert len(METRICS) == len(set(METRICS))


def test_every_defined_metric_is_written_by_the_code() -> None:
    assert [metric for metric in METRICS if not re.search("|".join(_spellings(metric)), _code())] == []


def test_metrics_named_in_the_tuning_page_are_defined() -> None:
    rows = table(TUNING, "symptom", "cause", "remedy", "guard")
    named = {name for row in rows for name in re.findall(r"`([^`.]+)`", row["symptom"])}
    assert named - set(METRICS) == set()


@cache
def _code() -> str:
    """Return the code that can write metrics. The protobuf modules and the config only contain names."""
    files = [path for folder in ("src/quartet", "services") for path in sorted((ROOT / folder).rglob("*.py"))]
    excluded = ("v1", "config")
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in files
        if path.parent.name not in excluded and path.name not in ("step_metrics.py", "metric_definition.py")
    )


def _spellings(metric: str) -> list[str]:
    """Return patterns for a metric's name in code: unchanged, or with the variable part filled in."""
    stem = re.sub(r"_(actor|critic|generator)$", "", metric)
    # reward_NAME_mean stands for one metric per part of an ensemble, PHASE_seconds for one per phase.
    pattern = re.sub(r"[A-Z]+", r"\\{[^{}]+\\}", metric)
    by_role = [rf'"{stem}"', rf'"{stem}_\{{'] if stem != metric else []
    by_phase = [r'_seconds"'] if metric.endswith("_seconds") else []
    by_outcome = [r'f"outcome_\{'] if metric.startswith("outcome_") else []
    logged = [r'f"\{PREFIX\}\{name\}"'] if metric.startswith("logged_") else []
    return [rf'"{metric}"', rf'f"{pattern}"', *by_role, *by_phase, *by_outcome, *logged]


def test_every_metric_of_an_experience_is_defined() -> None:
    source = (ROOT / "services/orchestrator/algorithm/experience.py").read_text(encoding="utf-8")
    part = source[source.index("metrics = {") : source.index("def _part_means")]
    written = set(re.findall(r'"([a-z_0-9]+)"(?=: |\])', part))
    assert len(written) > 10
    assert written - set(METRICS) == set()
