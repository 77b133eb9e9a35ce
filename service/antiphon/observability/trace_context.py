"""Trace of a call, according to W3C Trace Context. Needs no opentelemetry: logs and exemplars use it too.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_TRACE_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position of a call in a trace; ids are in lower-case hexadecimal.

    trace_id: 32 digits. parent_id: 16 digits of the client's span; None if the trace begins here.
    is_sampled: True if the trace is recorded.
    """

    trace_id: str
    parent_id: str | None
    is_sampled: bool


def read_trace_parent(text: str | bytes | None) -> TraceContext | None:
    """Return the content of a client's traceparent; None if it is absent or malformed."""
    match = _TRACE_PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[1] == "00" and match[5]):  # later versions may have more fields
        return None
    return TraceContext(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


class Sampler:
    """Begins traces for a share of the calls without a trace. ratio: from 0 to 1."""

    def __init__(self, ratio: float, randomness: random.Random | None = None) -> None:
        self._ratio = ratio
        self._random = randomness or random.Random()

    def begin(self) -> TraceContext | None:
        """Return a new trace, or None for a call that is not recorded."""
        if self._ratio < 1 and self._random.random() >= self._ratio:
            return None
        return TraceContext(f"{self._random.getrandbits(128) or 1:032x}", None, is_sampled=True)
