"""docs/parity.md: written from the figures, and read back by a test."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.parity import differences
from tests.parity.differences import Difference
from tests.parity.figures import Figure

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

_DIFFERENCES = "## Differences\n"

INTRODUCTION = """\
# Parity with TRL

`make parity` runs TRL's own trainers for one update on tiny checkpoints, a seeded Llama of 256 tokens each as policy, reference,
reward and value model, and captures from inside what they generated and computed. Quartet's functions (scoring, experience,
losses, optimizer steps) then learn from the same rollouts with the same settings. This page is what it wrote.

Numbers are compared by their relative difference, arrays by their largest difference over their largest magnitude (root mean
squares are shown), weights by the Euclidean norm of the difference over that of their change. Figures hold within {tolerance:g};
weights within {weights_tolerance:g}, since Adam divides each gradient by its own size, rounding errors included. What differs on
purpose is switched off, and listed [below](#differences). *As shipped* is what TRL logs with the same settings, the same order of
sequences, and nothing else switched off.

{versions}; float32 on CPU.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A scenario's figures, and those of TRL ``as_shipped`` by name where they are something else."""

    name: str
    about: str
    figures: Sequence[Figure]
    as_shipped: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """Return what does not hold; a clip fraction of 0 neither, since then the clipping was not compared."""
        failed = [
            f"{self.name}: {LABELS[figure.name]}: Quartet {figure.quartet:.8g}, TRL {figure.trl:.8g}, "
            f"difference {figure.difference:.1e}, expected at most {figure.tolerance:g}"
            for figure in self.figures
            if not figure.holds
        ]
        if not all(figure.trl > 0 for figure in self.figures if figure.name == "clip_fraction"):
            failed.append(
                f"{self.name}: nothing was clipped, so the clipping was not compared; raise the learning rate"
            )
        return failed


def write(comparisons: Sequence[Comparison], versions: str, tolerance: float, weights_tolerance: float) -> str:
    """The page, in Markdown."""
    parts = [INTRODUCTION.format(versions=versions, tolerance=tolerance, weights_tolerance=weights_tolerance)]
    parts += [_section(comparison) for comparison in comparisons]
    parts.append(_DIFFERENCES)
    parts.append(_differences("PPO", differences.PPO))
    parts.append(_differences("RLOO", differences.RLOO))
    parts.append("### Not compared\n\n" + "\n".join(f"- {line}" for line in differences.NOT_COMPARED) + "\n")
    return "\n".join(parts)


def rows(page: str) -> dict[str, dict[str, tuple[float, bool]]]:
    """By scenario and figure's name, the difference that ``page`` shows and whether it says that it holds."""
    names = {label: name for name, label in LABELS.items()}
    results: dict[str, dict[str, tuple[float, bool]]] = {}
    scenario = ""
    for line in page.partition(_DIFFERENCES)[0].splitlines():
        if line.startswith("## "):
            scenario = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in names:
            results.setdefault(scenario, {})[names[cells[0]]] = (float(cells[3]), cells[-1] == "yes")
    return results


def _section(comparison: Comparison) -> str:
    with_shipped = bool(comparison.as_shipped)
    titles = ["figure", "Quartet", "TRL", "difference", *(["TRL as shipped"] if with_shipped else []), "holds"]
    lines = [
        f"## {comparison.name}\n",
        textwrap.fill(comparison.about, 130) + "\n",
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
    ]
    for figure in comparison.figures:
        shipped = comparison.as_shipped.get(figure.name)
        cells = [LABELS[figure.name], f"{figure.quartet:.6g}", f"{figure.trl:.6g}", f"{figure.difference:.1e}"]
        cells += ["" if shipped is None else f"{shipped:.6g}"] if with_shipped else []
        lines.append("| " + " | ".join([*cells, "yes" if figure.holds else "**no**"]) + " |")
    return "\n".join(lines) + "\n"


def _differences(title: str, listed: Sequence[Difference]) -> str:
    lines = [f"### {title}\n", "| | Quartet | TRL | why | here |", "|---|---|---|---|---|"]
    lines += [f"| {d.what} | {d.quartet} | {d.trl} | {d.why} | {d.here} |" for d in listed]
    return "\n".join(lines) + "\n"
