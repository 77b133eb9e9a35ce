"""One file of weights for all graphs of a precision; equal tensors are stored once.

Tensors start at multiples of 64 bytes, in the order in which they were first added, as ONNX external data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir

_ALIGNMENT = 64
# Smaller tensors stay in the graph. Shapes and axes must, since the runtime reads them before external data.
_SMALLEST_BYTES = 256


class WeightsFile:
    """File that collects the tensors of several models."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[bytes, int] = {}
        self._stream = path.open("wb")

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def save(self, model: ir.Model, path: Path) -> None:
        """Write the model to `path` and move its large tensors to this file, to which the model then refers."""
        for value in model.graph.initializers.values():
            if value.const_value is not None and value.const_value.nbytes >= _SMALLEST_BYTES:
                value.const_value = self._moved(value.const_value)
        self._stream.flush()
        ir.save(model, path)

    def _moved(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        # No copy, since it can be a gigabyte. As bytes, since bfloat16 is a type that a buffer cannot have.
        raw = np.ascontiguousarray(tensor.numpy()).view(np.uint8).data
        digest = hashlib.sha256(raw).digest()
        if digest not in self._offsets:
            self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))
            self._offsets[digest] = self._stream.tell()
            self._stream.write(raw)
        return ir.ExternalTensor(
            self._path.name,
            self._offsets[digest],
            raw.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name or "",
            base_dir=self._path.parent,
        )
