"""Large arrays of which only written pages are resident."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.bundle.graph import GraphError


def reserve(shape: Sequence[int], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Return an array of zeros of which only written pages are resident. Raises GraphError, which contains `what`.

    Keep used entries together: then pages of two megabytes waste little memory and need fewer address translations.
    """
    num_bytes = dtype.itemsize * math.prod(shape)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise GraphError(f"{what} need {num_bytes} bytes of address space: {error}") from error
    with suppress(OSError):  # without huge pages serving works too, a little slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def free(reserved: NDArray[Any]) -> None:
    """Return the pages of a reserved array to the system: its entries are zero again. Frees no other array."""
    owner: Any = reserved
    while isinstance(owner, np.ndarray):
        owner = owner.base
    pages = owner.obj if isinstance(owner, memoryview) else owner
    if isinstance(pages, mmap.mmap):
        pages.madvise(mmap.MADV_DONTNEED)
