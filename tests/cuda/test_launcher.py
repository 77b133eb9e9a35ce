"""The native launcher with the unmodified CUDA provider: nodes, captured graphs, and files that it must refuse.

The stand-in runs the kernels in Triton's interpreter, so a node's result equals that of node_launches.py bit for bit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from antiphon.errors import CudaError
from antiphon.ops.cuda.compile_kernels import VERSION
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.cuda.nodes import NODES, CudaNode
from tests.cuda.device_graphs import ONNX_TYPES, DeviceGraph, Outputs, model_of, one_node, restored
from tests.cuda.node_arguments import DTYPES, Arguments, arguments
from tests.cuda.node_launches import LAUNCHES
from tests.cuda.standin.device import StandIn, write_kernels
from tests.operators import normal

BY_NAME = {node.name: node for node in NODES}
PICK = BY_NAME["CudaPick"]


@pytest.fixture(autouse=True)
def only_our_kernels(standin: StandIn, device: CudaDevice) -> Iterator[None]:
    """Fail after a test in which ONNX Runtime launched kernels of its own, or called what the stand-in lacks."""
    before = standin.num_foreign_launches, standin.num_missing_calls
    with restored(standin, device):
        yield
    assert (standin.num_foreign_launches, standin.num_missing_calls) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_node_equals_its_kernels(device: CudaDevice, node: CudaNode, dtype: torch.dtype) -> None:
    check(device, node, arguments(node, dtype), dtype)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_node_equals_its_kernels_without_optional_inputs(device: CudaDevice, node: CudaNode) -> None:
    check(device, node, arguments(node, torch.bfloat16, optional=0.0), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("CudaAddNorm", {"kind": "rms"}),
        ("CudaActivate", {"gated": False, "activation": "tanh"}),
        ("CudaPackedAttention", {"causal": False}),
    ],
)
def test_node_passes_its_attributes(device: CudaDevice, name: str, changes: Arguments) -> None:
    check(device, BY_NAME[name], arguments(BY_NAME[name], torch.float32) | changes, torch.float32)


def test_paged_attention_splits_the_positions_of_few_tokens(device: CudaDevice, standin: StandIn) -> None:
    """Four multiprocessors want eight programs: one token with two heads gets its two pairs of blocks."""
    node = BY_NAME["CudaPagedAttention"]
    given = arguments(node, torch.float32, spare=0)
    given |= {name: given[name][:1] for name in ("query", "rows", "lengths")}
    check(device, node, given, torch.float32, num_splits=2)
    assert standin.launched[:2] == ["paged_attention.float32.64", "merge_splits.float32.64"]


def test_node_without_tokens_launches_nothing(device: CudaDevice, standin: StandIn) -> None:
    given = arguments(PICK, torch.float32) | {"picks": torch.zeros(0, dtype=torch.int32)}
    run_node(device, PICK, given, torch.float32, {"out": (torch.float32, (0, 48))})
    assert standin.launched == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_graph_replays_with_changed_inputs(device: CudaDevice, standin: StandIn, dtype: torch.dtype) -> None:
    weight, hidden = (torch.from_numpy(normal(rows, 48)).to(dtype) for rows in (16, 5))
    graph = DeviceGraph(device, pick_and_multiply(weight), {"product": (dtype, (3, 16))}, captures=True)
    feed(graph, PICK, {"hidden": hidden, "picks": torch.tensor([0, 1, 1], dtype=torch.int32)})
    graph.run(graph_id=3)  # captures
    allocations = standin.num_allocations
    for picks in ([4, 0, 0], [1, 2, 3]):
        hidden = 2 * hidden
        feed(graph, PICK, {"hidden": hidden, "picks": torch.tensor(picks, dtype=torch.int32)})
        standin.launched.clear()
        graph.run(graph_id=3)
        assert standin.launched == [f"pick.{str(dtype).removeprefix('torch.')}"]
        expected = (hidden[picks].float() @ weight.float().T).to(dtype)
        # The stand-in adds in another order than torch.
        torch.testing.assert_close(graph.read("product"), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)
    assert standin.num_allocations == allocations


def test_launch_that_the_driver_refuses_is_an_error_of_the_run(device: CudaDevice, standin: StandIn) -> None:
    graph = picking(device)
    standin.fail_after(1)
    with pytest.raises(Exception, match=r"antiphon\.CudaPick: pick\.float32: CUDA_ERROR_LAUNCH_FAILED"):
        graph.run()
    graph.run()


def test_kernels_of_another_architecture_are_refused(device: CudaDevice, tmp_path: Path) -> None:
    write_kernels(tmp_path / "kernels", architecture=80)
    with pytest.raises(CudaError, match=r"kernels is for sm_80; the device is sm_90$"):
        device.load_kernels(tmp_path / "kernels")


def test_missing_kernels_are_refused(device: CudaDevice, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=r"kernels cannot be opened; `make kernels` compiles it$"):
        device.load_kernels(tmp_path / "kernels")


@pytest.mark.parametrize("num_bytes", [0, 10, 300, 5000, -1])
def test_truncated_kernels_are_refused(device: CudaDevice, standin: StandIn, tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "kernels").write_bytes(standin.kernels.read_bytes()[:num_bytes])
    with pytest.raises(CudaError, match=r"kernels is (damaged|no kernel library)"):
        device.load_kernels(tmp_path / "kernels")


def test_kernels_of_another_version_are_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", f"^antiphon-kernels {VERSION} ", "antiphon-kernels 1 ")
    with pytest.raises(CudaError, match=rf"kernels has version 1; this library reads version {VERSION}$"):
        device.load_kernels(tmp_path / "kernels")


def test_kernels_without_one_of_their_header_are_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", r"^pick\.float32 .*\n", "")
    with pytest.raises(CudaError, match=r"is damaged: its header lacks kernels$"):
        device.load_kernels(tmp_path / "kernels")


@pytest.mark.parametrize("words", ["concealed:p", "hidden:i", "hidden:p more:i"])
def test_node_refuses_a_kernel_with_other_parameters(
    device: CudaDevice, standin: StandIn, tmp_path: Path, words: str
) -> None:
    """The session cannot be opened, so no run is needed to notice it."""
    change_header(standin, tmp_path / "kernels", "hidden:p", words)
    device.load_kernels(tmp_path / "kernels")
    message = rf"CudaPick: pick\.float32 of .*kernels takes out:p {words} picks:p width:a, not out:p hidden:p picks:p"
    with pytest.raises(Exception, match=message):
        picking(device)


def test_node_without_a_kernel_is_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", r"^pick\.float32 ", "peck.float32 ")
    device.load_kernels(tmp_path / "kernels")
    with pytest.raises(Exception, match=r"antiphon\.CudaPick: .*kernels has no kernel pick\.float32"):
        picking(device)


def test_node_refuses_a_width_that_the_kernel_was_not_compiled_for(device: CudaDevice) -> None:
    with pytest.raises(Exception, match=r"CudaPick: pick\.float32, width:a: 40 is no multiple of 16"):
        picking(device, width=40)


def test_node_refuses_an_address_that_the_kernel_was_not_compiled_for(device: CudaDevice) -> None:
    with pytest.raises(Exception, match=r"CudaPick: pick\.float32, picks:p: \d+ is no multiple of 16"):
        picking(device, offset=4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("CudaEmbed", {"positions": torch.zeros(3, dtype=torch.int32)}, "axis 0 of positions is 3; it must be 4"),
        ("CudaAddNorm", {"residual": torch.zeros(4, 64)}, "axis 1 of residual is 64; it must be 48"),
        ("CudaActivate", {"activation": "swish"}, "activation swish is unknown"),
        ("CudaRotary", {"num_heads": 3}, "axis 1 of qkv is 288; it must be 432"),
        ("CudaPackedAttention", {"num_heads": 5}, "axis 1 of qkv is 288; it must be 285"),
        (
            "CudaPackedAttention",
            {"num_heads": 4, "bias_table": None, "slopes": None},
            "width of a head is 24; it must be a multiple of 16 up to 256",
        ),
        ("CudaPagedWrite", {"layer": 2}, "layer is 2; the cache has no such layer"),
        ("CudaPagedAttention", {"num_heads": 3}, "axis 3 of cache is 2; it must be 3"),
        ("CudaPagedAttention", {"num_heads": 0}, "num_heads is 0; it must be 1 to "),
        ("CudaPagedAttention", {"bias": torch.zeros(48)}, "axis 0 of bias is 48; it holds less than"),
        ("CudaSsru", {"layer": -1}, "layer is -1; the cache has no such layer"),
        ("CudaSsru", {"bias": torch.zeros(48)}, "axis 0 of bias is 48; it must be 96"),
        (
            "CudaPagedAverage",
            {"x": torch.zeros(5, 1552)},
            "bytes of a layer in a block of cache is 12288; two states need more",
        ),
        ("CudaSample", {"positions": torch.zeros(2, dtype=torch.int32)}, "axis 0 of positions is 2; it must be 3"),
    ],
)
def test_node_refuses_shapes_that_disagree(device: CudaDevice, name: str, changes: Arguments, message: str) -> None:
    node = BY_NAME[name]
    with pytest.raises(Exception, match=rf"antiphon\.{name}: .*{message}"):
        run_node(device, node, arguments(node, torch.float32) | changes, torch.float32, ones_of(node))


def test_device_needs_a_driver() -> None:
    """Another process, in which the stand-in is not loaded."""
    result = in_another_process("from antiphon.ops.cuda.driver import describe; describe()")
    if result.returncode == 0:
        pytest.skip("this machine has a driver")
    assert re.search(r"CudaError: no NVIDIA driver: libcuda\.so\.1: cannot open shared object file", result.stderr)


def check(device: CudaDevice, node: CudaNode, given: Arguments, dtype: torch.dtype, **launch: Any) -> None:
    """Run a graph of one node, and compare every result, and inputs that it changes, with its kernels."""
    expected_arguments = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    expected = LAUNCHES[node.name](**expected_arguments, **launch)
    expected = expected if isinstance(expected, tuple) else (expected,)
    results = [each.name for each in node.results]
    shapes = {name: (result.dtype, tuple(result.shape)) for name, result in zip(results, expected, strict=True)}
    graph = run_node(device, node, given, dtype, shapes)
    for name, result in zip(results, expected, strict=True):
        equal(graph.read(name), result)
    for port in node.inputs:
        if given[port.name] is not None:
            equal(graph.read(port.name), expected_arguments[port.name])


def run_node(device: CudaDevice, node: CudaNode, given: Arguments, dtype: torch.dtype, outputs: Outputs) -> DeviceGraph:
    """Return a graph of one node that has run once."""
    graph = DeviceGraph(device, one_node(node, given, dtype), outputs)
    feed(graph, node, given)
    graph.run()
    return graph


def ones_of(node: CudaNode) -> Outputs:
    """Return outputs of the right types and ranks, whose axes have size 1."""
    kinds = {each.name: torch.int32 if each.kind == "int32" else torch.float32 for each in node.results}
    return {each.name: (kinds[each.name], (1,) * (each.axes.count(",") + 1)) for each in node.results}


def equal(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=0, rtol=0, equal_nan=True)


def feed(graph: DeviceGraph, node: CudaNode, given: Arguments) -> None:
    """Copy a node's inputs to the device."""
    for port in node.inputs:
        if given[port.name] is not None:
            graph.write(port.name, given[port.name])


def picking(device: CudaDevice, width: int = 48, offset: int = 0) -> DeviceGraph:
    """Return a graph that has run once: a CudaPick in float32. offset: of the picks, in bytes from aligned memory."""
    given = arguments(PICK, torch.float32, width=width)
    graph = DeviceGraph(device, one_node(PICK, given, torch.float32), {"out": (torch.float32, (3, width))})
    graph.write("hidden", given["hidden"])
    graph.write("picks", given["picks"], offset)
    graph.run()
    return graph


def pick_and_multiply(weight: Tensor) -> Any:
    """Return a graph with a node of ours and a product."""
    kind = ONNX_TYPES[weight.dtype]
    nodes = [
        helper.make_node("CudaPick", ["hidden", "picks"], ["out"], domain="antiphon"),
        helper.make_node("Gemm", ["out", "weight"], ["product"], transB=1),
    ]
    inputs = [
        helper.make_tensor_value_info("hidden", kind, ["N", "M"]),
        helper.make_tensor_value_info("picks", ONNX_TYPES[torch.int32], ["K"]),
    ]
    outputs = [helper.make_tensor_value_info("product", kind, ["K", "V"])]
    stored = numpy_helper.from_array(weight.float().numpy(), "weight")
    if weight.dtype != torch.float32:
        stored = helper.make_tensor("weight", kind, weight.shape, weight.float().flatten().numpy())
    return model_of(nodes, inputs, outputs, [stored])


def change_header(standin: StandIn, path: Path, pattern: str, replacement: str) -> None:
    """Write the stand-in's kernels with a change in the text before the images."""
    header, blank, images = standin.kernels.read_bytes().partition(b"\n\n")
    changed = re.sub(pattern, replacement, header.decode("ascii"), flags=re.MULTILINE)
    assert changed.encode("ascii") != header
    path.write_bytes(changed.encode("ascii") + blank + images)


def in_another_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
