"""Random numbers by counter: each depends on its seed and position, and on no other draw. Torch-free."""

from __future__ import annotations

import numpy as np


def uniform_at(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a seed and a target position: Philox 4x64 (Salmon et al. 2011).

    seed: the key, below 2^64 (a negative one counts as its 64 bits); position: the counter. The native operator
    computes the same number (native/sampling.cc).
    """
    word: int = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return (word >> 11) * 2.0**-53


def seed_of_output(seed: int, index: int) -> int:
    """Return the seed of output `index` of a request: the request's own seed for output 0.

    Further outputs have the numbers that SplitMix64 generates from that seed (Steele et al. 2014, figure 1). These are
    all different and below 2^64.
    """
    if index == 0:
        return seed % 2**64
    word = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31
