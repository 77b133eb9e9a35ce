"""Models of the server, for every view."""

from __future__ import annotations

from antiphon.play.model_server import ModelServer, described
from antiphon.play.serve_json import Json


async def models(server: ModelServer) -> Json:
    """Return the models, the default first, and the server's address. Raises ServerError."""
    return {"target": server.addresses.target, "models": [described(model) for model in await server.models()]}
