"""The stand-in for CUDA, through the Python side of the launcher: what a test that uses it can rely on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from onnx import helper
from torch import Tensor

from antiphon.errors import CudaError
from antiphon.ops.cuda.driver import CudaDevice, describe
from tests.cuda.device_graphs import ONNX_TYPES, DeviceGraph, DeviceTensor, model_of, restored
from tests.cuda.node_arguments import DTYPES
from tests.cuda.standin.device import ARCHITECTURE, StandIn
from tests.operators import normal

# Starts a process with the stand-in: the driver is found under its name once it is loaded.
PREAMBLE = """
import ctypes, sys
from pathlib import Path
for name in ("libcudart.so.13", "libcuda.so.1"):
    ctypes.CDLL(str(Path(sys.argv[1]) / name), mode=ctypes.RTLD_GLOBAL)
from antiphon.ops.cuda.driver import CudaDevice, describe
"""


@pytest.fixture(autouse=True)
def fresh(standin: StandIn, device: CudaDevice) -> Iterator[None]:
    with restored(standin, device):
        yield


def test_device_describes_itself(device: CudaDevice) -> None:
    description = device.description()
    assert (description.name, description.architecture) == ("stand-in", ARCHITECTURE)
    assert (description.num_multiprocessors, description.driver_version) == (4, 13000)
    assert 0 < description.free_bytes <= description.total_bytes


def test_device_that_is_not_there_is_refused(standin: StandIn) -> None:
    with pytest.raises(CudaError, match=r"^cuDeviceGet: "):
        describe(1)
    with pytest.raises(CudaError, match=r"^cuDeviceGet: "):
        CudaDevice(1)


def test_machine_without_a_device_is_refused(standin: StandIn) -> None:
    result = in_another_process(standin, "describe()", {"STANDIN_NO_DEVICE": "1"})
    assert "CudaError: cuInit: CUDA_ERROR_NO_DEVICE" in result.stderr


def test_copies_and_fills_arrive(device: CudaDevice) -> None:
    tensor = DeviceTensor(device, torch.int32, (3, 5))
    values = torch.arange(15, dtype=torch.int32).reshape(3, 5)
    tensor.write(values)
    copy = DeviceTensor(device, torch.int32, (3, 5))
    device.copy_within(copy.address, tensor.address, 60)
    device.fill(tensor.address + 4, 1, 8)
    device.wait()
    assert torch.equal(copy.read(), values)
    assert tensor.read().flatten()[:4].tolist() == [0, 0x01010101, 0x01010101, 3]


def test_fresh_memory_is_not_a_number(device: CudaDevice) -> None:
    for dtype in DTYPES:
        assert DeviceTensor(device, dtype, (7,)).read().isnan().all()


def test_pinned_memory_is_zero_and_belongs_to_the_host(device: CudaDevice) -> None:
    pinned = device.allocate_pinned(100)
    assert not pinned.array.any()
    pinned.array[:] = 3
    assert len(pinned.array) == 100


def test_memory_is_freed_with_its_last_reference(device: CudaDevice, standin: StandIn) -> None:
    gc.collect()
    before = standin.bytes_in_use
    memory = device.allocate(1000)
    assert standin.bytes_in_use == before + 1024  # whole units of 256 bytes
    del memory
    assert standin.bytes_in_use == before


def test_memory_is_freed_by_a_thread_that_never_used_the_device(device: CudaDevice, standin: StandIn) -> None:
    """An engine's thread is not the one that unloads a model; the driver refuses threads without a context."""
    gc.collect()
    before = standin.bytes_in_use
    held = [device.allocate(1000)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert standin.bytes_in_use == before


def test_thread_without_a_context_is_refused(device: CudaDevice) -> None:
    errors = []

    def allocate() -> None:
        try:
            device.allocate(1)
        except CudaError as error:
            errors.append(str(error))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert errors == ["cuMemAlloc_v2: CUDA_ERROR_INVALID_CONTEXT, an error of the stand-in"]


def test_allocation_beyond_the_memory_is_an_error(device: CudaDevice) -> None:
    with pytest.raises(CudaError, match=r"^cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY, "):
        device.allocate(1 << 40)


def test_failure_is_injected_once(device: CudaDevice, standin: StandIn) -> None:
    standin.fail_after(2)
    device.allocate(1)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        device.allocate(1)
    device.allocate(1)


def test_event_is_recorded_and_waited_for(device: CudaDevice) -> None:
    event = device.event()
    event.record()
    event.wait()


@pytest.mark.parametrize("access", ["string_at(address, 1)", "memset(address, 0, 1)"])
def test_host_cannot_touch_memory_of_the_device(standin: StandIn, access: str) -> None:
    code = f"address = CudaDevice().allocate(64).address; print('touch', flush=True); ctypes.{access}; print('done')"
    result = in_another_process(standin, code)
    assert (result.returncode, result.stdout) == (-signal.SIGSEGV, "touch\n")


def test_function_that_is_missing_reports_its_name(standin: StandIn) -> None:
    code = "print(ctypes.CDLL(str(Path(sys.argv[1]) / 'libcudart.so.13')).cudaLaunchHostFunc())"
    result = in_another_process(standin, code)
    assert result.stdout == "801\n"  # cudaErrorNotSupported
    assert result.stderr == "stand-in for CUDA: cudaLaunchHostFunc is not implemented\n"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_product_equals_torch(device: CudaDevice, standin: StandIn, dtype: torch.dtype, transposed: bool) -> None:
    shapes = (5, 24), (7, 24) if transposed else (24, 7)
    left, right = (torch.from_numpy(normal(*shape)).to(dtype) for shape in shapes)
    node = helper.make_node("Gemm", ["left", "right"], ["product"], transB=int(transposed))
    graph = graph_of(device, node, {"left": left, "right": right}, {"product": (5, 7)})
    before = standin.num_foreign_launches
    graph.run()
    expected = (left.float() @ (right.T if transposed else right).float()).to(dtype)
    torch.testing.assert_close(graph.read("product"), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)
    assert standin.num_foreign_launches == before


def test_kernel_that_is_not_ours_is_refused_and_counted(standin: StandIn, device: CudaDevice) -> None:
    before = standin.num_foreign_launches
    node = helper.make_node("Add", ["left", "right"], ["sum"])
    graph = graph_of(device, node, {name: torch.ones(3, 4) for name in ("left", "right")}, {"sum": (3, 4)})
    with pytest.raises(Exception, match="cudaErrorOfTheStandIn"):
        graph.run()
    assert standin.num_foreign_launches > before


def graph_of(
    device: CudaDevice, node: object, inputs: Mapping[str, Tensor], outputs: Mapping[str, tuple[int, ...]]
) -> DeviceGraph:
    """Return a graph of one node of ONNX, with its inputs on the device; outputs have the type of the inputs."""
    (dtype,) = {tensor.dtype for tensor in inputs.values()}
    given = [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], ["A", "B"]) for name in inputs]
    results = [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], ["C", "D"]) for name in outputs]
    bound = {name: (dtype, shape) for name, shape in outputs.items()}
    graph = DeviceGraph(device, model_of([node], given, results), bound)
    for name, tensor in inputs.items():
        graph.write(name, tensor)
    return graph


def in_another_process(
    standin: StandIn, code: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + code, str(standin.kernels.parent)]
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
