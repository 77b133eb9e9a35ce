"""Terms of every call of a client: deadline, priority, and the metadata that identifies the caller."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

from google.protobuf.message import Message

from antiphon.client.connection import MAX_FILE_BYTES, Connection
from antiphon.client.files import read_regular
from antiphon.v1 import inference_pb2

DEFAULT_TARGET = "127.0.0.1:50051"
SERVICE_NAME = "antiphon.v1.InferenceService"

Priority = Literal["interactive", "batch"]
"""Priority of a request: "interactive" if a person waits for the answer, else "batch"."""

_PRIORITIES: dict[Priority, inference_pb2.Priority.ValueType] = {
    "interactive": inference_pb2.PRIORITY_INTERACTIVE,
    "batch": inference_pb2.PRIORITY_BATCH,
}

M = TypeVar("M", bound=Message)


class CallOptions(TypedDict):
    """Keyword arguments of a stub's call."""

    timeout: float | None
    metadata: tuple[tuple[str, str], ...]


class Terms:
    """Terms of the calls of one client."""

    def __init__(
        self, connection: Connection, *, timeout_s: float | None = None, priority: Priority | None = None
    ) -> None:
        """timeout_s: default deadline of a call; None is no deadline. Raises ValueError."""
        if priority is not None and priority not in _PRIORITIES:
            raise ValueError(f"priority is {priority!r}; it must be one of {', '.join(_PRIORITIES)}")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0")
        self.retry = connection.retry
        self._timeout_s = timeout_s
        self._priority = priority
        self._metadata = tuple(connection.metadata.items())
        self._token = _TokenFile(connection.token_file) if connection.token_file is not None else connection.token

    @property
    def timeout_s(self) -> float | None:
        """Default time limit of a request; None is none."""
        return None if self._timeout_s == math.inf else self._timeout_s

    def ask(self, request: M) -> M:
        """Set the priority of the request, if there is one, and return the request."""
        if self._priority is not None:
            request.priority = _PRIORITIES[self._priority]  # type: ignore[attr-defined]
        return request

    def call(self, timeout_s: float | None = None) -> CallOptions:
        """Return the options of a call. timeout_s: None is the client's default, infinity no deadline.

        Raises ValueError.
        """
        chosen = self._timeout_s if timeout_s is None else timeout_s
        metadata = self._metadata
        if self._token is not None:
            token = self._token if isinstance(self._token, str) else self._token()
            metadata += (("authorization", f"Bearer {token}"),)
        return {"timeout": None if chosen == math.inf else chosen, "metadata": metadata}


class _TokenFile:
    """Current token in a file. Orchestrators renew the file in place."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._state: tuple[int, int, int] | None = None
        self._token = ""
        self()

    def __call__(self) -> str:
        try:
            found = self._path.stat()
            state = (found.st_mtime_ns, found.st_ino, found.st_size)
            if state != self._state:
                self._token = read_regular(self._path, MAX_FILE_BYTES).decode("ascii").strip()
                self._state = state
        except OSError as error:
            raise ValueError(f"token_file is {self._path}, which cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"token_file is {self._path}, which must contain ASCII characters only") from None
        if not self._token:
            raise ValueError(f"token_file is {self._path}, which is empty")
        return self._token
