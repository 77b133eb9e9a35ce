"""Who asks: the name by which those who wait share a server."""

from __future__ import annotations

from typing import Any

import grpc.aio


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The host a call comes from, without the port: one client's connections are one caller."""
    return context.peer().rpartition(":")[0]
