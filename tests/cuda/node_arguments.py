"""Small random arguments of every node of nodes.py, with all optional inputs: tensors by input, and attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from antiphon.ops.cuda import PADDING, PREVIOUS, TILE
from tests.cuda.test_kernels import Arguments, Draw, Pool


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
