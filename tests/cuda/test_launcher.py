"""The native launcher with the unmodified CUDA provider: nodes, captured graphs, and files that it must refuse.

The stand-in runs the kernels in Triton's interpreter, so a node's result equals that of node_launches.py bit for bit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from antiphon.model.ops.cuda.driver import CudaDevice, CudaError
from antiphon.model.ops.cuda.nodes import NODES, PADDING, PREVIOUS, TILE
from antiphon.model.ops.operator import Node
from tests.cuda import node_launches
from tests.cuda.device_graphs import ONNX_TYPES, DeviceGraph, model_of, one_node, results_of
from tests.cuda.standin.device import StandIn, write_kernels
from tests.cuda.test_kernels import DTYPES, Arguments, Draw, Pool

BY_NAME = {node.name: node for node in NODES}
PICK = BY_NAME["CudaPick"]


def embed_arguments(draw: Draw) -> Arguments:
    return {
        "tokens": torch.tensor([3, PREVIOUS, 0, 19], dtype=torch.int32),
        "positions": torch.tensor([0, 3, PADDING, 5], dtype=torch.int32),
        "weight": draw.states(20, 48),
        "position_table": draw.states(8, 48),
        "rows": draw.ints(0, 3, 4),
        "previous": torch.tensor([4, 0, 19], dtype=torch.int32),
        "types": draw.ints(0, 2, 4),
        "type_table": draw.states(2, 48),
        "scale": 1.5,
    }


def add_norm_arguments(draw: Draw) -> Arguments:
    vectors = {name: draw.states(48) for name in ("bias", "weight", "norm_bias")}
    return vectors | {"x": draw.states(3, 48), "residual": draw.states(3, 48), "epsilon": 1e-5, "kind": "layer"}


def activate_arguments(draw: Draw) -> Arguments:
    return {"x": draw.states(2, 2 * 1040), "bias": draw.states(2 * 1040), "activation": "gelu", "gated": True}


def rotary_arguments(draw: Draw) -> Arguments:
    return {
        "qkv": draw.states(3, 3 * 2 * 48),
        "bias": draw.states(3 * 2 * 48),
        "positions": torch.tensor([0, 9, PADDING], dtype=torch.int32),
        "table": draw.floats(10, 48),
        "num_heads": 2,
    }


def packed_attention_arguments(draw: Draw) -> Arguments:
    return {
        "qkv": draw.states(TILE + 7, 3 * 2 * 48),
        "bias": draw.states(3 * 2 * 48),
        "offsets": torch.tensor([0, 2, TILE + 7], dtype=torch.int32),
        "tiles": torch.tensor([(0, 0), (1, 0), (1, TILE), (-1, 0)], dtype=torch.int32),
        "bias_table": draw.floats(2, 2 * 9 + 1),
        "slopes": draw.floats(2).abs(),
        "num_heads": 2,
        "scale": 0.2,
        "causal": True,
    }


def paged_write_arguments(draw: Draw) -> Arguments:
    pool = Pool(draw, 48)
    return {
        "kv": draw.states(3, 3 * 2 * 48),
        "bias": draw.states(3 * 2 * 48),
        "cache": pool.cache,
        "tables": pool.tables,
        "rows": torch.tensor([0, 1, 2], dtype=torch.int32),
        "positions": torch.tensor([16, PADDING, 3], dtype=torch.int32),
        "num_heads": 2,
        "layer": 1,
    }


def paged_attention_arguments(draw: Draw, num_tokens: int = 4) -> Arguments:
    pool = Pool(draw, 48)
    pool.fill(draw, [80, 1, 33])
    return {
        "query": draw.states(num_tokens, 3 * 2 * 48),
        "bias": draw.states(3 * 2 * 48),
        "cache": pool.cache,
        "tables": pool.tables,
        "rows": torch.tensor([0, 1, 2, 0], dtype=torch.int32)[:num_tokens],
        "lengths": torch.tensor([80, 1, 33, 0], dtype=torch.int32)[:num_tokens],
        "written": torch.ones(1, dtype=torch.int32),
        "bias_table": draw.floats(2, 2 * 9 + 1),
        "slopes": draw.floats(2).abs(),
        "num_heads": 2,
        "scale": 0.2,
        "layer": 1,
    }


def pick_arguments(draw: Draw) -> Arguments:
    return {"hidden": draw.states(5, 48), "picks": torch.tensor([4, 0, 0], dtype=torch.int32)}


def sample_arguments(draw: Draw) -> Arguments:
    """Return three samples: the largest logit, one drawn, one with edits and candidates."""
    return {
        "logits": draw.states(3, 300),
        "bias": draw.states(300),
        "positions": torch.tensor([3, 0, 7], dtype=torch.int32),
        "float_params": torch.tensor([[0, 1, 0, 1], [0.8, 0.9, 0.01, 1], [0, 1, 0, 1]], dtype=torch.float32),
        "int_params": torch.tensor([[0, 0, -1, -1, 0, 0], [20, 7, -1, 0, 0, 0], [0, 0, -1, 3, 0, 0]]),
        "edit_offsets": torch.tensor([0, 0, 0, 2], dtype=torch.int32),
        "edit_ids": torch.tensor([4, 4], dtype=torch.int32),
        "edit_rounds": torch.tensor([0, 1], dtype=torch.int32),
        "edit_values": torch.tensor([[9.0, 1, 0], [0, 1.5, 0]]),
        "candidates": torch.zeros(3, dtype=torch.int32),
    }


ARGUMENTS: dict[str, Callable[[Draw], Arguments]] = {
    "CudaEmbed": embed_arguments,
    "CudaAddNorm": add_norm_arguments,
    "CudaActivate": activate_arguments,
    "CudaRotary": rotary_arguments,
    "CudaPackedAttention": packed_attention_arguments,
    "CudaPagedWrite": paged_write_arguments,
    "CudaPagedAttention": paged_attention_arguments,
    "CudaPick": pick_arguments,
    "CudaSample": sample_arguments,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_node_equals_its_kernels(device: CudaDevice, node: Node, dtype: torch.dtype) -> None:
    check(device, node, ARGUMENTS[node.name](Draw(1, dtype)), dtype)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_node_equals_its_kernels_without_optional_inputs(device: CudaDevice, node: Node) -> None:
    dtype = torch.bfloat16
    arguments = ARGUMENTS[node.name](Draw(2, dtype))
    arguments |= {given.name: None for given in node.inputs if given.optional}
    if node.name == "CudaEmbed":
        arguments["tokens"] = arguments["tokens"].clamp(min=0)  # without rows there is no step before
    check(device, node, arguments, dtype)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("CudaAddNorm", {"kind": "rms"}),
        ("CudaActivate", {"gated": False, "activation": "tanh"}),
        ("CudaPackedAttention", {"causal": False}),
    ],
)
def test_node_passes_its_attributes(device: CudaDevice, name: str, changes: Arguments) -> None:
    check(device, BY_NAME[name], ARGUMENTS[name](Draw(3, torch.float32)) | changes, torch.float32)


def test_paged_attention_splits_the_positions_of_few_tokens(device: CudaDevice, standin: StandIn) -> None:
    """Four multiprocessors want eight programs: one token with two heads gets its two pairs of blocks."""
    arguments = paged_attention_arguments(Draw(4, torch.float32), num_tokens=1)
    check(device, BY_NAME["CudaPagedAttention"], arguments, torch.float32, num_splits=2)
    assert standin.launched[:2] == ["paged_attention.float32.64", "merge_splits.float32.64"]


def test_node_without_tokens_launches_nothing(device: CudaDevice, standin: StandIn) -> None:
    arguments = pick_arguments(Draw(5, torch.float32)) | {"picks": torch.zeros(0, dtype=torch.int32)}
    graph = DeviceGraph(device, one_node(PICK, arguments, torch.float32), {"out": (torch.float32, (0, 48))})
    feed(graph, PICK, arguments)
    graph.run()
    assert standin.launched == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_graph_replays_with_changed_inputs(device: CudaDevice, standin: StandIn, dtype: torch.dtype) -> None:
    draw = Draw(6, dtype)
    weight, arguments = draw.states(16, 48), pick_arguments(draw)
    graph = DeviceGraph(device, pick_and_multiply(weight), {"product": (dtype, (3, 16))}, captures=True)
    feed(graph, PICK, arguments)
    graph.run(graph_id=3)  # captures
    allocations = standin.num_allocations
    for picks in ([4, 0, 0], [1, 2, 3]):
        arguments = {"hidden": draw.states(5, 48), "picks": torch.tensor(picks, dtype=torch.int32)}
        feed(graph, PICK, arguments)
        standin.launched.clear()
        graph.run(graph_id=3)
        assert standin.launched == [f"pick.{str(dtype).removeprefix('torch.')}"]
        expected = (arguments["hidden"][picks].float() @ weight.float().T).to(dtype)
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
    change_header(standin, tmp_path / "kernels", "^antiphon-kernels 1 ", "antiphon-kernels 2 ")
    with pytest.raises(CudaError, match=r"kernels has version 2; this library reads version 1$"):
        device.load_kernels(tmp_path / "kernels")


def test_kernels_without_one_of_their_header_are_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", r"^pick\.float32 .*\n", "")
    with pytest.raises(CudaError, match=r"is damaged: its header lacks kernels$"):
        device.load_kernels(tmp_path / "kernels")


def test_kernel_with_another_parameter_is_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", "hidden:p", "concealed:p")
    device.load_kernels(tmp_path / "kernels")
    with pytest.raises(Exception, match=r"CudaPick: pick\.float32 takes concealed:p at 1, not hidden:p"):
        picking(device)


def test_kernel_with_one_more_parameter_is_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", "hidden:p", "hidden:p more:i")
    device.load_kernels(tmp_path / "kernels")
    with pytest.raises(Exception, match=r"CudaPick: pick\.float32 takes 5 arguments, not 4"):
        picking(device)


def test_node_without_a_kernel_is_refused(device: CudaDevice, standin: StandIn, tmp_path: Path) -> None:
    change_header(standin, tmp_path / "kernels", r"^pick\.float32 ", "peck.float32 ")
    device.load_kernels(tmp_path / "kernels")
    with pytest.raises(Exception, match=r"antiphon\.CudaPick: .*kernels has no kernel pick\.float32"):
        picking(device)


def test_device_needs_a_driver() -> None:
    """Another process, in which the stand-in is not loaded."""
    result = in_another_process("from antiphon.model.ops.cuda.driver import describe; describe()")
    if result.returncode == 0:
        pytest.skip("this machine has a driver")
    assert re.search(r"CudaError: no NVIDIA driver: libcuda\.so\.1: cannot open shared object file", result.stderr)


def check(device: CudaDevice, node: Node, arguments: Arguments, dtype: torch.dtype, **launch: Any) -> None:
    """Run a graph of one node, and compare every result, and inputs that it changes, with its kernels."""
    expected_arguments = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()
    }
    expected = getattr(node_launches, function_of(node))(**expected_arguments, **launch)
    expected = expected if isinstance(expected, tuple) else (expected,)
    results = [each.name for each in results_of(node)]
    shapes = {name: (result.dtype, tuple(result.shape)) for name, result in zip(results, expected, strict=True)}
    graph = DeviceGraph(device, one_node(node, arguments, dtype), shapes)
    feed(graph, node, arguments)
    graph.run()
    for name, result in zip(results, expected, strict=True):
        equal(graph.read(name), result)
    for given in node.inputs:
        if arguments[given.name] is not None:
            equal(graph.read(given.name), expected_arguments[given.name])


def equal(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=0, rtol=0, equal_nan=True)


def feed(graph: DeviceGraph, node: Node, arguments: Arguments) -> None:
    """Copy a node's inputs to the device."""
    for given in node.inputs:
        if arguments[given.name] is not None:
            graph.write(given.name, arguments[given.name])


def function_of(node: Node) -> str:
    """Return the name in node_launches.py: paged_attention of CudaPagedAttention."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", node.name.removeprefix("Cuda")).lower()


def picking(device: CudaDevice) -> DeviceGraph:
    """Return a graph that has run once: a CudaPick in float32."""
    arguments = pick_arguments(Draw(7, torch.float32))
    graph = DeviceGraph(device, one_node(PICK, arguments, torch.float32), {"out": (torch.float32, (3, 48))})
    feed(graph, PICK, arguments)
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
