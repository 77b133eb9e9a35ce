"""Errors of the page's requests, and the JSON that reports them."""

from __future__ import annotations

from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse

from antiphon.client import ServerError

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


class BadBody(Exception):
    """A request of the page with a wrong field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


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
    found = problem(error)
    status = _STATUSES.get(error.code, 502) if isinstance(error, ServerError) else 400
    seconds = found["retry_after_s"]
    headers = None if seconds is None else {"retry-after": str(max(1, round(seconds)))}
    return JSONResponse({"error": found}, status, headers)
