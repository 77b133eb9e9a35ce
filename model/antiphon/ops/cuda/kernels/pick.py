"""States of the tokens that samples follow."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pick(
    out,  # [K, M]
    hidden,  # [N, M]
    picks,  # [K]
    width,  # M
    BLOCK: tl.constexpr,
):
    """Copy one state. Grid: K."""
    sample = tl.program_id(0).to(tl.int64)
    token = tl.load(picks + sample).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        tl.store(out + sample * width + columns, tl.load(hidden + token * width + columns, mask), mask)
