"""A backend "cpu" of Triton that compiles nothing, for Triton's interpreter.

vLLM reports the experts of tokens only with its second model runner, whose kernels are Triton's. On a CPU vLLM looks for a Triton
with a backend for CPUs, which the wheel of Triton does not have. With this one it starts, and Triton's own interpreter computes
the kernels.
"""

from __future__ import annotations

import os
from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables with which vLLM finds the backend. Writes the metadata of a package into ``folder``."""
    metadata = folder / "triton_interpreter-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-interpreter\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {__name__}\n")
    root = Path(__file__).parents[3]
    paths = [str(folder), str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
