"""One graph of a bundle in a serving session, with bound arrays and a count of the memory that its runs use.

Does not know the meaning of the graph. Torch-free: the server and `antiphon profile` run graphs with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.bundle.session import serving_session
from antiphon.errors import GraphError, WorkspaceError
from antiphon.ops.workspace import Workspace


class Graph:
    """Session of one ONNX file.

    kind is the graph's part in the bundle, for messages. Raises GraphError when the file cannot be loaded, and
    WorkspaceError when the workspace does not fit this ONNX Runtime.
    """

    def __init__(self, path: Path, kind: str, workspace: Workspace) -> None:
        self._path = path
        self._kind = kind
        self._workspace = workspace
        previous = workspace.enter()
        try:
            self._session = serving_session(path, workspace)
        except WorkspaceError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{path}: the {kind} graph cannot be loaded: {error}") from error
        finally:
            workspace.leave(previous)

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs, in the graph's order."""
        return [tensor.name for tensor in self._session.get_outputs()]

    def require(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Raise GraphError unless the graph has exactly these inputs and outputs."""
        for what, wanted, actual in (
            ("inputs", inputs, self._session.get_inputs()),
            ("outputs", outputs, self._session.get_outputs()),
        ):
            if difference := set(wanted) ^ {tensor.name for tensor in actual}:
                raise GraphError(
                    f"{self._path}: {what} of the {self._kind} graph differ from the bundle's contract: "
                    f"{', '.join(sorted(difference))}"
                )

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[NDArray[np.float32]]:
        """Run once and return the named outputs, which stay in ONNX Runtime's memory. Raises GraphError."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name in outputs:
            binding.bind_output(name, "cpu")
        self.run_bound(binding)
        return [value.numpy() for value in binding.get_outputs()]

    def bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Any:
        """Bind contiguous arrays by address and return the binding; the arrays must live longer than the binding.

        Raises ValueError naming the first array that is not contiguous.
        """
        binding = self._session.io_binding()
        for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in arrays.items():
                if not array.flags.c_contiguous:
                    raise ValueError(f"{name} is not contiguous in memory")
                bind(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)
        return binding

    def run_bound(self, binding: Any) -> None:
        """Run with a binding; the interpreter lock is released during the run. Raises GraphError."""
        previous = self._workspace.enter()
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            raise GraphError(f"{self._path}: the {self._kind} graph failed: {error}") from error
        finally:
            self._workspace.leave(previous)
