"""ONNX graphs run by the unmodified CUDA provider, with every input and output in memory of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from torch import Tensor

from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.cuda.nodes import CudaNode
from antiphon.ops.workspace import LIBRARY
from tests.cuda.standin.device import StandIn

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}
Outputs = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Type and shape of each output that is bound."""


class DeviceGraph:
    """Session of one graph on the device, with its inputs and outputs bound to memory that is allocated once."""

    def __init__(self, device: CudaDevice, model: onnx.ModelProto, outputs: Outputs, *, captures: bool = False) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(LIBRARY))
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {"user_compute_stream": str(device.stream), "enable_cuda_graph": str(int(captures))}
        providers = [("CUDAExecutionProvider", settings)]
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
        self._device = device
        self._binding = self._session.io_binding()
        self._bound: dict[str, DeviceTensor] = {}
        for name, (dtype, shape) in outputs.items():
            bound = self._allocate(name, dtype, shape)
            self._binding.bind_output(name, "cuda", device.ordinal, ONNX_TYPES[dtype], list(shape), bound.address)

    def write(self, name: str, tensor: Tensor, offset: int = 0) -> None:
        """Copy an input to the device; the first copy binds it, `offset` bytes behind the start of its memory."""
        if name not in self._bound:
            bound = self._allocate(name, tensor.dtype, tensor.shape, offset)
            kind, shape = ONNX_TYPES[tensor.dtype], list(tensor.shape)
            self._binding.bind_input(name, "cuda", self._device.ordinal, kind, shape, bound.address)
        self._bound[name].write(tensor)

    def run(self, graph_id: int = -1) -> None:
        """Run; a graph id other than -1 is captured by its first run and replayed by the others."""
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._session.run_with_iobinding(self._binding, options)

    def read(self, name: str) -> Tensor:
        """Return a copy of an output, or of an input, which a node may have changed."""
        return self._bound[name].read()

    def _allocate(self, name: str, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> DeviceTensor:
        self._bound[name] = DeviceTensor(self._device, dtype, shape, offset)
        return self._bound[name]


class DeviceTensor:
    """A tensor in memory of the device."""

    def __init__(self, device: CudaDevice, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> None:
        self._device = device
        self._dtype = dtype
        self._shape = tuple(shape)
        self._num_bytes = dtype.itemsize * torch.Size(self._shape).numel()
        self._offset = offset
        self._memory = device.allocate(self._num_bytes + offset)

    @property
    def address(self) -> int:
        """Return the address on the device."""
        return self._memory.address + self._offset

    def write(self, tensor: Tensor) -> None:
        """Copy a tensor of the host, and wait."""
        assert (tensor.dtype, tuple(tensor.shape)) == (self._dtype, self._shape)
        pinned = self._device.allocate_pinned(self._num_bytes)
        pinned.array[: self._num_bytes] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._device.copy_in(self.address, pinned.address, self._num_bytes)
        self._device.wait()

    def read(self) -> Tensor:
        """Return a copy on the host."""
        pinned = self._device.allocate_pinned(self._num_bytes)
        self._device.copy_out(pinned.address, self.address, self._num_bytes)
        self._device.wait()
        return torch.from_numpy(pinned.array[: self._num_bytes].copy()).view(self._dtype).reshape(self._shape)


@contextmanager
def restored(standin: StandIn, device: CudaDevice) -> Iterator[None]:
    """Start with no record of launches, and leave the stand-in and the loaded kernels as other tests expect them."""
    standin.launched.clear()
    device.use()
    try:
        yield
    finally:
        standin.fail_after(0)
        device.load_kernels(standin.kernels)


def one_node(node: CudaNode, arguments: Mapping[str, Any], dtype: torch.dtype) -> onnx.ModelProto:
    """Return a graph of one node of nodes.py; its outputs without the workspace are those of the graph."""
    given = [each.name for each in node.inputs if arguments.get(each.name) is not None]
    names = [each.name if each.name in given else "" for each in node.inputs]
    outputs = [each.name for each in node.outputs]
    attributes = {each.name: _attribute(arguments[each.name]) for each in node.attributes}
    made = helper.make_node(node.name, names, outputs, domain="antiphon", **attributes)
    inputs = [_value(name, ONNX_TYPES[arguments[name].dtype], arguments[name].dim()) for name in given]
    results = [_value(each.name, _type_of(each.kind, dtype), _rank(each.axes)) for each in node.results]
    return model_of([made], inputs, results)


def model_of(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Sequence[Any] = ()) -> onnx.ModelProto:
    """Return a model with our operators and the standard ones."""
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("antiphon", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _attribute(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _value(name: str, kind: int, rank: int) -> Any:
    return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(rank)])


def _type_of(name: str, dtype: torch.dtype) -> int:
    return ONNX_TYPES[dtype if name == "float" else getattr(torch, name)]


def _rank(axes: str) -> int:
    return axes.count(",") + 1
