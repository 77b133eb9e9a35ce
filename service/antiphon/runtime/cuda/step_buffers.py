"""Memory of decoder steps: inputs and results on the device, and pinned copies of both for two steps in flight.

The arrays of the inputs and of the results have fixed places in one structure each. One copy brings a step's inputs to
the device, and one brings its results back. A captured graph reads and writes fixed addresses, so every bucket uses the
leading part of each array.

Axes: N tokens, R rows, K samples, E edits, k candidates, X and Y widths of the self and cross tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cuda import PADDING, PREVIOUS
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, Samples, SamplingArrays
from antiphon.runtime.runner import DecodeBatch

_NEUTRAL_FLOATS = np.array(list(FLOAT_PARAMS.values()), np.float32)
_NEUTRAL_INTS = np.array(list(INT_PARAMS.values()), np.int64)
# Arrays start at multiples of it: kernels read vectors of 16 bytes, and a copy moves lines of 256.
_ALIGNMENT = 256
_FORCED_ID = list(INT_PARAMS).index("forced_id")
EDITS = ("edit_ids", "edit_rounds", "edit_values")
# What a row of a step has that feeds and samples one token.
_PER_ROW = (
    "positions", "self_lens", "cross_lens", "self_tables", "cross_tables", "sample_positions", "float_params",
    "int_params",
)  # fmt: skip


class StepBuffers:
    """Memory for steps up to some sizes. The two turns are used one after the other."""

    def __init__(self, device: CudaDevice, sizes: StepSizes) -> None:
        self.sizes = sizes
        self.inputs = input_layout(sizes)
        self.results = result_layout(sizes)
        self.device_inputs = device.allocate(self.inputs.num_bytes)
        self.device_results = device.allocate(self.results.num_bytes)
        self._turns = [StepTurn(device, self) for _ in range(2)]

    def next_turn(self) -> StepTurn:
        """Return the pinned memory that was used before the last, once no step uses it."""
        self._turns.reverse()
        self._turns[0].event.wait()
        return self._turns[0]


class StepTurn:
    """Pinned inputs and results of one step. event: reached when the results have arrived."""

    def __init__(self, device: CudaDevice, buffers: StepBuffers) -> None:
        self._device = device
        self._buffers = buffers
        self._pinned_inputs = device.allocate_pinned(buffers.inputs.num_bytes)
        self._pinned_results = device.allocate_pinned(buffers.results.num_bytes)
        self.inputs = buffers.inputs.views(self._pinned_inputs.array)
        self._results = buffers.results.views(self._pinned_results.array)
        self._has_edits = False
        self.event = device.event()

    def fill(self, batch: DecodeBatch, padded: StepSizes) -> None:
        """Write a batch, and padding up to these sizes, of which no kernel writes to a block."""
        row_of_token = np.repeat(np.arange(batch.num_rows, dtype=np.int32), np.diff(batch.offsets))
        self._fill_tokens("tokens", batch.token_ids, padded.tokens, 0)
        self._fill_tokens("positions", batch.positions, padded.tokens, PADDING)
        self._fill_tokens("rows", row_of_token, padded.tokens, 0)
        self._fill_tokens("self_lens", batch.positions + 1, padded.tokens, 0)
        self._fill_table("self_tables", batch.self_tables)
        if "cross_lens" in self.inputs:
            self._fill_tokens("cross_lens", batch.source_lens[row_of_token], padded.tokens, 0)
            self._fill_table("cross_tables", batch.cross_tables)
        self._fill_samples(batch, padded.samples)

    def advance(
        self, before: StepTurn, origins: NDArray[np.intp], joining: DecodeBatch | None, padded_rows: int
    ) -> None:
        """Write the step after that of another turn: rows `origins` of it, with the tokens that they sample there.

        joining: rows behind these, which have not decoded yet. Every row feeds and samples one token, without edits.
        """
        rows = len(origins)
        for name, array in before.inputs.items():
            if name in _PER_ROW:
                self.inputs[name][:rows] = array[origins]
        for name in ("positions", "self_lens", "sample_positions"):
            self.inputs[name][:rows] += 1
        self.inputs["int_params"][:rows] = following_params(self.inputs["int_params"][:rows])
        self.inputs["tokens"][:rows] = PREVIOUS - origins
        if joining is not None:
            self._fill_joining(joining, rows)
            rows += joining.num_rows
        for name in ("rows", "picks"):
            self.inputs[name][:rows] = np.arange(rows)
        self._fill_padding(rows, padded_rows)
        self.inputs["edit_offsets"][: padded_rows + 1] = 0
        self._has_edits = False

    def copy_in(self) -> None:
        """Copy the inputs to the device; edits only if there are any."""
        places = self._buffers.inputs.places
        num_bytes = self._buffers.inputs.num_bytes if self._has_edits else places[EDITS[0]].offset
        self._device.copy_in(self._buffers.device_inputs.address, self._pinned_inputs.address, num_bytes)

    def copy_out(self, *, has_candidates: bool) -> None:
        """Copy the results from the device behind the step, and record the event behind the copy."""
        places = self._buffers.results.places
        num_bytes = self._buffers.results.num_bytes if has_candidates else places["top_ids"].offset
        self._device.copy_out(self._pinned_results.address, self._buffers.device_results.address, num_bytes)
        self.event.record()

    def token_ids(self, samples: int) -> NDArray[np.int32]:
        """Return the sampled tokens; valid once the event is reached."""
        return self._results["token_ids"][:samples]

    def samples(self, samples: NDArray[np.intp], computed: int, num_candidates: int) -> Samples:
        """Return the results of some samples, with num_candidates of the `computed` candidates of each."""
        return Samples(
            self._results["token_ids"][samples].astype(np.int64),
            self._results["logprobs"][samples],
            self._candidates("top_ids", samples, computed, num_candidates).astype(np.int64),
            self._candidates("top_logprobs", samples, computed, num_candidates),
            self._candidates("top_scores", samples, computed, num_candidates),
        )

    def _candidates(self, name: str, samples: NDArray[np.intp], computed: int, num_candidates: int) -> NDArray[Any]:
        num_computed = len(self._results[name]) // computed * computed
        table = self._results[name][:num_computed].reshape(-1, computed)
        # Native beam search reads it by address.
        return np.ascontiguousarray(table[samples, :num_candidates])

    def _fill_joining(self, batch: DecodeBatch, start: int) -> None:
        """Write rows that feed and sample one token each, from row `start` on."""
        values: dict[str, NDArray[Any]] = {
            "tokens": batch.token_ids,
            "positions": batch.positions,
            "self_lens": batch.positions + 1,
            "sample_positions": batch.positions,
            "self_tables": batch.self_tables,
            "float_params": batch.sampling.float_params,
            "int_params": batch.sampling.int_params,
            "cross_lens": batch.source_lens,
            "cross_tables": batch.cross_tables,
        }
        for name, array in values.items():
            if name in self.inputs:
                rows = self.inputs[name][start : start + batch.num_rows]
                (rows if array.ndim == 1 else rows[:, : array.shape[1]])[:] = array

    def _fill_padding(self, rows: int, padded_rows: int) -> None:
        """Write the padding of a step in which every row feeds and samples one token."""
        padding = {"positions": PADDING, "float_params": _NEUTRAL_FLOATS, "int_params": _NEUTRAL_INTS}
        for name in (*_PER_ROW, "tokens", "rows", "picks"):
            if name in self.inputs and not name.endswith("_tables"):
                self.inputs[name][rows:padded_rows] = padding.get(name, 0)

    def _fill_tokens(self, name: str, values: NDArray[Any], padded: int, padding: int) -> None:
        array = self.inputs[name]
        array[: len(values)] = values
        array[len(values) : padded] = padding

    def _fill_table(self, name: str, table: NDArray[np.int32]) -> None:
        rows, width = table.shape
        self.inputs[name][:rows, :width] = table

    def _fill_samples(self, batch: DecodeBatch, padded: int) -> None:
        """Write the sampling parameters; samples of the padding are neutral and follow token 0."""
        sampling, inputs = batch.sampling, self.inputs
        count = len(sampling)
        self._fill_tokens("picks", sampling.picks, padded, 0)
        self._fill_tokens("sample_positions", batch.positions[sampling.picks], padded, 0)
        for name, values, neutral in (
            ("float_params", sampling.float_params, _NEUTRAL_FLOATS),
            ("int_params", sampling.int_params, _NEUTRAL_INTS),
        ):
            inputs[name][:count] = values
            inputs[name][count:padded] = neutral
        num_edits = int(sampling.edit_offsets[-1])
        inputs["edit_offsets"][: count + 1] = sampling.edit_offsets
        inputs["edit_offsets"][count + 1 : padded + 1] = num_edits
        self._has_edits = num_edits > 0
        if num_edits:
            inputs["edit_ids"][:num_edits] = sampling.edit_ids[:num_edits]
            inputs["edit_values"][:num_edits] = sampling.edit_values[:num_edits]
            inputs["edit_rounds"][:num_edits] = edit_rounds(sampling)


def following_params(int_params: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the parameters of the step after one with these: a token is forced at the first step of a row only."""
    following = int_params.copy()
    following[:, _FORCED_ID] = INT_PARAMS["forced_id"]
    return following


def edit_rounds(sampling: SamplingArrays) -> NDArray[np.int32]:
    """Return of each edit the number of earlier edits of the same sample and token: edits of one round commute."""
    offsets, num_edits = sampling.edit_offsets, int(sampling.edit_offsets[-1])
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pairs = np.stack([owners, sampling.edit_ids[:num_edits]])
    if np.unique(pairs, axis=1).shape[1] == num_edits:
        return np.zeros(num_edits, np.int32)
    seen: Counter[tuple[int, int]] = Counter()
    rounds = np.zeros(num_edits, np.int32)
    for index, pair in enumerate(zip(*pairs.tolist(), strict=True)):
        rounds[index] = seen[pair]
        seen[pair] += 1
    return rounds


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

    def joined(self, sizes: StepSizes) -> StepSizes:
        """Return sizes in which both fit."""
        return StepSizes(**{name: max(getattr(self, name), getattr(sizes, name)) for name in self.__slots__})


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
