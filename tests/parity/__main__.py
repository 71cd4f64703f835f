"""Compare one update with TRL's trainers, and write docs/evidence/parity.md: `make parity`, or python -m tests.parity.

The exit status is 1 if a metric differs by more than its tolerance, and 2 if TRL is not installed. The page's section about
losses and estimators stays as it is; tests.parity.losses writes it.
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
    parser.add_argument("--docs", type=Path, default=Path("docs/evidence"), help="folder of parity.md")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print(
            "error: TRL is not installed in this environment; make parity creates an environment with TRL",
            file=sys.stderr,
        )
        return 2
    # Set before the first import of a library that reads them. Every checkpoint is local.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")

    from tests.parity import page, scenarios
    from tests.parity.comparison import TOLERANCE
    from tests.parity.losses import section

    results = []
    with tempfile.TemporaryDirectory() as folder:
        for scenario in (*scenarios.PPO, *scenarios.RLOO):
            started = time.perf_counter()
            results.append(_compare(scenario, Path(folder)))
            print(f"{scenario.name}: {len(results[-1].metrics)} metrics, {time.perf_counter() - started:.0f} s")
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    path = options.docs / "parity.md"
    losses = section.existing(path.read_text(encoding="utf-8")) if path.exists() else ""
    path.write_text(page.write(results, versions, TOLERANCE, WEIGHTS_TOLERANCE, losses), encoding="utf-8")
    print(f"wrote {path}")
    failures = [failure for result in results for failure in result.failures]
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _compare(scenario: Any, folder: Path) -> Any:
    """Run TRL's update and Quartet's update on the same rollouts, and compare their metrics."""
    import transformers

    from tests.parity import page, quartet_update, scenarios, trl_ppo, trl_rloo
    from tests.parity.comparison import MetricComparison, compare, compare_change

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = scenario.models(folder)
    config = scenario.config(models)
    is_ppo = scenario in scenarios.PPO
    trl = (trl_ppo if is_ppo else trl_rloo).run(models, config, scenario.micro_batches)
    quartet = quartet_update.run(models, trl.rollouts, config, same_order=not is_ppo)

    metrics: list[MetricComparison] = [
        compare(name, quartet.metrics[name], trl.metrics[name])
        for name in page.LABELS
        if name in trl.metrics and (name != "entropy" or scenario.compares_entropy)
    ]
    metrics.append(
        compare_change("policy_weights", quartet.policy_before, quartet.policy, trl.policy, WEIGHTS_TOLERANCE)
    )
    if trl.critic:
        metrics.append(
            compare_change("critic_weights", quartet.critic_before, quartet.critic, trl.critic, WEIGHTS_TOLERANCE)
        )
    as_shipped = trl_ppo.run(models, config, scenario.micro_batches, as_shipped=True).metrics if is_ppo else {}
    return page.ScenarioResult(
        scenario.name,
        scenario.about,
        metrics,
        {name: value for name, value in as_shipped.items() if isinstance(value, float)},
    )


if __name__ == "__main__":
    sys.exit(main())
