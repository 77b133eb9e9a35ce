"""Distribution of the next token, before and after each control."""

from __future__ import annotations

import math

from antiphon.play.bodies import NextTokenBody, options_of
from antiphon.play.model_server import ModelServer
from antiphon.play.serve_json import Json


async def next_token(server: ModelServer, body: NextTokenBody) -> Json:
    """Return tokens, and their log-probability after each stage; null for dropped ones. Raises ServerError, BadBody."""
    found = await server.client(body).next_token(
        body.text, options_of(body.options), generated_ids=body.generated_ids, num_tokens=body.num_tokens
    )
    tokens = [{"id": one, "piece": piece} for one, piece in zip(found.token_ids, found.pieces, strict=True)]
    stages = [
        {
            "name": stage.name,
            "logprobs": [value if math.isfinite(value) else None for value in stage.logprobs],
            "num_kept": stage.num_kept,
            "entropy": stage.entropy,
        }
        for stage in found.stages
    ]
    return {"tokens": tokens, "stages": stages}
