"""Attention maps with the pattern of each head, and representations of positions."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.play.bodies import ExplainBody, PositionsBody
from antiphon.play.head_patterns import pattern_of
from antiphon.play.model_server import ModelServer
from antiphon.play.serve_json import Json
from antiphon.v1 import inference_pb2


async def explain(server: ModelServer, body: ExplainBody) -> Json:
    """Return every map: layer, head, entropy in nats, pattern, and its weights. Raises ServerError.

    Weights are base64 of rows * columns float32, little-endian, row by row.
    """
    found = await server.client(body).explain(body.text, body.target, pair=body.pair)
    sources, targets = list(found.source_tokens), list(found.target_tokens)
    return {
        "source_tokens": sources,
        "target_tokens": targets,
        "encoder_self": _maps(found.encoder_self, sources),
        "decoder_self": _maps(found.decoder_self, targets),
        "cross": _maps(found.cross, sources),
    }


def _maps(maps: Sequence[inference_pb2.AttentionMap], keys: Sequence[str]) -> list[Json]:
    return [_map(one, keys) for one in maps]


def _map(one: inference_pb2.AttentionMap, keys: Sequence[str]) -> Json:
    weights = np.asarray(one.weights, np.float32).reshape(one.rows, one.columns)
    return {
        "layer": one.layer,
        "head": one.head,
        "rows": one.rows,
        "columns": one.columns,
        "entropy": one.entropy,
        "pattern": pattern_of(weights, keys),
        "weights": _packed(weights),
    }


async def positions(server: ModelServer, body: PositionsBody) -> Json:
    """Return the table and the decay by distance of each part of a model. Raises ServerError.

    Tables are base64 of rows * columns float32, little-endian, row by row.
    """
    found = await server.client_of(body.model).get_positions(num_positions=body.num_positions)
    return {"encodings": [_encoding(one) for one in found]}


def _encoding(one: inference_pb2.PositionEncoding) -> Json:
    part, kind = inference_pb2.Architecture.Name(one.part), inference_pb2.PositionKind.Name(one.kind)
    return {
        "part": part.removeprefix("ARCHITECTURE_").lower(),
        "kind": kind.removeprefix("POSITION_KIND_").lower(),
        "rows": one.rows,
        "columns": one.columns,
        "values": _packed(np.asarray(one.values, np.float32)),
        "decay": list(one.decay),
    }


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
