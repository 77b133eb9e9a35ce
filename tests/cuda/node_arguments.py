"""Small random arguments of every node of nodes.py: tensors by input, None for an absent one, and attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from antiphon.ops.cuda import PADDING, PREVIOUS, TILE
from antiphon.ops.cuda.nodes import CudaNode
from antiphon.ops.operators.recurrence import row_states
from tests.operators import NUM_LAYERS, Array, Floats, Inputs, Ints, Rng, Sizes, ints

Arguments = dict[str, Any]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# New tokens of the first row are in two blocks. Model widths of more than BLOCK columns take a kernel two turns.
SIZES: Arguments = dict(
    tokens=4, width=48, outputs=20, head_width=48, lens=(65, 1, 33), new=(2, 1, 1), positions=10, reach=9,
    edits=(0, 0, 2), spare=1,
)  # fmt: skip
_SPECIFIC: dict[str, Arguments] = {"CudaActivate": dict(outputs=1040), "CudaSample": dict(outputs=300)}


def arguments(node: CudaNode, dtype: torch.dtype, seed: int = 0, **sizes: Any) -> Arguments:
    """Return arguments of a node. sizes: fields of Sizes other than the usual ones."""
    inputs = CudaInputs(node, Sizes(**SIZES | _SPECIFIC.get(node.name, {}) | sizes), np.random.default_rng(seed))
    made: Arguments = {}
    for port in node.inputs:
        array = inputs.array(port)
        tensor = None if array is None else torch.from_numpy(array)
        made[port.name] = tensor.to(dtype) if tensor is not None and port.kind in ("float", "cache") else tensor
    if inputs.has_states:
        inputs.write_states(made["cache"])
    return made | {attribute.name: inputs.attribute(attribute.name) for attribute in node.attributes}


class CudaInputs(Inputs):
    """Arrays of one call of a node for GPUs; where tokens can be padding, the last one is."""

    def __init__(self, node: CudaNode, sizes: Sizes, rng: Rng) -> None:
        super().__init__(node, sizes, rng)
        self.is_paged = any(port.name == "tables" for port in node.inputs)
        if self.is_paged:
            self.num_tokens = sum(sizes.new) + 1
        heads = sizes.heads * sizes.head_width
        self.axes |= {
            "N": self.num_tokens, "K": len(sizes.edits), "types": 2, "Z": 3, "H D or 3 H D": 3 * heads,
            "at least H D": 3 * heads, "F (gated: 2 F)": sizes.outputs * (2 if sizes.gated else 1),
        }  # fmt: skip

    def tokens(self) -> Ints:
        tokens = self.below(self.sizes.outputs, self.num_tokens)
        if self.sizes.optional:  # without rows there is no step before
            tokens[1] = PREVIOUS - 2  # of row 2
        return tokens

    def positions(self) -> Ints:
        if self.is_sampling:
            return self.below(99, len(self.sizes.edits))
        if self.is_paged:
            return np.concatenate([self._ends() - 1, ints(PADDING)]).astype(np.int32)
        positions = self.below(self.sizes.positions, self.num_tokens)
        positions[-1] = PADDING
        return positions

    def _ends(self) -> Ints:
        """Return the number of positions that each new token sees."""
        rows = zip(self.sizes.lens, self.sizes.new, strict=True)
        return np.concatenate([np.arange(length - new, length, dtype=np.int32) + 1 for length, new in rows])

    def rows(self) -> Ints:
        num_rows = len(self.sizes.new)
        return ints(*np.repeat(range(num_rows), self.sizes.new), 0) if self.is_paged else self.below(3, self.num_tokens)

    def previous(self) -> Ints:
        return self.below(self.sizes.outputs, 3)

    def types(self) -> Ints:
        return self.below(2, self.num_tokens)

    def tiles(self) -> Ints:
        found = [(row, first) for row, length in enumerate(self.sizes.lens) for first in range(0, length, TILE)]
        return np.array([*found, (-1, 0)], np.int32)

    def cache(self) -> Floats:
        """Return a pool in which the positions of each row are written, in one layer; all others are NaN."""
        shape = (self.num_blocks, NUM_LAYERS, 2, self.sizes.heads, 16, self.sizes.head_width)
        cache = np.full(shape, np.nan, np.float32)
        if self.has_states:
            return cache
        for table, length in zip(self.tables_of_rows, self.sizes.lens, strict=True):
            for position in range(length):
                block, slot = table[position // 16], position % 16
                cache[block, 1, :, :, slot] = self.floats(2, self.sizes.heads, self.sizes.head_width)
        return cache

    def write_states(self, cache: torch.Tensor) -> None:
        """Write the state before the new tokens of each row, in one layer; the other one stays NaN."""
        for table, length, new in zip(self.tables_of_rows, self.sizes.lens, self.sizes.new, strict=True):
            if past := length - new:
                states = row_states(cache, int(table[0]), 1, self.sizes.width)
                states[past % 2] = torch.from_numpy(self.floats(self.sizes.width))

    def tables(self) -> Ints:
        return self.tables_of_rows

    def lengths(self) -> Ints:
        return np.concatenate([self._ends(), ints(0)])

    def written(self) -> Ints:
        return ints(1)

    def float_params(self) -> Floats:
        return np.array([[0, 1, 0, 1], [0.8, 0.9, 0.01, 1], [0, 1, 0, 1]], np.float32)

    def int_params(self) -> Array:
        return np.array([[0, 0, -1, -1, 0, 0], [20, 7, -1, 0, 0, 0], [0, 0, -1, 3, 0, 0]])

    def edit_ids(self) -> Ints:
        return ints(4, 4)

    def edit_rounds(self) -> Ints:
        return ints(0, 1)

    def edit_values(self) -> Floats:
        return np.array([[9.0, 1, 0], [0, 1.5, 0]], np.float32)

    def candidates(self) -> Ints:
        return ints(0, 0, 0)

    def attribute(self, name: str) -> Any:
        fixed = {"layer": 1, "scale": self.sizes.head_width**-0.5}
        return fixed[name] if name in fixed else super().attribute(name)
