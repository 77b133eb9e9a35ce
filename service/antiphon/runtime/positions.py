"""Positions of a model as numbers: the table of each part, and the effect of distance.

Sinusoids, rotary positions and ALiBi follow from the configuration. Learned tables come from the bundle.

Axes: P positions, W width of the embeddings, M model width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from antiphon.architecture.config import ModelConfig, Part
from antiphon.bundle.position_tables import Floats
from antiphon.domain.errors import Unsupported
from antiphon.ops.fixed_positions import alibi_slopes, rotary_rates, sinusoids

PositionKind = Literal["none", "sinusoidal", "learned", "relative", "rotary", "alibi", "disentangled"]


def _empty(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionEncoding:
    """Positions of one part. Distance is the position of the key minus that of the query.

    table, float32:
        sinusoidal, learned  [P, W]          vector of each position
        rotary               [P, D / 2]      cosine of each angle
        relative, alibi      [H, 2 P - 1]    bias of each distance from 1 - P to P - 1
        disentangled         [2 P - 1, M]    vector of each of these distances
        none                 [0, 0]
    decay: [P] float32, effect of the distances 0 to 1 - P: the mean cosine of the vectors of two positions at this
        distance, the mean cosine of the angles, the mean bias of the heads, or the cosine of the vector of this
        distance and that of distance 0. [0] for none.
    """

    part: Part
    kind: PositionKind
    table: Floats = field(default_factory=lambda: _empty(0, 0))
    decay: Floats = field(default_factory=lambda: _empty(0))


def longest_described(config: ModelConfig) -> int:
    """Return the number of positions that every part of the model has."""
    lens = {"encoder": config.max_source_len, "decoder": config.max_target_len}
    return min(lens[part] for part in config.parts)


def position_encodings(config: ModelConfig, num_positions: int, tables: Mapping[str, Floats]) -> list[PositionEncoding]:
    """Return the positions of each part, the encoder first; a part with two kinds of positions has two entries.

    num_positions: P, at most `longest_described`. tables: those of bundle/position_tables.py, empty if the bundle has
    none. Raises Unsupported if one of them is needed and missing.
    """
    found = []
    for part in config.parts:
        if config.disentangled is None or config.positions != "none":
            found.append(_encoding(config, part, num_positions, tables))
        if config.disentangled is not None:
            found.append(_disentangled(part, num_positions, tables))
    return found


def _encoding(config: ModelConfig, part: Part, num_positions: int, tables: Mapping[str, Floats]) -> PositionEncoding:
    match config.positions:
        case "none":
            return PositionEncoding(part=part, kind="none")
        case "sinusoidal":
            width, offset = config.resolved_embedding_width, config.positions_offset
            vectors = sinusoids(offset + num_positions, width, config.sinusoids)[offset:]
            return PositionEncoding(part=part, kind="sinusoidal", table=vectors, decay=_mean_cosines(vectors))
        case "learned":
            vectors = _stored(tables, f"{part}_positions")[:num_positions]
            return PositionEncoding(part=part, kind="learned", table=vectors, decay=_mean_cosines(vectors))
        case "rope":
            rates = rotary_rates(config.resolved_head_dim, config.rope_theta, config.rope_scaling)
            cosines = np.cos(np.arange(num_positions, dtype=np.float32)[:, None] * rates)
            return PositionEncoding(part=part, kind="rotary", table=cosines, decay=cosines.mean(axis=1))
        case "alibi":
            biases = -np.abs(_distances(num_positions)) * alibi_slopes(config.num_heads)[:, None]
            return _biases(part, "alibi", biases.astype(np.float32))
        case "t5_relative":
            return _biases(part, "relative", _nearest(_stored(tables, f"{part}_biases"), num_positions, axis=1))


def _disentangled(part: Part, num_positions: int, tables: Mapping[str, Floats]) -> PositionEncoding:
    vectors = _nearest(_stored(tables, f"{part}_distances"), num_positions, axis=0)
    cosines = _unit(vectors[num_positions - 1 :: -1]) @ _unit(vectors[num_positions - 1])
    return PositionEncoding(part=part, kind="disentangled", table=vectors, decay=cosines)


def _biases(part: Part, kind: PositionKind, biases: Floats) -> PositionEncoding:
    middle = biases.shape[1] // 2
    return PositionEncoding(part=part, kind=kind, table=biases, decay=biases[:, middle::-1].mean(axis=0))


def _stored(tables: Mapping[str, Floats], name: str) -> Floats:
    if name not in tables:
        raise Unsupported(
            f"the bundle of this model has no table {name}, which holds learned positions; export or import it again"
        )
    return tables[name]


def _distances(num_positions: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(1 - num_positions, num_positions)


def _nearest(by_distance: Floats, num_positions: int, *, axis: int) -> Floats:
    """Return the entries of the distances 1 - P to P - 1 of a table from -R to R; farther distances are as R."""
    reach = by_distance.shape[axis] // 2
    nearest: Floats = by_distance.take(reach + _distances(num_positions).clip(-reach, reach), axis=axis)
    return nearest


def _mean_cosines(vectors: Floats) -> Floats:
    """Return the mean cosine of two vectors [P, W] that are 0 to P - 1 rows apart, [P]."""
    unit = _unit(vectors)
    cosines = unit @ unit.T
    return np.array([cosines.diagonal(distance).mean() for distance in range(len(vectors))], np.float32)


def _unit(vectors: Floats) -> Floats:
    """Divide vectors [..., W] by their lengths; zero vectors stay zero."""
    lengths = np.sqrt((vectors**2).sum(axis=-1, keepdims=True))
    unit: Floats = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit
