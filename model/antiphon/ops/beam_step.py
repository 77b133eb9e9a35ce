"""Arrays of running beam searches, and the native functions that move all of them by one token. Torch-free.

Owns the Python side of `native/beam_step.cc`. Belongs to one thread at a time.

Axes: S slots, G searches in the slots 0 .. G-1, W beams, C candidates of each beam, and of each search, T longest
target, E tokens that end a target, N rows of an engine, X blocks of the longest target.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.workspace import LIBRARY, native_library

NONE = -1
"""Stands for no forced token, and for the streamed tokens of a search that streams nothing before its end."""
_ENDED = np.dtype([("slot", "i8"), ("parent", "i8"), ("token_id", "i8"), ("total", "f4"), ("logprob", "f4")])
_AGREED = np.dtype([("slot", "i8"), ("beam", "i8"), ("count", "i8")])
_SIZES = ("width", "num_candidates", "max_len", "num_end_ids")
_STATE = ("scores", "token_ids", "logprobs", "end_ids", "lengths", "max_lengths", "forced_ids", "num_streamed")
_CHOSEN = ("parents", "next_ids", "next_logprobs", "is_over", "agreed", "ended")


def _mirror(name: str, **fields: Any) -> Any:
    """Return the structure of beam_step.cc that has these fields."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Pointer, _Size = ctypes.c_void_p, ctypes.c_int64
_NativeSearches = _mirror(
    "_NativeSearches", **dict.fromkeys(_SIZES, _Size), **dict.fromkeys((*_STATE, *_CHOSEN), _Pointer)
)
_NativeTops = _mirror("_NativeTops", ids=_Pointer, scores=_Pointer, logprobs=_Pointer, stride=_Size)
_NativeRows = _mirror(
    "_NativeRows", token_ids=_Pointer, positions=_Pointer, tables=_Pointer, table_width=_Size, block_size=_Size
)
_NativeShared = _mirror(
    "_NativeShared", sources=_Pointer, targets=_Pointer, full=_Pointer, num_copies=_Size, num_full=_Size
)


class Ended(NamedTuple):
    """A candidate that ends its target. parent: the beam that it follows. total: its score, not normalised."""

    slot: int
    parent: int
    token_id: int
    total: float
    logprob: float


class Shared(NamedTuple):
    """Result of sharing blocks. sources, targets: blocks to copy. full: slots that have filled a column of blocks."""

    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    full: list[int]


class EngineRows:
    """Arrays of an engine's rows, which `SearchArrays.share` changes.

    token_ids int64 [N], positions int32 [N]: what each row feeds next. tables int32 [N, X]: its blocks, block_size
    positions each. All contiguous.
    """

    def __init__(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int32], tables: NDArray[np.int32], block_size: int
    ) -> None:
        num_rows, table_width = tables.shape
        self._arrays = (token_ids, positions, tables)  # keeps the memory that `native` points to
        self.native = _NativeRows(*(_address(array) for array in self._arrays), table_width, block_size)
        self.copies: NDArray[np.int32] = np.zeros((2, num_rows), np.int32)
        self.full: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.shared = _NativeShared(*(_address(array) for array in (*self.copies, self.full)), 0, 0)


class SearchArrays:
    """State of searches of one shape, one entry for each slot, and what their last step chose.

    scores float32 [S, W]: sum of the log-probabilities of each beam. token_ids int64, logprobs float32 [S, W, T]: its
    history. lengths int64 [S]: tokens of each beam. max_lengths int64 [S]. end_ids int64 [S, E].
    forced_ids int64 [S]: the token that every target begins with, or NONE.
    num_streamed int64 [S]: tokens that the client has, or NONE.
    parents int64 [S, W]: the beam that each beam follows. next_ids int64, next_logprobs float32 [S, W]: its new token.
    is_over bool [S]: a search has its longest target, or no beam left.
    """

    def __init__(self, width: int, num_candidates: int, max_len: int, *, library: Path = LIBRARY) -> None:
        """num_candidates: W (1 + E), so that enough candidates continue even if all end tokens are among them.

        Raises WorkspaceError if the native library cannot be used.
        """
        self._functions = _functions(library)
        num_end_ids = num_candidates // width - 1
        self.scores: NDArray[np.float32] = np.zeros((0, width), np.float32)
        self.token_ids: NDArray[np.int64] = np.zeros((0, width, max_len), np.int64)
        self.logprobs: NDArray[np.float32] = np.zeros((0, width, max_len), np.float32)
        self.end_ids: NDArray[np.int64] = np.zeros((0, num_end_ids), np.int64)
        self.lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self.max_lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self.forced_ids: NDArray[np.int64] = np.zeros(0, np.int64)
        self.num_streamed: NDArray[np.int64] = np.zeros(0, np.int64)
        self.parents: NDArray[np.int64] = np.zeros((0, width), np.int64)
        self.next_ids: NDArray[np.int64] = np.zeros((0, width), np.int64)
        self.next_logprobs: NDArray[np.float32] = np.zeros((0, width), np.float32)
        self.is_over: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.agreed: NDArray[Any] = np.zeros(0, _AGREED)
        self.ended: NDArray[Any] = np.zeros((0, width), _ENDED)
        self._sizes = (width, num_candidates, max_len, num_end_ids)
        self._native: Any = None
        self._candidates: tuple[NDArray[Any], ...] = ()  # the last ones
        self._tops: Any = None  # their addresses

    def reserve(self, num_slots: int) -> None:
        """Make room for num_slots searches."""
        missing = num_slots - len(self.lengths)
        if missing <= 0:
            return
        more = max(4, missing, len(self.lengths))
        for name in (*_STATE, *_CHOSEN):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros((more, *array.shape[1:]), array.dtype))))
        self._native = _NativeSearches(*self._sizes, *(_address(getattr(self, name)) for name in (*_STATE, *_CHOSEN)))

    def move(self, source: int, target: int) -> None:
        """Copy the state of a slot to another one."""
        for name in _STATE:
            array = getattr(self, name)
            array[target] = array[source]

    def choose(self, candidates: tuple[NDArray[Any], ...], rows: NDArray[np.int64]) -> list[Ended]:
        """Choose the next token of every beam. Return the candidates that end, of the best W of each search.

        candidates: ids int64, additions to the score float32, and log-probabilities float32 of each row's candidates,
        [rows, at least C], contiguous, best first; a missing candidate has id -1 and score -inf.
        rows [G, W]: the row of each beam.
        Of equal totals, the candidate of the first beam precedes. Histories are as before until `remember`.
        """
        if list(map(id, candidates)) != list(map(id, self._candidates)):
            self._candidates = candidates
            self._tops = _NativeTops(*(_address(array) for array in candidates), candidates[0].shape[1])
        num_ended = self._functions.antiphon_beams_choose(
            ctypes.byref(self._native), ctypes.byref(self._tops), _address(rows), len(rows)
        )
        return [Ended(*ended) for ended in self.ended.reshape(-1)[:num_ended].tolist()] if num_ended else []

    def remember(self, num_searches: int, *, keeps_logprobs: bool) -> list[tuple[int, int, int]]:
        """Append the chosen tokens to the histories, and their log-probabilities if any search keeps them.

        Returns slot, a beam and a count for each search whose beams agree on tokens that its client does not have:
        the beam's `count` tokens after those that were streamed. Beams without a text do not count.
        """
        num_agreed = self._functions.antiphon_beams_remember(ctypes.byref(self._native), num_searches, keeps_logprobs)
        return self.agreed[:num_agreed].tolist() if num_agreed else []

    def share(self, engine: EngineRows, rows: NDArray[np.int64]) -> Shared:
        """Let every row feed the chosen token next, read its parent's blocks, and write to a block of its own."""
        native = engine.shared
        self._functions.antiphon_beams_share(
            ctypes.byref(self._native), ctypes.byref(engine.native), _address(rows), len(rows), ctypes.byref(native)
        )
        sources, targets = engine.copies[:, : native.num_copies]
        return Shared(sources, targets, engine.full[: native.num_full].tolist())


def _address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array. Raises ValueError."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} and strides {array.strides} is not contiguous")
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _functions(library: Path) -> Any:
    """Return the native library, its functions declared. Raises WorkspaceError if it cannot be used."""
    native_library(library)
    # These functions take a few microseconds: they keep the interpreter lock, which would otherwise change hands.
    native = ctypes.PyDLL(str(library))
    native.antiphon_beams_choose.argtypes = (_Pointer, _Pointer, _Pointer, _Size)
    native.antiphon_beams_choose.restype = _Size
    native.antiphon_beams_remember.argtypes = (_Pointer, _Size, ctypes.c_int32)
    native.antiphon_beams_remember.restype = _Size
    native.antiphon_beams_share.argtypes = (_Pointer, _Pointer, _Pointer, _Size, _Pointer)
    native.antiphon_beams_share.restype = None
    return native
