"""Positions that no training changes, in NumPy: sinusoids, rates of rotary positions, and slopes of ALiBi.

The model in PyTorch (antiphon.transformer.positions) and the server (antiphon.runtime.explain) use the same numbers.
Imports no torch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import LinearScaling, RopeScaling, Sinusoids

Floats = NDArray[np.float32]


def sinusoids(length: int, width: int, layout: Sinusoids = "interleaved") -> Floats:
    """Return sines and cosines of each position, [length, width] float32 (Vaswani et al. 2017, section 3.5).

    interleaved  sines in even columns, cosines in odd columns: the paper
    halves       all sines, then all cosines: Marian, PEGASUS
    fairseq      as halves, but the slowest rate is exactly 1/10000; in the paper it is larger: M2M-100, NLLB
    """
    position = np.arange(length, dtype=np.float64)[:, None]
    last = width - 2 if layout == "fairseq" else width
    rate = np.exp(np.arange(0, width, 2, dtype=np.float64) * (-math.log(10000.0) / last))
    parts = np.sin(position * rate), np.cos(position * rate)
    if layout == "interleaved":
        return np.stack(parts, axis=-1).reshape(length, width).astype(np.float32)
    return np.concatenate(parts, axis=1).astype(np.float32)


def rotary_rates(width: int, theta: float, scaling: RopeScaling | None) -> Floats:
    """Return the increase of each angle from one position to the next, [width / 2] float32, in radians.

    Su et al. 2021, section 3.4. Scaling "llama3" is that of Llama 3.1: angles with many turns within the original
    length keep their rate, angles with few turns are slower.
    """
    rate: Floats = np.float32(theta) ** (-np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    if scaling is None:
        return rate
    if isinstance(scaling, LinearScaling):
        return rate / np.float32(scaling.factor)
    turns = rate * np.float32(scaling.original_max_position_embeddings / (2 * math.pi))
    kept = (turns - np.float32(scaling.low_freq_factor)) / np.float32(
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    kept = kept.clip(0, 1)
    return rate * (kept + (1 - kept) / np.float32(scaling.factor))


def alibi_slopes(num_heads: int) -> Floats:
    """Return ALiBi slopes [H] float32 (Press et al. 2022, section 3).

    If num_heads is not a power of two, the slopes are those of the authors' code.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return np.array(slopes, np.float32)
