"""docs/hyperparameters.md and docs/tuning.md, held against the config tree and the code that they describe."""

from __future__ import annotations

import re
import types
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
import yaml
from pydantic.fields import FieldInfo

from quartet.cli.config_reference import Setting, settings
from quartet.config import Config, GuardConfig, GuardsConfig, Section, parse_config
from quartet.config.algorithm import Estimator

ROOT = Path(__file__).parents[2]
HYPERPARAMETERS = (ROOT / "docs/hyperparameters.md").read_text(encoding="utf-8")
TUNING = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
OPERATIONAL = {"services", "timeouts", "recovery", "buffer", "security", "gateway", "telemetry"}
COLUMNS = ["key", "meaning", "unit", "default", "why", "range", "NeMo-Aligner", "TRL", "OpenRLHF"]
OTHERS = COLUMNS[-3:]
REQUIRED = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}

# NeMo-Aligner's and TRL's PPO names, as their users know them.
KNOWN_ELSEWHERE = """
initial_policy_kl_penalty use_absolute_kl discount_factor gae_lambda normalize_advantages entropy_coefficient ratio_eps
num_rollout_samples rollout_micro_batch_size inference_micro_batch_size offload_adam_states length_params.max_length
loss_clip_val combine_rm_and_critic_server total_episodes num_ppo_epochs num_mini_batches missing_eos_penalty
whiten_rewards kl_coef kl_estimator cliprange cliprange_value vf_coef gamma lam response_length stop_token
local_rollout_forward_batch_size
"""

SETTINGS = {setting.name: setting for setting in settings() if setting.name.split(".")[0] not in OPERATIONAL}

Row = dict[str, str]


def tables(text: str) -> list[list[Row]]:
    """Every Markdown table, as rows by column name."""
    found: list[list[Row]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        header, rule, rows = lines[0], lines[1], lines[2:]
        assert all(set(cell) == {"-"} for cell in rule), f"no table: {block[:80]!r}"
        assert all(len(row) == len(header) for row in rows), f"cells missing below {header}"
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def table(text: str, *columns: str) -> list[Row]:
    """The rows of all tables with these columns."""
    return [row for rows in tables(text) for row in rows if list(row) == list(columns)]


ROWS = {row["key"].strip("`"): row for row in table(HYPERPARAMETERS, *COLUMNS)}


def accepted(field: FieldInfo) -> str:
    """The values that a field takes by its type and constraints, in the words of the range column."""
    return _accepted(field.annotation, field.metadata)


def _accepted(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [item for part in arguments[1:] for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _accepted(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        choices = [_accepted(part, metadata) for part in arguments if part is not type(None)]
        return " or ".join([*choices, "null"])
    if origin is Literal:
        return ", ".join(arguments)
    if origin is tuple:
        one = _accepted(arguments[0], [])
        return f"list of {one}" if arguments[-1] is Ellipsis else f"list of {len(arguments)}: each {one}"
    if annotation is bool:
        return "true, false"
    if annotation in (int, float):
        return _number("integer" if annotation is int else "number", metadata)
    if annotation is Path:
        return "path"
    if issubclass(annotation, Section):
        return "section"
    assert annotation is str, f"no words for {annotation}"
    patterns = [item.pattern for item in metadata if getattr(item, "pattern", None)]
    return f"text like `{patterns[0]}`" if patterns else "text"


def _number(kind: str, metadata: list[Any]) -> str:
    bounds = {}
    for item in metadata:
        for name in ("ge", "gt", "le", "lt"):
            if isinstance(item, getattr(annotated_types, name.title())):
                bounds[name] = _written(getattr(item, name))
    finite = any(getattr(item, "allow_inf_nan", None) is False for item in metadata)
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low and high:
        return f"{kind} in {'[' if 'ge' in bounds else '('}{low}, {high}{']' if 'le' in bounds else ')'}"
    assert not high, f"no words for {bounds}"
    found = f"{kind} {'≥' if 'ge' in bounds else '>'} {low}" if low else kind
    return found if finite or kind == "integer" else f"{found}, infinite too"


def _written(bound: float) -> str:
    return "2^63" if bound == 2**63 else f"{bound:.15g}"


def test_every_setting_that_is_not_operational_has_one_row() -> None:
    keys = [row["key"].strip("`") for row in table(HYPERPARAMETERS, *COLUMNS)]
    assert sorted(keys) == sorted(SETTINGS)


@pytest.mark.parametrize("key", SETTINGS)
def test_a_row_has_every_cell_filled(key: str) -> None:
    assert all(ROWS[key].values()), f"empty: {[name for name, cell in ROWS[key].items() if not cell]}"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_a_row_says_the_default(setting: Setting) -> None:
    expected = setting.default if setting.field.is_required() else f"`{setting.default}`"
    assert ROWS[setting.name]["default"] == expected


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_a_row_says_the_range_that_the_config_accepts(setting: Setting) -> None:
    own = ROWS[setting.name]["range"].split("; ", 1)[0]
    assert own == accepted(setting.field)


@pytest.mark.parametrize("page", [HYPERPARAMETERS, TUNING], ids=["hyperparameters", "tuning"])
def test_every_key_named_in_a_page_exists(page: str) -> None:
    known = {part for setting in settings() for part in _prefixes(setting.name)}
    prose = [line for line in page.splitlines() if not line.startswith("|")]
    cells = [cell for rows in tables(page) for row in rows for name, cell in row.items() if name not in OTHERS]
    named = set(re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_.\[\]]+)", "\n".join([*prose, *cells])))
    assert len(named) > 20
    assert named - known == set()


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


RECIPES = {
    re.split(r"\*\*", text)[1]: code
    for text, code in re.findall(r"\n\n(\*\*(?:(?!```).)*?)```yaml\n(.*?)```", HYPERPARAMETERS, re.DOTALL)
}


def test_every_estimator_has_a_recipe() -> None:
    used = {yaml.safe_load(code).get("algorithm", {}).get("estimator") for code in RECIPES.values()}
    assert used - {None} == set(get_args(Estimator))


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_a_config(title: str) -> None:
    given = yaml.safe_load(RECIPES[title])
    parse_config({name: REQUIRED.get(name, {}) | given.get(name, {}) for name in {*REQUIRED, *given}}, "recipe")


@pytest.mark.parametrize("name", KNOWN_ELSEWHERE.split())
def test_names_of_other_projects_lead_to_ours(name: str) -> None:
    answers = [
        row["Quartet"]
        for other in ("NeMo-Aligner", "TRL")
        for row in table(HYPERPARAMETERS, other, "Quartet")
        if f"`{name}`" in row[other]
    ]
    assert len(answers) == 1
    assert answers[0]


@pytest.mark.parametrize(
    "guard", [name for name, field in GuardsConfig.model_fields.items() if isinstance(field.default, GuardConfig)]
)
def test_a_guard_has_a_symptom_with_its_remedy(guard: str) -> None:
    rows = [row for row in table(TUNING, "symptom", "cause", "remedy", "guard") if row["guard"] == f"`{guard}`"]
    assert rows
    assert all(row["cause"] and row["remedy"] for row in rows)


def test_there_are_symptoms_enough() -> None:
    rows = table(TUNING, "symptom", "cause", "remedy", "guard")
    assert len(rows) >= 15
    assert all(all(row.values()) for row in rows)


METRICS = [
    name
    for row in table(TUNING, "metric", "what it is", "healthy", "worrying")
    for name in re.findall(r"`([^`]+)`", row["metric"])
]


def test_metrics_stand_once() -> None:
    assert len(METRICS) > 30
    assert len(METRICS) == len(set(METRICS))


@cache
def _code() -> str:
    """What may write metrics. The wire and the config only name things."""
    files = [path for folder in ("src/quartet", "services") for path in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path.parent.name not in ("v1", "config"))


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_of_the_table_exists_in_the_code(metric: str) -> None:
    assert re.search("|".join(_spellings(metric)), _code()), f"{metric}: nothing writes it"


def _spellings(metric: str) -> list[str]:
    """How code may write a metric's name: as it is, or with the part that varies filled in."""
    stem = re.sub(r"_(actor|critic)$", "", metric)
    # reward_NAME_mean stands for one metric for each part of an ensemble.
    pattern = re.sub(r"[A-Z]+", r"\\{[^{}]+\\}", metric)
    by_role = [rf'"{stem}"', rf'"{stem}_\{{'] if stem != metric else []
    return [rf'"{metric}"', rf'f"{pattern}"', *by_role]


def test_every_metric_of_a_step_is_in_the_table() -> None:
    source = (ROOT / "services/orchestrator/experience.py").read_text(encoding="utf-8")
    figures = source[source.index("metrics = {") : source.index("experience = Experience(")]
    written = set(re.findall(r'"([a-z_0-9]+)"(?=: |\])', figures))
    assert len(written) > 10
    assert written - set(METRICS) == set()
