"""Layout of the inputs and of the results of a decoder step: arrays at fixed places of one structure each.

One copy brings a step's inputs to the device, and one brings its results back. A captured graph reads and writes fixed
addresses, so every bucket uses the leading part of each array.

Axes: N tokens, R rows, K samples, E edits, k candidates, X and Y widths of the self and cross tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS

# Arrays start at multiples of it: kernels read vectors of 16 bytes, and a copy moves lines of 256.
_ALIGNMENT = 256
EDITS = ("edit_ids", "edit_rounds", "edit_values")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Sizes of a structure's arrays: the largest step that fits. cross_width is 0 without an encoder."""

    tokens: int
    rows: int
    samples: int
    edits: int
    candidates: int
    self_width: int
    cross_width: int

    def holds(self, needed: StepSizes) -> bool:
        """Return True if a step of these sizes fits."""
        return all(getattr(self, name) >= getattr(needed, name) for name in self.__slots__)

    def joined(self, other: StepSizes) -> StepSizes:
        """Return sizes in which both fit."""
        return StepSizes(**{name: max(getattr(self, name), getattr(other, name)) for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of one array in a structure: bytes from its start, element type and shape."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Return the first byte behind the array."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


class Layout:
    """Places of arrays, one behind the other. num_bytes: size of the structure."""

    def __init__(self, arrays: Mapping[str, tuple[type[np.generic], tuple[int, ...]]]) -> None:
        self.places: dict[str, Place] = {}
        offset = 0
        for name, (kind, shape) in arrays.items():
            place = Place(offset=offset, dtype=np.dtype(kind), shape=shape)
            self.places[name] = place
            offset = -(-place.end // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return the arrays of a structure in host memory."""
        return {
            name: memory[place.offset : place.end].view(place.dtype).reshape(place.shape)
            for name, place in self.places.items()
        }

    def __iter__(self) -> Iterator[tuple[str, Place]]:
        return iter(self.places.items())


def input_layout(sizes: StepSizes) -> Layout:
    """Return the layout of a step's inputs; edits are last, because most steps have none and copy none."""
    per_token: tuple[str, ...] = ("tokens", "positions", "rows", "self_lens")
    tables = {"self_tables": sizes.self_width}
    if sizes.cross_width:
        per_token, tables = (*per_token, "cross_lens"), {**tables, "cross_tables": sizes.cross_width}
    return Layout(
        dict.fromkeys(per_token, (np.int32, (sizes.tokens,)))
        | {name: (np.int32, (sizes.rows, width)) for name, width in tables.items()}
        | {
            "picks": (np.int32, (sizes.samples,)),
            "sample_positions": (np.int32, (sizes.samples,)),
            "float_params": (np.float32, (sizes.samples, len(FLOAT_PARAMS))),
            "int_params": (np.int64, (sizes.samples, len(INT_PARAMS))),
            "edit_offsets": (np.int32, (sizes.samples + 1,)),
            "candidates": (np.int32, (sizes.candidates,)),
            "edit_ids": (np.int32, (sizes.edits,)),
            "edit_rounds": (np.int32, (sizes.edits,)),
            "edit_values": (np.float32, (sizes.edits, 3)),
        }
    )


def result_layout(sizes: StepSizes) -> Layout:
    """Return the layout of a step's results; candidates are last, because most steps have none and copy none."""
    return Layout(
        {
            "token_ids": (np.int32, (sizes.samples,)),
            "logprobs": (np.float32, (sizes.samples,)),
            "top_ids": (np.int32, (sizes.samples * sizes.candidates,)),
            "top_logprobs": (np.float32, (sizes.samples * sizes.candidates,)),
            "top_scores": (np.float32, (sizes.samples * sizes.candidates,)),
        }
    )
