"""Writer of safetensors files, one tensor after the other, so that host memory holds one tensor at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""Types by their names in a file, in the order in which the safetensors library sorts them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: index for index, dtype in enumerate(DTYPES.values())}


class SafetensorsFile:
    """A new safetensors file, byte for byte what the safetensors library writes for the same tensors and metadata.

    Write each tensor once, in any order.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write the header. ``tensors``: names, types and shapes; the values may be on the meta device. Raises OSError.

        ``metadata``: at most one entry, because the library writes several in no fixed order.
        """
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._offsets: dict[str, int] = {}
        self._expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (-_ORDER[item[1].dtype], item[0])):
            self._offsets[name] = end
            start, end = end, end + tensor.numel() * tensor.itemsize
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        try:
            self._file.write(struct.pack("<Q", len(text)) + text)
            self._file.truncate(self._data + end)
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of a tensor, from any device. Raises OSError, ValueError if the header describes another tensor."""
        given = (tuple(tensor.shape), tensor.dtype)
        if given != self._expected[name]:
            raise ValueError(
                f"{self._file.name}: {name} has shape and type {given}, expected {self._expected[name]} as in the header"
            )
        data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
        self._file.seek(self._data + self._offsets[name])
        self._file.write(data.data)

    def flush(self) -> None:
        """Flush the file to the disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
