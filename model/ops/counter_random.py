"""Random numbers by counter: the same for a seed and a position, whoever else draws. Torch-free."""

from __future__ import annotations

import numpy as np


def uniform_at(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed and a target position: Philox 4x64 (Salmon et al. 2011).

    seed: the key, below 2^64 (a negative one counts as its 64 bits); position: the counter. The native operator draws
    the same (native/sampling.cc).
    """
    word: int = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return (word >> 11) * 2.0**-53
