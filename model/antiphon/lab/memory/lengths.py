"""Lengths at which memory matters: the lecture's table, crossing points, and the longest T of a machine. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from antiphon.architecture.config import ModelConfig
from antiphon.lab.memory.terms import FLOAT, Case, Prediction

LECTURE = ((8192, "256 MiB"), (32768, "4 GB"), (131072, "64 GB"))
_LONGEST = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class LectureRow:
    """Length, the lecture's claim, one float32 matrix T x T, and all matrices of one sequence in one training step."""

    length: int
    claim: str
    matrix_bytes: int
    model_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """Length from which attention needs more than the feed-forward layer, with its formula; lengths below 0 are 0."""

    name: str
    formula: str
    length: float


def lecture_rows(config: ModelConfig) -> list[LectureRow]:
    """Return the lecture's table. A decoder layer has two matrices for each head: its own tokens and the source."""
    matrices = config.num_heads * (config.encoder_layers + 2 * config.decoder_layers)
    return [
        LectureRow(length=length, claim=claim, matrix_bytes=FLOAT * length**2, model_bytes=matrices * FLOAT * length**2)
        for length, claim in LECTURE
    ]


def crossings(config: ModelConfig) -> list[Crossing]:
    """Return the lengths at which an encoder layer's attention equals its feed-forward layer.

    Operations of T tokens: matrices 4 T^2 A, projections 8 T M A, feed-forward 4 T M F (6 with a gate). What autograd
    keeps of them in float32: matrices 4 H T^2 and masks T^2, projections 16 A T, feed-forward 4 F T.
    """
    width, heads, inner = config.d_model, config.attention_width, config.d_ff * (1.5 if config.gated else 1)
    saved = config.d_ff * (4 if config.gated else 1 if config.activation == "relu" else 2)
    factor = "1.5 " if config.gated else ""
    matrix = config.num_heads + 0.25
    values = (
        ("operations, matrices alone", f"{factor}M F / A", width * inner / heads),
        ("operations, with projections", f"{factor}M F / A - 2 M", width * inner / heads - 2 * width),
        ("kept activations, matrices alone", f"{saved // config.d_ff} F / (H + 1/4)", saved / matrix),
        (
            "kept activations, with projections",
            f"({saved // config.d_ff} F - 4 A) / (H + 1/4)",
            (saved - 4 * heads) / matrix,
        ),
    )
    return [Crossing(name=name, formula=formula, length=max(0.0, length)) for name, formula, length in values]


def with_length(case: Case, length: int) -> Case:
    """Return the case with T = length; the tables of positions grow if they are too short."""
    config = case.config
    lengths = {name: max(length, getattr(config, name)) for name in ("max_source_len", "max_target_len")}
    return replace(case, config=config.model_copy(update=lengths), length=length)


def longest(case: Case, predict: Callable[[Case], Prediction], memory_bytes: int) -> int:
    """Return the longest T whose predicted peak fits in memory_bytes; 0 if not even one token fits."""
    fits, exceeds = 0, _LONGEST
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if predict(with_length(case, middle)).peak_bytes <= memory_bytes:
            fits = middle
        else:
            exceeds = middle
    return fits
