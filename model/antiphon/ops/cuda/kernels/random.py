"""Random numbers by counter, the same bits as model/antiphon/ops/counter_random.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform_at(seed, position):
    """Return the float64 in [0, 1) of a seed, int64 of the bits of a uint64, and a position (Salmon et al. 2011)."""
    first_factor = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    second_factor = tl.full([], 0xCA5A826395121157, tl.uint64)
    first_step = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    second_step = tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    first_key = seed.to(tl.uint64, bitcast=True)
    second_key = tl.full([], 0, tl.uint64)
    word0 = (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True)  # NumPy counts up before it draws
    word1 = tl.full([], 0, tl.uint64)
    word2 = tl.full([], 0, tl.uint64)
    word3 = tl.full([], 0, tl.uint64)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(first_factor, word0)
        high1 = tl.umulhi(second_factor, word2)
        low0 = first_factor * word0
        low1 = second_factor * word2
        word0 = high1 ^ word1 ^ first_key
        word1 = low1
        word2 = high0 ^ word3 ^ second_key
        word3 = low0
        first_key += first_step
        second_key += second_step
    return (word0 >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
