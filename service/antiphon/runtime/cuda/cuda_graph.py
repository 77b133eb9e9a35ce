"""One cuda graph of a bundle in a session, with arrays bound at addresses of the device.

Does not know the meaning of the graph. graph.py of model/antiphon/bundle/ is the same for graphs on the processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.bundle.manifest import Precision
from antiphon.bundle.onnx_runtime import ort
from antiphon.bundle.session import cuda_session
from antiphon.errors import GraphError
from antiphon.ops.cuda.driver import CudaDevice

_BFLOAT16 = 16  # of onnx.TensorProto; NumPy has no such type
_NOT_CAPTURED = -1

ElementType = Any
"""Element type as ONNX Runtime's bindings take it: a type of NumPy or a number of onnx.TensorProto."""


class Bound:
    """Inputs and outputs of one graph at fixed addresses."""

    def __init__(self, binding: Any, device: CudaDevice) -> None:
        self.binding = binding
        self._ordinal = device.ordinal

    def bind_input(self, name: str, kind: ElementType, shape: Sequence[int], address: int) -> None:
        """Let an input lie at an address."""
        self.binding.bind_input(name, "cuda", self._ordinal, kind, list(shape), address)

    def bind_output(self, name: str, kind: ElementType, shape: Sequence[int], address: int) -> None:
        """Let an output be written at an address."""
        self.binding.bind_output(name, "cuda", self._ordinal, kind, list(shape), address)


class CudaGraph:
    """Session of one ONNX file on a device. Raises GraphError when it cannot be loaded, or a node has no GPU kernel.

    kind is the graph's part in the bundle, for messages. captures: see cuda_session.
    """

    def __init__(
        self, path: Path, kind: str, device: CudaDevice, *, captures: bool, memory_limit_bytes: int | None
    ) -> None:
        self._path = path
        self._kind = kind
        self._device = device
        try:
            self._session = cuda_session(
                path,
                device.stream,
                ordinal=device.ordinal,
                captures=captures,
                memory_limit_bytes=memory_limit_bytes,
            )
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{path}: the {kind} graph cannot be loaded on the GPU: {error}") from error
        self._options: dict[int, Any] = {}

    def bind(self) -> Bound:
        """Return a binding without inputs and outputs."""
        return Bound(self._session.io_binding(), self._device)

    def run(self, bound: Bound, graph_id: int = _NOT_CAPTURED) -> None:
        """Launch a run and return, in most cases before it ends. Raises GraphError.

        graph_id: runs of one id have one binding; the first is captured and all others are replayed. -1: not captured.
        """
        try:
            self._session.run_with_iobinding(bound.binding, self._run_options(graph_id))
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{self._path}: the {self._kind} graph failed: {error}") from error

    def _run_options(self, graph_id: int) -> Any:
        if graph_id not in self._options:
            options = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph_id))
            # The runner waits where it needs a result, not after every run.
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            self._options[graph_id] = options
        return self._options[graph_id]


def element_of(precision: Precision) -> ElementType:
    """Return the element type of states and caches in graphs of a precision."""
    kinds: Mapping[str, ElementType] = {"bfloat16": _BFLOAT16, "float16": np.float16}
    return kinds.get(precision, np.float32)


def bytes_of(precision: Precision) -> int:
    """Return the bytes of one such element."""
    return 4 if precision == "float32" else 2
