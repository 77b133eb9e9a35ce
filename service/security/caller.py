"""Who asks: the name by which those who wait share a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import grpc.aio

_named: ContextVar[str | None] = ContextVar("antiphon_caller", default=None)
enter_caller = _named.set
"""Name the caller of the RPC under way, which runs in a context of its own: what `gate.py` found out."""


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller by token or by a trusted proxy's word, else by client certificate, else by host.

    The host is without the port: one client's connections are one caller.
    """
    name = _named.get() or _certified(cast("Mapping[str, Sequence[bytes]]", context.auth_context()))
    return name or context.peer().rpartition(":")[0]


def _certified(about: Mapping[str, Sequence[bytes]]) -> str | None:
    """The name in a client's certificate: a URI (SPIFFE), else the common name, else any other name of it."""
    names = [name.decode("utf-8", "replace") for name in about.get("x509_subject_alternative_name", ())]
    common = [name.decode("utf-8", "replace") for name in about.get("x509_common_name", ())]
    uris = [name for name in names if "://" in name]
    return next((name for name in (*uris, *common, *names) if name), None)
