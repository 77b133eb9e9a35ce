"""Lexical shortlist: the target tokens that a source can become, so that a step computes the logits of these only.

A source's candidates are the likely target tokens of each of its tokens, and tokens that are frequent in any text. They
depend on this source only, never on other rows of a batch. A shortlist is a file of a bundle, little-endian:

    8 bytes   "lexical1"
    u64       has_source_ids (0 or 1), A, S, N
    int32     always [A], offsets [S+1], target_ids [N]

Imports no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from antiphon.errors import BundleError

SHORTLIST_NAME = "shortlist.bin"
_MAGIC = b"lexical1"
_HEADER = struct.Struct("<8s4Q")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Shortlist:
    """Likely target tokens of S source tokens, N in all.

    always: [A] int32, candidates of every source in ascending order: frequent tokens and the end token.
    offsets: [S+1] int32; the likely tokens of source token s are target_ids[offsets[s]:offsets[s+1]].
    target_ids: [N] int32.
    has_source_ids: True: tokens of the source are candidates too, for models with one vocabulary; names and numbers
        often stay as they are.
    """

    always: NDArray[np.int32]
    offsets: NDArray[np.int32]
    target_ids: NDArray[np.int32]
    has_source_ids: bool = False

    @classmethod
    def of_pairs(
        cls,
        source_ids: ArrayLike,
        target_ids: ArrayLike,
        *,
        num_sources: int,
        always: ArrayLike,
        has_source_ids: bool = False,
    ) -> Self:
        """Return the shortlist in which target_ids[i] is a likely token of source_ids[i]; both [N] in any order."""
        sources, targets = np.asarray(source_ids, np.int32), np.asarray(target_ids, np.int32)
        order = np.lexsort((targets, sources))
        return cls(
            always=np.unique(np.asarray(always, np.int32)),
            offsets=np.searchsorted(sources[order], np.arange(num_sources + 1)).astype(np.int32),
            target_ids=targets[order],
            has_source_ids=has_source_ids,
        )

    def candidates(self, source_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the target ids that this source can become, ascending and without duplicates.

        source_ids: all tokens of a source, with those of the template; each from 0 to S-1.
        """
        sources = set(source_ids)
        likely = [self.target_ids[self.offsets[source] : self.offsets[source + 1]] for source in sources]
        own = [np.fromiter(sources, np.int32, len(sources))] if self.has_source_ids else []
        ids = np.concatenate([self.always, *own, *likely])
        ids.sort()
        is_first = np.ones(len(ids), np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
        return ids[is_first]

    def write(self, path: Path) -> None:
        """Write the file."""
        arrays = (self.always, self.offsets, self.target_ids)
        header = _HEADER.pack(
            _MAGIC, self.has_source_ids, len(self.always), len(self.offsets) - 1, len(self.target_ids)
        )
        path.write_bytes(header + b"".join(array.astype("<i4").tobytes() for array in arrays))

    @classmethod
    def read(cls, path: Path, *, num_sources: int, num_targets: int) -> Self:
        """Map a file into memory, and check it for vocabularies of these sizes. Raises BundleError naming the file."""
        try:
            content = np.memmap(path, np.uint8, "r").view(np.ndarray)
            magic, has_source_ids, *sizes = _HEADER.unpack(content[: _HEADER.size].tobytes())
        except (OSError, ValueError, struct.error) as error:
            raise BundleError(f"{path} cannot be read as a shortlist: {error}") from None
        num_always, num_listed, num_ids = sizes
        expected = _HEADER.size + 4 * (num_always + num_listed + 1 + num_ids)
        if magic != _MAGIC or has_source_ids > 1 or len(content) != expected:
            raise BundleError(f"{path} is not a shortlist, or is damaged: {len(content)} bytes")
        numbers = content[_HEADER.size :].view("<i4")
        always, offsets, target_ids = np.split(numbers, [num_always, num_always + num_listed + 1])
        shortlist = cls(always=always, offsets=offsets, target_ids=target_ids, has_source_ids=bool(has_source_ids))
        shortlist.check(path, num_sources=num_sources, num_targets=num_targets)
        return shortlist

    def check(self, path: Path, *, num_sources: int, num_targets: int) -> None:
        """Raise BundleError naming the file unless all ids are within vocabularies of these sizes."""
        num_listed = len(self.offsets) - 1
        if num_listed != num_sources:
            raise BundleError(f"{path} lists {num_listed} source tokens; the model has {num_sources}")
        if self.has_source_ids and num_sources > num_targets:
            raise BundleError(
                f"{path} adds the ids of {num_sources} source tokens; the model has {num_targets} targets"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.target_ids) or np.any(np.diff(self.offsets) < 0):
            raise BundleError(f"{path} is damaged: offsets must ascend from 0 to {len(self.target_ids)}")
        if not len(self.always) or np.any(np.diff(self.always) <= 0):
            raise BundleError(f"{path} is damaged: ids of every source must ascend, and there must be at least 1")
        for ids in (self.always, self.target_ids):
            if len(ids) and not 0 <= ids.min() <= ids.max() < num_targets:
                raise BundleError(
                    f"{path} has the target ids {ids.min()} to {ids.max()}; they must be from 0 to {num_targets - 1}"
                )
