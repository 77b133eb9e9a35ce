"""Views of attention: maps with the pattern of each head, and representations of positions.

A pattern is the place to which most queries attend most, as studies of trained models found it in many heads (Clark et
al. 2019, Voita et al. 2019).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from antiphon.play.messages import ExplainBody, Json, PositionsBody
from antiphon.play.model_server import ModelServer
from antiphon.v1 import inference_pb2

Pattern = Literal["diagonal", "previous", "next", "first", "separator", "uniform", "mixed"]

SEPARATORS = frozenset({"</s>", "<s>", "[SEP]", "[CLS]", "<|endoftext|>", "<eos>", "<pad>", ".", ","})
"""Special tokens and punctuation on which heads rest that have nothing to look for."""

_MAJORITY = 0.5
_NEARLY_UNIFORM = 0.9  # of the largest possible entropy


async def explain(server: ModelServer, body: ExplainBody) -> Json:
    """Return every map: layer, head, entropy in nats, pattern, and its weights. Raises ServerError.

    Weights are base64 of rows * columns float32, little-endian, row by row.
    """
    maps = await server.client(body).explain(body.text, body.target, pair=body.pair)
    sources, targets = list(maps.source_tokens), list(maps.target_tokens)
    return {
        "source_tokens": sources,
        "target_tokens": targets,
        "encoder_self": _maps(maps.encoder_self, sources),
        "decoder_self": _maps(maps.decoder_self, targets),
        "cross": _maps(maps.cross, sources),
    }


def _maps(maps: Sequence[inference_pb2.AttentionMap], keys: Sequence[str]) -> list[Json]:
    return [_map(attention, keys) for attention in maps]


def _map(attention: inference_pb2.AttentionMap, keys: Sequence[str]) -> Json:
    weights = np.asarray(attention.weights, np.float32).reshape(attention.rows, attention.columns)
    return {
        "layer": attention.layer,
        "head": attention.head,
        "rows": attention.rows,
        "columns": attention.columns,
        "entropy": attention.entropy,
        "pattern": pattern_of(weights, keys),
        "weights": _packed(weights),
    }


async def positions(server: ModelServer, body: PositionsBody) -> Json:
    """Return the table and the decay by distance of each part of a model. Raises ServerError.

    Tables are base64 of rows * columns float32, little-endian, row by row.
    """
    encodings = await server.client_of(body.model).get_positions(num_positions=body.num_positions)
    return {"encodings": [_encoding(encoding) for encoding in encodings]}


def _encoding(encoding: inference_pb2.PositionEncoding) -> Json:
    part, kind = inference_pb2.Architecture.Name(encoding.part), inference_pb2.PositionKind.Name(encoding.kind)
    return {
        "part": part.removeprefix("ARCHITECTURE_").lower(),
        "kind": kind.removeprefix("POSITION_KIND_").lower(),
        "rows": encoding.rows,
        "columns": encoding.columns,
        "values": _packed(np.asarray(encoding.values, np.float32)),
        "decay": list(encoding.decay),
    }


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def pattern_of(weights: NDArray[np.float32], keys: Sequence[str]) -> Pattern:
    """Return the pattern of the most attended key of at least half of the queries.

    weights: [T, S] float32; rows sum to 1. keys: the S pieces.

    diagonal: each query attends to the key of its own place, in proportion where T and S differ.
    previous, next: to the place before it, or after it. first: to the first key. separator: to special tokens and
    punctuation. uniform: to all keys alike. mixed: none of them.
    """
    queries, num_keys = weights.shape
    if num_keys < 2 or queries < 2:
        return "mixed"
    if _relative_entropy(weights) >= _NEARLY_UNIFORM:
        return "uniform"
    own = np.arange(queries) if queries == num_keys else _in_proportion(queries, num_keys)
    attended = weights.argmax(axis=1)
    is_separator = np.array([piece.strip() in SEPARATORS for piece in keys])
    matches: dict[Pattern, NDArray[np.bool_]] = {
        "diagonal": attended == own,
        "previous": attended == own - 1,
        "next": attended == own + 1,
        "first": attended == 0,
        "separator": is_separator[attended],
    }
    best = max(matches, key=lambda name: matches[name].sum())
    return best if matches[best].mean() >= _MAJORITY else "mixed"


def _in_proportion(queries: int, num_keys: int) -> NDArray[np.int64]:
    return np.round(np.arange(queries) * (num_keys - 1) / (queries - 1)).astype(np.int64)


def _relative_entropy(weights: NDArray[np.float32]) -> float:
    """Return the mean entropy of the queries, as a share of that of equal weights over the keys they see."""
    positive = np.where(weights > 0, weights, 1.0)
    entropy = -(weights * np.log(positive)).sum(axis=1)
    largest = np.log(np.maximum((weights > 0).sum(axis=1), 2))
    return float((entropy / largest)[1:].mean())
