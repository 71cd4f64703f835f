"""Compares one update with TRL's trainers, and writes docs/parity.md: `make parity`, or python -m tests.parity.

Exits 1 when a figure differs by more than its tolerance, 2 when TRL is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

WEIGHTS_TOLERANCE = 1e-3
PACKAGES = ("trl", "transformers", "accelerate", "torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where parity.md goes")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("error: TRL is not installed in this environment; make parity makes one that has it", file=sys.stderr)
        return 2
    # Before the first import of a library that looks at it: every checkpoint is local.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")

    from tests.parity import page, scenarios
    from tests.parity.figures import TOLERANCE

    comparisons = []
    with tempfile.TemporaryDirectory() as folder:
        for scenario in (*scenarios.PPO, *scenarios.RLOO):
            started = time.perf_counter()
            comparisons.append(_compared(scenario, Path(folder)))
            print(f"{scenario.name}: {len(comparisons[-1].figures)} figures, {time.perf_counter() - started:.0f} s")
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    path = options.docs / "parity.md"
    path.write_text(page.write(comparisons, versions, TOLERANCE, WEIGHTS_TOLERANCE), encoding="utf-8")
    print(f"wrote {path}")
    failures = [failure for comparison in comparisons for failure in comparison.failures]
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _compared(scenario: Any, folder: Path) -> Any:
    """TRL's update and Quartet's on its rollouts, figure by figure."""
    import transformers

    from tests.parity import page, quartet_update, scenarios, trl_ppo, trl_rloo
    from tests.parity.figures import Figure, compare, compare_change

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = scenario.models(folder)
    config = scenario.config(models)
    is_ppo = scenario in scenarios.PPO
    theirs = (trl_ppo if is_ppo else trl_rloo).run(models, config, scenario.micro_batches)
    ours = quartet_update.run(models, theirs.rollouts, config, same_order=not is_ppo)

    figures: list[Figure] = [
        compare(name, ours.figures[name], theirs.figures[name])
        for name in page.LABELS
        if name in theirs.figures and (name != "entropy" or scenario.compares_entropy)
    ]
    figures.append(compare_change("policy_weights", ours.policy_before, ours.policy, theirs.policy, WEIGHTS_TOLERANCE))
    if theirs.critic:
        figures.append(
            compare_change("critic_weights", ours.critic_before, ours.critic, theirs.critic, WEIGHTS_TOLERANCE)
        )
    shipped = trl_ppo.run(models, config, scenario.micro_batches, as_shipped=True).figures if is_ppo else {}
    return page.Comparison(
        scenario.name,
        scenario.about,
        figures,
        {name: value for name, value in shipped.items() if isinstance(value, float)},
    )


if __name__ == "__main__":
    sys.exit(main())
