"""The two attention operators: registration with PyTorch, and lowering of single nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from antiphon.errors import LoweringError
from antiphon.export.graphs.contrib_lowering import lower_for_cpu
from antiphon.ops.attention import attention, cached_attention
from antiphon.ops.operator import DOMAIN, torch_operator
from antiphon.ops.operators import fused_attention

HEADS, WIDTH, SCALE = 4, 16, 0.3
Arrays = dict[str, Tensor | None]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run_lowered(op_type: str, inputs: Arrays, outputs: list[str], **attributes: Any) -> list[np.ndarray[Any, Any]]:
    """Lower and run one attention node in a separate graph, with the dynamic sizes of the exported graphs."""
    values = {
        name: None
        if tensor is None
        else ir.val(name, ir.DataType.from_numpy(tensor.numpy().dtype), _free(name, tensor))
        for name, tensor in inputs.items()
    }
    node = ir.node(op_type, list(values.values()), attributes, domain=DOMAIN, num_outputs=len(outputs))
    shapes = [values["query"], values.get("cache_key"), values.get("cache_value")]
    for output, name, like in zip(node.outputs, outputs, shapes, strict=False):
        assert like is not None
        output.name, output.shape, output.type = name, like.shape, like.type
    graph_inputs = [value for value in values.values() if value is not None]
    graph = ir.Graph(graph_inputs, node.outputs, nodes=[node], opset_imports={"": 23, DOMAIN: 1}, name="single")
    lower_for_cpu(graph)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {name: tensor.numpy() for name, tensor in inputs.items() if tensor is not None}
    return list(session.run(outputs, feeds))


def _free(name: str, tensor: Tensor) -> list[int | str]:
    axes: list[int | str] = list(tensor.shape)
    axes[0] = "batch" if axes[0] != 1 or tensor.ndim == 1 else 1
    if "cache" in name and tensor.ndim == 4:
        axes[2] = "capacity"
    return axes


BIASES: dict[str, Callable[[int, int], Tensor | None]] = {
    "no_bias": lambda queries, keys: None,
    "bias": lambda queries, keys: normal(1, HEADS, queries, keys),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("key_lens", [None, (7, 2, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_lowered_attention_equals_eager(bias: str, key_lens: tuple[int, ...] | None, causal: bool) -> None:
    query, key, value = (normal(3, 7, HEADS, WIDTH).roll(turn, 0) for turn in range(3))
    held = None if key_lens is None else lens(*key_lens)
    added = BIASES[bias](7, 7)
    expected = attention(query, key, value, held, added, causal=causal, scale=SCALE)
    inputs: Arrays = dict(query=query, key=key, value=value, key_lens=held, bias=added)
    (found,) = run_lowered("Attention", inputs, ["output"], causal=int(causal), scale=SCALE)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("appended", [0, 1])
def test_lowered_cached_attention_equals_eager(bias: str, appended: int) -> None:
    query, key = normal(3, 1, HEADS, WIDTH), normal(3, appended, HEADS, WIDTH)
    cache_key, cache_value = normal(3, HEADS, 11, WIDTH), normal(3, HEADS, 11, WIDTH).roll(1, 0)
    held, added = lens(10, 1, 6), BIASES[bias](1, 11)
    operands = (query, key, key * 2, cache_key, cache_value, held, added)
    expected = cached_attention(*operands, scale=SCALE)
    names = ("query", "key", "value", "cache_key", "cache_value", "cache_lens", "bias")
    outputs = ["output", "present_key", "present_value"][: 3 if appended else 1]
    found = run_lowered("CachedAttention", dict(zip(names, operands, strict=True)), outputs, scale=SCALE)
    np.testing.assert_allclose(found[0], expected[0].numpy(), atol=1e-5)
    for row, past in enumerate(held.tolist()):
        for cache, wanted in zip(found[1:], expected[1:], strict=False):
            np.testing.assert_array_equal(cache[row, :, : past + 1], wanted[row, :, : past + 1].numpy())


def test_cached_attention_refuses_a_head_width_without_a_kernel() -> None:
    query, cache = normal(2, 1, HEADS, 12), normal(2, HEADS, 5, 12)
    inputs: Arrays = dict(
        query=query, key=query, value=query, cache_key=cache, cache_value=cache, cache_lens=lens(1, 2)
    )
    with pytest.raises(LoweringError, match="head_dim=12 must be a multiple of 8"):
        run_lowered("CachedAttention", inputs, ["output"], scale=SCALE)


def test_attention_op_passes_pytorch_checks() -> None:
    query, key = normal(2, 3, HEADS, WIDTH), normal(2, 5, HEADS, WIDTH)
    for held, added, causal in ((None, None, True), (lens(5, 2), normal(1, HEADS, 3, 5), False)):
        torch.library.opcheck(
            torch_operator(fused_attention.ATTENTION), (query, key, key, held, added), dict(causal=causal, scale=SCALE),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


@pytest.mark.parametrize("appended", [0, 1])
def test_cached_attention_op_passes_pytorch_checks(appended: int) -> None:
    query, key, cache = normal(2, 1, HEADS, WIDTH), normal(2, appended, HEADS, WIDTH), normal(2, HEADS, 6, WIDTH)
    torch.library.opcheck(
        torch_operator(fused_attention.CACHED_ATTENTION), (query, key, key, cache, cache, lens(2, 4), None),
        dict(scale=SCALE),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_ops_equal_eager_attention() -> None:
    query, cache = normal(2, 1, HEADS, WIDTH), normal(2, HEADS, 6, WIDTH)
    operands = (query, query, query, cache, cache, lens(2, 4), None)
    for found, expected in zip(
        fused_attention.cached_attention(*operands, scale=SCALE), cached_attention(*operands, scale=SCALE), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
