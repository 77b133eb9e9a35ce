"""Large arrays that are resident only where they are written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.bundle.graph import GraphError


def reserve(shape: Sequence[int], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Return an array of zeros, resident only where written. Raises GraphError naming `what` it is for.

    Used entries should lie together: then pages of two megabytes waste little and spare address translations.
    """
    num_bytes = dtype.itemsize * math.prod(shape)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise GraphError(f"{what} need {num_bytes} bytes of address space: {error}") from error
    with suppress(OSError):  # kernels without huge pages serve as well, a little slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
