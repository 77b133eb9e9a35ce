"""The web application: the files of the page, and the routes that its scripts call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from antiphon.client import ServerError
from antiphon.play.bodies import (
    Asked,
    ClassifyBody,
    ExplainBody,
    FillMaskBody,
    GenerateBody,
    NextTokenBody,
    PositionsBody,
)
from antiphon.play.guard import OwnOriginOnly
from antiphon.play.model_server import ModelServer
from antiphon.play.problems import BadBody, answer_problem
from antiphon.play.routes.attention import explain, positions
from antiphon.play.routes.generate import generate
from antiphon.play.routes.memory import memory
from antiphon.play.routes.models import models
from antiphon.play.routes.next_token import next_token
from antiphon.play.routes.readings import classify, fill_mask, tag
from antiphon.play.serve_json import get, post, post_lines

STATIC = Path(__file__).parent / "static"


def build_app(server: ModelServer, hosts: Iterable[str]) -> Starlette:
    """Return the application over a model server. hosts: values of Host under which the page is reached."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with server:
            yield

    app = Starlette(
        routes=[
            get("/api/models", models),
            get("/api/memory", memory),
            post_lines("/api/generate", GenerateBody, generate),
            post("/api/next-token", NextTokenBody, next_token),
            post("/api/explain", ExplainBody, explain),
            post("/api/positions", PositionsBody, positions),
            post("/api/classify", ClassifyBody, classify),
            post("/api/tag", Asked, tag),
            post("/api/fill-mask", FillMaskBody, fill_mask),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ],
        middleware=[Middleware(OwnOriginOnly, hosts=tuple(hosts))],
        exception_handlers={ServerError: answer_problem, BadBody: answer_problem, ValueError: answer_problem},
        lifespan=lifespan,
    )
    app.state.server = server
    return app
