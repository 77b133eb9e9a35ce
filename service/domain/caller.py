"""Who asks: the name by which those who wait share a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import grpc.aio

# What gRPC tells of a client's certificate: under these keys, a list of each.
_ALTERNATIVE, _COMMON = "x509_subject_alternative_name", "x509_common_name"

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
    if _ALTERNATIVE not in about and _COMMON not in about:  # as of every call without a certificate
        return None
    names = [name.decode("utf-8", "replace") for name in about.get(_ALTERNATIVE, ())]
    common = [name.decode("utf-8", "replace") for name in about.get(_COMMON, ())]
    uris = [name for name in names if "://" in name]
    return next((name for name in (*uris, *common, *names) if name), None)
