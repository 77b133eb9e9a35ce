"""The web application: the files of the page, and the routes that its scripts call.

Endpoints read a JSON body and answer with JSON, once or line by line. Work ends when the page goes away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from antiphon.client import ServerError
from antiphon.play.attention import explain, positions
from antiphon.play.guard import OwnOriginOnly
from antiphon.play.memory import memory
from antiphon.play.messages import (
    BadBody,
    ClassifyBody,
    ExplainBody,
    FillMaskBody,
    GenerateBody,
    Json,
    ModelBody,
    NextTokenBody,
    PositionsBody,
    answer_problem,
    problem,
    read_body,
)
from antiphon.play.model_server import ModelServer
from antiphon.play.views import classify, fill_mask, generate, models, next_token, tag

STATIC = Path(__file__).parent / "static"

_B = TypeVar("_B", bound=BaseModel)
_T = TypeVar("_T")


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
            post("/api/tag", ModelBody, tag),
            post("/api/fill-mask", FillMaskBody, fill_mask),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ],
        middleware=[Middleware(OwnOriginOnly, hosts=tuple(hosts))],
        exception_handlers={ServerError: answer_problem, BadBody: answer_problem, ValueError: answer_problem},
        lifespan=lifespan,
    )
    app.state.server = server
    return app


def post(path: str, kind: type[_B], work: Callable[[ModelServer, _B], Awaitable[Json]]) -> Route:
    """Return the route of requests that get one JSON object. kind: of their body."""

    async def endpoint(request: Request) -> Response:
        body = await read_body(request, kind)
        answer = await _until_disconnected(request, work(request.app.state.server, body))
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    return Route(path, endpoint, methods=["POST"])


def get(path: str, work: Callable[[ModelServer], Awaitable[Json]]) -> Route:
    """Return the route of requests without a body that get one JSON object."""

    async def endpoint(request: Request) -> Response:
        return JSONResponse(await work(request.app.state.server))

    return Route(path, endpoint, methods=["GET"])


def post_lines(path: str, kind: type[_B], work: Callable[[ModelServer, _B], AsyncIterator[Json]]) -> Route:
    """Return the route of requests that get a JSON object a line, as they become ready. An error is the last line."""

    async def endpoint(request: Request) -> Response:
        body = await read_body(request, kind)
        lines = _lines(work(request.app.state.server, body))
        # Of proxies in front of a forwarded port, some would wait for the end of the answer.
        return StreamingResponse(lines, media_type="application/x-ndjson", headers={"x-accel-buffering": "no"})

    return Route(path, endpoint, methods=["POST"])


async def _lines(events: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield _line(event)
    except (ServerError, BadBody, ValueError) as error:
        yield _line({"type": "problem", "error": problem(error)})


def _line(event: Json) -> bytes:
    return json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n"


async def _until_disconnected(request: Request, work: Awaitable[_T]) -> _T | None:
    """Return the result of the work, which is cancelled when the page no longer waits for it; then None."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
