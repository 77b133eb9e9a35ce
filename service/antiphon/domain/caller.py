"""Name of a caller, by which waiting requests share a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import grpc.aio

# Properties of a client's certificate in gRPC's auth context; each is a list.
_ALTERNATIVE, _COMMON = "x509_subject_alternative_name", "x509_common_name"

_named: ContextVar[str | None] = ContextVar("antiphon_caller", default=None)
enter_caller = _named.set
"""Set the caller's name, found by `gate.py`, for the current RPC, which runs in a separate context."""


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the caller's name from its token or a trusted proxy, else from its client certificate, else its host.

    The host has no port, so that all connections of one client are one caller.
    """
    name = _named.get() or _certified(cast("Mapping[str, Sequence[bytes]]", context.auth_context()))
    return name or context.peer().rpartition(":")[0]


def _certified(about: Mapping[str, Sequence[bytes]]) -> str | None:
    """Return the name in a client's certificate: a URI (SPIFFE), else the common name, else any other name."""
    if _ALTERNATIVE not in about and _COMMON not in about:  # true of every call without a certificate
        return None
    names = [name.decode("utf-8", "replace") for name in about.get(_ALTERNATIVE, ())]
    common = [name.decode("utf-8", "replace") for name in about.get(_COMMON, ())]
    uris = [name for name in names if "://" in name]
    return next((name for name in (*uris, *common, *names) if name), None)
