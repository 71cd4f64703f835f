"""Compare tiny models of many architectures with plain transformers, and write docs/reference/architectures.md.

`make architectures`, or python -m tests.architectures. It needs no network and takes a few minutes. The exit status is 1 if a
difference is too large or a model fails; the page is then not written. With model types as arguments it only compares these.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

PACKAGES = ("transformers", "peft", "torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE", help="only these; writes no page")
    parser.add_argument("--page", type=Path, default=Path("docs/reference/architectures.md"))
    options = parser.parse_args()
    # Set before the first import of a library that reads them. Every checkpoint is local.
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")

    import torch

    from tests.architectures import comparison, models, page

    # Differences of rounding depend on the number of threads.
    torch.set_num_threads(1)
    unknown = set(options.kinds) - {*models.WORKING, *models.REFUSED}
    if unknown:
        print(f"error: {', '.join(sorted(unknown))}: not tested; see tests/architectures/models.py", file=sys.stderr)
        return 2
    results, failures = [], []
    for kind in options.kinds or (*models.WORKING, *models.REFUSED):
        started = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                compare = comparison.compare if kind in models.WORKING else comparison.refuse
                result = compare(kind, Path(folder))
        except Exception as error:
            failures.append(f"{kind}: {type(error).__name__}: {error}")
            print(f"{kind}: failed", flush=True)
            continue
        results.append(result)
        outcome = result.refused or ", ".join(f"{name} {value:.1e}" for name, value in result.differences.items())
        print(f"{kind}: {outcome} ({time.perf_counter() - started:.1f} s)", flush=True)
        allowed, _ = models.TOLERANCES.get(kind, (comparison.TOLERANCE, ""))
        if result.largest > allowed:
            failures.append(f"{kind}: differs by {result.largest:.1e}, allowed is {allowed:g}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if not failures and not options.kinds:
        versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
        options.page.write_text(page.write(results, versions), encoding="utf-8")
        print(f"wrote {options.page}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
