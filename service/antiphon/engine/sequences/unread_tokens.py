"""Tokens of one output that its reader has not taken yet, in few bytes.

A client that reads nothing would otherwise keep Python objects for every number of its answer: 3 KB for a token with 20
alternatives, where the packed numbers take 170 bytes.
"""

from __future__ import annotations

import struct
from array import array
from itertools import chain
from typing import cast

from antiphon.domain.request import TokenLogprob

Item = int | TokenLogprob
"""A new token: its id, or its id with log-probabilities if the request asks for them."""

# Tokens that stay objects. A reader that keeps up takes about as many at a time, so little is packed for it.
_MAX_IDS = 8
_MAX_LOGPROBS = 3  # an object with 20 alternatives takes 3 KB, packing and unpacking it 5 us
# Token id, log-probability and number of alternatives; then id and log-probability of each alternative.
_RECORD = struct.Struct("<ifH")
# Memory of an item that is not packed.
_ID_BYTES = 40
_LOGPROB_BYTES = 128
_ALTERNATIVE_BYTES = 136


class UnreadTokens:
    """Unread tokens of one output, oldest first. Log-probabilities are kept in float32, as messages carry them."""

    def __init__(self) -> None:
        self._newest: list[Item] = []
        self._packed_ids: array[int] = array("i")
        self._records = bytearray()

    def __len__(self) -> int:
        return len(self._packed_ids) + len(self._newest)

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens."""
        packed_bytes = self._packed_ids.itemsize * len(self._packed_ids) + len(self._records)
        return packed_bytes + sum(_bytes_of_item(item) for item in self._newest)

    def push(self, item: Item) -> None:
        """Add a token."""
        self._newest.append(item)
        if len(self._newest) > (_MAX_LOGPROBS if isinstance(item, TokenLogprob) else _MAX_IDS):
            self._pack()

    def take(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Remove all tokens. Return their ids, and the log-probabilities of those that have some."""
        newest = tuple(self._newest)
        self._newest.clear()
        if TokenLogprob in map(type, newest):
            logprobs = tuple(item for item in newest if isinstance(item, TokenLogprob))
            ids = tuple(item.token_id if isinstance(item, TokenLogprob) else item for item in newest)
        else:  # as for nearly every request
            ids, logprobs = cast("tuple[int, ...]", newest), ()
        if self._packed_ids:
            ids, logprobs = (*self._packed_ids, *ids), (*_unpacked(self._records), *logprobs)
            self._packed_ids, self._records = array("i"), bytearray()
        return ids, logprobs

    def _pack(self) -> None:
        for item in self._newest:
            if isinstance(item, TokenLogprob):
                self._packed_ids.append(item.token_id)
                self._records += _packed(item)
            else:
                self._packed_ids.append(item)
        self._newest.clear()


def bytes_of_logprobs(entries: tuple[TokenLogprob, ...]) -> int:
    """Return the memory of log-probabilities as objects."""
    return sum(_LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(entry.alternatives) for entry in entries)


def _bytes_of_item(item: Item) -> int:
    return bytes_of_logprobs((item,)) if isinstance(item, TokenLogprob) else _ID_BYTES


def _packed(entry: TokenLogprob) -> bytes:
    num = len(entry.alternatives)
    numbers = chain.from_iterable(entry.alternatives)
    return struct.pack(f"<ifH{'if' * num}", entry.token_id, entry.logprob, num, *numbers)


def _unpacked(records: bytearray) -> list[TokenLogprob]:
    entries, start = [], 0
    while start < len(records):
        token_id, logprob, num = _RECORD.unpack_from(records, start)
        start += _RECORD.size
        numbers = struct.unpack_from(f"<{'if' * num}", records, start)
        start += 8 * num
        alternatives = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        entries.append(TokenLogprob(token_id, logprob, alternatives))
    return entries
