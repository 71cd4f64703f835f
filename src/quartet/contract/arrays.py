"""Types of the arrays in the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.unsignedinteger[Any]]
"""Experts by index, uint8 or uint16."""
