"""Results of encoder heads: labels, spans, and filled masks."""

from __future__ import annotations

from dataclasses import asdict

from antiphon.play.bodies import Asked, ClassifyBody, FillMaskBody
from antiphon.play.model_server import ModelServer
from antiphon.play.serve_json import Json


async def classify(server: ModelServer, body: ClassifyBody) -> Json:
    """Return labels with their probabilities, best first. Raises ServerError."""
    client = server.client_of(body.model)
    return asdict(await client.classify(body.text, pair=body.pair, next_sentence=body.next_sentence))


async def tag(server: ModelServer, body: Asked) -> Json:
    """Return tokens and spans with their labels, by code points of the text. Raises ServerError."""
    return asdict(await server.client_of(body.model).tag(body.text))


async def fill_mask(server: ModelServer, body: FillMaskBody) -> Json:
    """Return the most likely tokens of each masked place. Raises ServerError."""
    return asdict(await server.client_of(body.model).fill_mask(body.text, top_k=body.top_k))
