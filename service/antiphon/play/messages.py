"""Bodies of the page's requests, their conversion to options of the client, and the JSON of errors."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import grpc
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from antiphon.client import Options, ServerError
from antiphon.controls.table import CONTROLS

_CONTROLS = frozenset(control.name for control in CONTROLS)
_B = TypeVar("_B", bound=BaseModel)
# HTTP statuses of gRPC's statuses, as in google.rpc.Code; others are 502, because the fault is behind this server.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

Json = dict[str, Any]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class BadBody(Exception):
    """A request of the page with a wrong field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ModelBody(BaseModel):
    """Fields of every request to a model. An empty language takes the model's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    """Name of the model; empty is the server's first."""
    text: str
    source_language: str = ""
    target_language: str = ""


class GenerateBody(ModelBody):
    """Request for targets."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Sampling controls by name, as in docs/CONTROLS.md.

    A seed may be a string, because numbers of JavaScript are exact only up to 2**53.
    """
    report_beam_steps: bool = False
    """Report every step of a beam search."""


class NextTokenBody(ModelBody):
    """Request for the distribution of the next token, after generated_ids."""

    options: dict[str, Any] = Field(default_factory=dict)
    generated_ids: list[TokenId] = Field(default_factory=list)
    num_tokens: int = Field(default=20, ge=1, le=1000)


class ExplainBody(ModelBody):
    """Request for attention maps."""

    target: str | None = None
    """None is the model's own answer."""
    pair: str | None = None
    """Second text of an encoder-only model."""


class PositionsBody(BaseModel):
    """Request for the representation of positions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    num_positions: int = Field(default=64, ge=1, le=512)


class ClassifyBody(ModelBody):
    """Request for labels."""

    pair: str | None = None
    """Second text."""
    next_sentence: bool = False
    """Predict whether the second text follows the first."""


class FillMaskBody(ModelBody):
    """Request for tokens of masked places."""

    top_k: int = Field(default=8, ge=1, le=100)


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Return the body of a request. Raises BadBody naming the wrong field."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadBody(field or "body", first["msg"]) from None


def options_of(controls: dict[str, Any], **fixed: Any) -> Options:
    """Return client options. fixed: values that replace those of the request. Raises BadBody for an unknown control."""
    unknown = sorted(controls.keys() - _CONTROLS)
    if unknown:
        raise BadBody(f"options.{unknown[0]}", "there is no such control; docs/CONTROLS.md lists them")
    values = {**controls, **fixed}
    if isinstance(seed := values.get("seed"), str):
        if not seed.isdecimal():
            raise BadBody("options.seed", f"{seed!r} is not a whole number")
        values["seed"] = int(seed)
    return Options(**values)


def problem(error: Exception) -> dict[str, Any]:
    """Return the JSON of an error: gRPC status, message, the wrong field, and seconds until a retry makes sense."""
    if isinstance(error, ServerError):
        return {
            "code": error.code.name,
            "message": error.message,
            "reason": error.reason,
            "field": error.field,
            "retry_after_s": error.retry_after_s,
            "request_id": error.request_id,
        }
    field = error.field if isinstance(error, BadBody) else None
    return {"code": "INVALID_ARGUMENT", "message": str(error), "reason": None, "field": field, "retry_after_s": None}


async def answer_problem(request: Request, error: Exception) -> JSONResponse:
    """Return the answer to a request that failed with ServerError, BadBody or ValueError."""
    report = problem(error)
    status = _STATUSES.get(error.code, 502) if isinstance(error, ServerError) else 400
    seconds = report["retry_after_s"]
    headers = None if seconds is None else {"retry-after": str(max(1, round(seconds)))}
    return JSONResponse({"error": report}, status, headers)
