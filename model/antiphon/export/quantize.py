"""Quantisation of weights [O, K] float32 to int8 and int4. Torch-free.

int8: integers of -127 to 127, with a scale for each output.
int4: integers of -8 to 7, with a scale for each group of 32 inputs of an output. The scale maps the group's largest
weight to -8, or slightly beyond the range: the factor in _FACTORS with the smallest squared error decides. Over the
products of the English-German model that comes with Antiphon, the root mean square of the error is 7.8 % of that of the
weights (9.3 % with -7 to 7 and one factor; 8.6 % with groups of 64, 6.9 % of 16).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 32
_LOWEST, _HIGHEST = -8, 7
_FACTORS = (1.0, 1.1, 1.05, 0.95, 0.9, 0.85, 0.8, 0.75)
_OUTPUTS = 1024  # in parts: a weight can be large
_LEVELS = 127
_ROWS = 4096
_SAME = 1e-4  # of a step: float32 rounds 127 steps to 1e-5

Floats = NDArray[np.float32]


def quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise weight [N, K] to integers [N, K] in -127..127 and scales [N]; weight ~ integers * scales[:, None].

    Rows of multiples of their largest number / 126 keep these integers: old CTranslate2 converters truncated, current
    ones round.
    """
    integers, scales = np.empty(weight.shape, np.int8), np.empty(len(weight), np.float32)
    for begin in range(0, len(weight), _ROWS):  # in parts: embeddings are large
        rows = slice(begin, begin + _ROWS)
        integers[rows], scales[rows], errors = _rounded_rows(weight[rows], _LEVELS)
        kept, kept_scales, kept_errors = _rounded_rows(weight[rows], _LEVELS - 1)
        fits = (kept_errors < _SAME) & (errors >= _SAME)
        integers[rows][fits], scales[rows][fits] = kept[fits], kept_scales[fits]
    return integers, scales


def _rounded_rows(
    weight: NDArray[np.float32], levels: int
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """Return integers [N, K], scales [N], and the largest error of each row [N] in steps."""
    largest = np.abs(weight).max(axis=1)
    scale = np.where(largest > 0, largest / levels, 1.0).astype(np.float32)
    steps = weight / scale[:, None]
    integers = np.rint(steps)
    return integers.astype(np.int8), scale, np.abs(steps - integers).max(axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """integers s8 [O, K], ratios [O, K / 32 rounded up] float16, scales [O] float32.

    weight ~ integer * ratio * scale; the ratio, -1 to 1, is that of the integer's group.
    """

    integers: NDArray[np.int8]
    ratios: NDArray[np.float16]
    scales: Floats

    def weight(self) -> Floats:
        """Return the weight [O, K] that the integers represent."""
        steps = (self.ratios.astype(np.float32) * self.scales[:, None]).repeat(GROUP, axis=1)
        return self.integers * steps[:, : self.integers.shape[1]]


def quantize_groups(weight: Floats) -> Groups:
    """Quantise weight [O, K] float32."""
    parts = [_quantize(weight[begin : begin + _OUTPUTS]) for begin in range(0, len(weight), _OUTPUTS)]
    return Groups(
        integers=np.concatenate([part.integers for part in parts]),
        ratios=np.concatenate([part.ratios for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
    )


def _quantize(weight: Floats) -> Groups:
    inputs = weight.shape[1]
    groups = np.pad(weight, [(0, 0), (0, -inputs % GROUP)]).reshape(len(weight), -1, GROUP)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    errors, chosen = np.full(extreme.shape, np.inf, np.float32), np.zeros_like(extreme)
    for factor in _FACTORS:
        step = extreme / np.float32(_LOWEST) * np.float32(factor)
        error = ((_rounded_groups(groups, step) * step[..., None] - groups) ** 2).sum(axis=2)
        chosen, errors = np.where(error < errors, step, chosen), np.minimum(error, errors)
    scales = np.abs(chosen).max(axis=1, initial=0)
    scales = np.where(scales > 0, scales, 1.0).astype(np.float32)
    ratios = (chosen / scales[:, None]).astype(np.float16)
    integers = _rounded_groups(groups, ratios.astype(np.float32) * scales[:, None])
    unpadded = integers.reshape(len(weight), -1)[:, :inputs].astype(np.int8)
    return Groups(integers=unpadded, ratios=ratios, scales=scales)


def _rounded_groups(groups: Floats, step: Floats) -> Floats:
    """Return the integers nearest to groups [O, G, 32] in units of step [O, G]; 0 where a step is 0."""
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    rounded: Floats = np.clip(np.rint(groups * inverse[..., None]), _LOWEST, _HIGHEST)
    return rounded
