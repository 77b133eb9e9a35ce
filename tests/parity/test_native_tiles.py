"""Products for every height of a tile, and integers at the ends of their ranges, where 16-bit sums would saturate.

test_native_refusals.py runs these tests again with the kernels of every other processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from antiphon.export.weights import DEPTH, PANEL
from antiphon.ops.operator import NODE_PREFIXES
from tests.operators import Arrays, Floats, Pool, ints, normal, packed_weight, ramp
from tests.parity.native_nodes import attend, run_node

# A tile has at most six rows. Seven rows and more are divided into several tiles.
ROWS = range(1, 15)
# Panels of the widest tile, and one more; the last one is not full.
OUTPUTS = 4 * PANEL + 5
INPUTS = 3 * DEPTH - 7


@pytest.mark.parametrize("precision", NODE_PREFIXES)
def test_rows_are_bit_identical_in_tiles_of_every_height(precision: str) -> None:
    op_type = f"{NODE_PREFIXES[precision]}Linear"
    x, weights = normal(max(ROWS), INPUTS), packed_weight(normal(OUTPUTS, INPUTS, seed=1), precision)
    x[::3] = np.abs(x[::3])  # rows with and without a zero point side by side
    attributes: dict[str, Any] = dict(width=OUTPUTS, activation="none")
    alone = [run_node(op_type, {"x": row[None], **weights}, **attributes)[0] for row in x]
    for rows in ROWS:
        (found,) = run_node(op_type, {"x": x[:rows], **weights}, **attributes)
        np.testing.assert_array_equal(found, np.concatenate(alone[:rows]))


def extreme_rows(rows: int, inputs: int) -> Floats:
    """Return rows that are quantised exactly: to 0 and 255 in even rows, to 1 and 255 around 128 in the others."""
    signs = np.sign(normal(rows, inputs))
    signs[:, 0] = 1
    x = np.where(np.arange(rows)[:, None] % 2, 127 * signs, 255 * (signs + 1) / 2)
    x[:, inputs // 2 :] = x[:, :1]  # adjacent products of the largest size
    return x.astype(np.float32)


@pytest.mark.parametrize("lowest", [-128, -127])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 13])
def test_int8_products_of_extreme_integers_are_exact(rows: int, lowest: int) -> None:
    """Weights of -128 do not come from our quantisation, but another program may have written them."""
    inputs = 5 * DEPTH
    integers = np.where(normal(OUTPUTS, inputs, seed=2) > 0, 127, lowest).astype(np.int8)
    integers[0], integers[1] = 127, lowest
    padded = np.zeros((5 * PANEL, inputs), np.int8)
    padded[:OUTPUTS] = integers
    packed = np.ascontiguousarray(padded.reshape(-1, PANEL, inputs // 4, 4).swapaxes(1, 2))
    x = extreme_rows(rows, inputs)
    arrays: Arrays = {
        "x": x, "weight": packed, "scales": np.ones(len(padded), np.float32),
        "column_sums": padded.sum(axis=1, dtype=np.int32),
    }  # fmt: skip
    (found,) = run_node("QuantizedLinear", arrays, width=OUTPUTS, activation="none")
    np.testing.assert_array_equal(found, (x.astype(np.int64) @ integers.T.astype(np.int64)).astype(np.float32))


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 13])
def test_int4_products_of_extreme_integers_are_exact(rows: int) -> None:
    inputs = 4 * DEPTH
    integers = np.where(normal(5 * PANEL, inputs, seed=3) > 0, 7, -8).astype(np.int8)
    integers[0], integers[1] = 7, -8
    steps = integers.reshape(5, PANEL, inputs // 8, 2, 4)
    nibbles = np.ascontiguousarray(((steps[:, :, :, 0] & 15) | (steps[:, :, :, 1] << 4)).swapaxes(1, 2))
    x = extreme_rows(rows, inputs)
    arrays: Arrays = {
        "x": x, "weight": nibbles, "ratios": np.ones((5, inputs // 32, PANEL), np.float16),
        "scales": np.full(5 * PANEL, 1 / 16, np.float32),
        "offsets": (16 * integers.sum(axis=1, dtype=np.int64)).astype(np.float32),
    }  # fmt: skip
    (found,) = run_node("NibbleLinear", arrays, width=5 * PANEL, activation="none")
    np.testing.assert_array_equal(found, (x.astype(np.int64) @ integers.T.astype(np.int64)).astype(np.float32))


def test_every_finite_float16_is_read_exactly() -> None:
    """The attention over one position returns its value."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    width, heads = 64, 4
    for values in np.resize(halves, (-(-len(halves) // (heads * width)), heads * width)):
        pool = Pool([1], heads, width, "float16", layers=1)
        pool.hold(0, [1])
        block = pool.cache[pool.tables[0, 0], 0]
        block[0] = 0
        block[1].reshape(heads, -1, width)[:, 0] = values.reshape(heads, width)
        arrays: Arrays = {
            "query": normal(1, heads * width), "cache": pool.cache, "block_tables": pool.tables, "offsets": ramp([1]),
            "source_lens": ints(1),
        }  # fmt: skip
        found = attend("PagedCrossAttentionSublayer", arrays, num_heads=heads, scale=1.0, layer=0)
        np.testing.assert_array_equal(found[0], values.astype(np.float32))


def test_infinite_float16_is_read_exactly() -> None:
    for infinity in (np.inf, -np.inf):
        pool = Pool([1], 1, 8, "float16", layers=1)
        pool.cache[:] = 0
        pool.cache[pool.tables[0, 0], 0, 1, 0, 0] = infinity
        arrays: Arrays = {
            "query": normal(1, 8), "cache": pool.cache, "block_tables": pool.tables, "offsets": ramp([1]),
            "source_lens": ints(1),
        }  # fmt: skip
        found = attend("PagedCrossAttentionSublayer", arrays, num_heads=1, scale=1.0, layer=0)
        assert found[0, 0] == infinity
