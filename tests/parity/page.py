"""Writer of docs/evidence/parity.md, and a reader of its tables for a test."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.parity import differences
from tests.parity.comparison import MetricComparison
from tests.parity.differences import Difference
from tests.parity.losses import section

LABELS = {
    "log_probs": "log-probs of the rollouts",
    "reference_log_probs": "reference log-probs",
    "values": "values",
    "scores": "scores",
    "advantages": "advantages",
    "returns": "returns",
    "kl_mean": "KL to the reference, nats per response",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "entropy": "entropy, nats per token",
    "clip_fraction": "clip fraction",
    "value_clip_fraction": "value clip fraction",
    "approx_kl": "KL old to new (k2), nats per token",
    "grad_norm": "gradient norm",
    "policy_weights": "change of the policy's weights",
    "critic_weights": "change of the value model's weights",
}

INTRODUCTION = """\
# Parity with other libraries

Does Quartet compute the same update as TRL? Yes, within rounding errors, apart from the differences listed [below](#differences).
Does each loss, correction and estimator give the numbers of other libraries? See
[Losses and estimators](#losses-and-estimators). `make parity` measures both and writes this page:

- It runs one update of TRL's own trainers on tiny checkpoints, and captures the rollouts and all intermediate results. Policy,
  reference, reward and value model are seeded Llamas with a vocabulary of 256 tokens.
- Quartet's functions (scoring, experience, losses, optimizer steps) then process the same rollouts with the same settings.
- The last column of the [list of differences](#differences) says how each is switched off, or why it stays on.
- *TRL as shipped* is what TRL logs with the same settings and the same order of sequences, and all other differences.

| compared | by | tolerance |
|---|---|---|
| numbers | relative difference | {tolerance:g} |
| arrays; the tables show root mean squares | largest difference over largest magnitude | {tolerance:g} |
| changes of weights; the tables show Euclidean norms | norm of the difference over norm of TRL's change | {weights_tolerance:g} |

Weights have a larger tolerance because Adam divides each gradient by its own magnitude, and so amplifies rounding errors.

{versions}; float32 on CPU.
"""


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The compared metrics of a scenario, and those that TRL logs ``as_shipped``, by name."""

    name: str
    about: str
    metrics: Sequence[MetricComparison]
    as_shipped: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """Return a message for each metric out of tolerance, and one if nothing was clipped."""
        failed = [
            f"{self.name}: {LABELS[metric.name]}: Quartet {metric.quartet:.8g}, TRL {metric.trl:.8g}, "
            f"difference {metric.difference:.1e}, expected at most {metric.tolerance:g}"
            for metric in self.metrics
            if not metric.holds
        ]
        if not all(metric.trl > 0 for metric in self.metrics if metric.name == "clip_fraction"):
            failed.append(
                f"{self.name}: nothing was clipped, so the clipping was not compared; raise the learning rate"
            )
        return failed


def write(
    results: Sequence[ScenarioResult], versions: str, tolerance: float, weights_tolerance: float, losses: str = ""
) -> str:
    """Return the page in Markdown, with the section ``losses`` of ``tests.parity.losses``."""
    parts = [INTRODUCTION.format(versions=versions, tolerance=tolerance, weights_tolerance=weights_tolerance)]
    parts += [_section(result) for result in results]
    parts.append(losses + section.END)
    parts.append(_differences("PPO", differences.PPO))
    parts.append(_differences("RLOO", differences.RLOO))
    parts.append("### Not compared\n\n" + "\n".join(f"- {line}" for line in differences.NOT_COMPARED) + "\n")
    return "\n".join(parts)


def rows(page: str) -> dict[str, dict[str, tuple[float, bool]]]:
    """Return the difference of each metric on ``page`` and whether it is within the tolerance, by scenario and name."""
    names = {label: name for name, label in LABELS.items()}
    results: dict[str, dict[str, tuple[float, bool]]] = {}
    scenario = ""
    for line in page.partition(section.END)[0].partition(section.START)[0].splitlines():
        if line.startswith("## "):
            scenario = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in names:
            results.setdefault(scenario, {})[names[cells[0]]] = (float(cells[3]), cells[-1] == "yes")
    return results


def _section(result: ScenarioResult) -> str:
    with_shipped = bool(result.as_shipped)
    titles = [
        "metric",
        "Quartet",
        "TRL",
        "difference",
        *(["TRL as shipped"] if with_shipped else []),
        "within tolerance",
    ]
    lines = [
        f"## {result.name}\n",
        textwrap.fill(result.about, 130) + "\n",
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
    ]
    for metric in result.metrics:
        shipped = result.as_shipped.get(metric.name)
        cells = [LABELS[metric.name], f"{metric.quartet:.6g}", f"{metric.trl:.6g}", f"{metric.difference:.1e}"]
        cells += ["" if shipped is None else f"{shipped:.6g}"] if with_shipped else []
        lines.append("| " + " | ".join([*cells, "yes" if metric.holds else "**no**"]) + " |")
    return "\n".join(lines) + "\n"


def _differences(title: str, listed: Sequence[Difference]) -> str:
    lines = [f"### {title}\n", "| | Quartet | TRL | reason | in this comparison |", "|---|---|---|---|---|"]
    lines += [f"| {d.what} | {d.quartet} | {d.trl} | {d.reason} | {d.handling} |" for d in listed]
    return "\n".join(lines) + "\n"
