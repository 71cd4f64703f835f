"""Run the peers' losses and estimators on one batch, and compare: make parity, or python -m tests.parity.losses.

It needs the peers in build/peers on the path. It writes their results to tests/parity/losses/results, and a section of
docs/evidence/parity.md. The exit status is 1 if a result differs by more than the tolerance, and 2 if a peer is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import warnings
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=Path("docs/evidence"), help="folder of parity.md")
    options = parser.parse_args()
    # Set before the first import of a library that reads them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"VERL_LOGGING_LEVEL": "ERROR"}
    warnings.simplefilter("ignore")

    from tests.parity.losses import section
    from tests.parity.losses.batch import make_batch
    from tests.parity.losses.case import compare, save
    from tests.parity.losses.cases import GROUPS

    try:
        versions = {name: importlib.metadata.version(name) for name in section.PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        print(f"error: {error.name} is missing; make parity installs it into build/peers", file=sys.stderr)
        return 2
    rows = {}
    for group in GROUPS:
        results = {case.key: case.run(make_batch()) for case in group.cases}
        save(group, results)
        rows[group.title] = [compare(case, results[case.key]) for case in group.cases]
        print(f"{group.title}: {len(group.cases)} comparisons")
    path = options.docs / "parity.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(section.replace(text, section.write(rows, versions)), encoding="utf-8")
    print(f"wrote {path}")
    failed = [row for listed in rows.values() for row in listed if not row.holds]
    for row in failed:
        print(
            f"error: {row.case.key}: {row.ours:.8g}, peer {row.theirs:.8g}, difference {row.difference:.1e}",
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
