"""Typed client of antiphon.v1.AdminService, for operators. Imports grpcio and protobuf only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from google.protobuf.duration_pb2 import Duration

from antiphon.client.connection import Connection, RetryPolicy
from antiphon.client.messages import server_errors
from antiphon.client.options import CallOptions
from antiphon.v1 import admin_pb2, admin_pb2_grpc, inference_pb2

DEFAULT_ADMIN_TARGET = "127.0.0.1:50052"

_SERVICE_NAME = "antiphon.v1.AdminService"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Engine limits of one model; None takes the server's setting.

    max_num_seqs: maximum number of rows that run together. kv_cache_blocks: blocks of its cache. threads: maximum cores
    of one step. max_queued_requests: maximum number of waiting requests.
    """

    max_num_seqs: int | None = None
    kv_cache_blocks: int | None = None
    threads: int | None = None
    max_queued_requests: int | None = None


class AdminClient:
    """Loads and unloads models of a running server, and reads their memory and caches.

    Close it, or use it as a context manager.
    """

    def __init__(self, target: str = DEFAULT_ADMIN_TARGET, *, connection: Connection | None = None) -> None:
        """Open the connection. target: host:port of the admin service of a server with --admin-port.

        connection: as for Client. Its retries are ignored, because a second load has another result than the first.
        """
        connection = replace(connection or Connection(), retry=RetryPolicy(attempts=1))
        self._call_options = CallOptions(connection)
        self._channel = connection.open(target, _SERVICE_NAME)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def load_model(
        self, name: str, path: str, limits: Limits | None = None, *, timeout_s: float | None = None
    ) -> inference_pb2.Model:
        """Serve a bundle of the server's disk under a name; return when it is ready. Raises ServerError.

        path: absolute. A timeout ends the wait, but not the loading.
        """
        limits = limits or Limits()
        request = admin_pb2.LoadModelRequest(
            name=name,
            path=path,
            limits=admin_pb2.ModelLimits(
                max_num_seqs=limits.max_num_seqs,
                kv_cache_blocks=limits.kv_cache_blocks,
                threads=limits.threads,
                max_queued_requests=limits.max_queued_requests,
            ),
        )
        with server_errors():
            return self._stub.LoadModel(request, **self._call_options.arguments(timeout_s)).model

    def unload_model(self, name: str, *, grace_s: float | None = None, timeout_s: float | None = None) -> bool:
        """Stop serving a model. Return whether every running request ended by itself. Raises ServerError.

        grace_s: time for running requests to end; None takes the server's setting.
        """
        grace = None
        if grace_s is not None:
            grace = Duration()
            grace.FromNanoseconds(round(grace_s * 1e9))
        request = admin_pb2.UnloadModelRequest(name=name, grace=grace)
        with server_errors():
            return self._stub.UnloadModel(request, **self._call_options.arguments(timeout_s)).has_drained

    def get_memory(self, *, timeout_s: float | None = None) -> admin_pb2.GetMemoryResponse:
        """Return the memory of each model, of the memory budget. Raises ServerError."""
        with server_errors():
            return self._stub.GetMemory(admin_pb2.GetMemoryRequest(), **self._call_options.arguments(timeout_s))

    def get_cache(self, model: str = "", *, timeout_s: float | None = None) -> admin_pb2.GetCacheResponse:
        """Return the cache blocks of a model, or of all, and the running requests that hold them. Raises ServerError.

        In a server of several processes, every process has a cache of its own.
        """
        with server_errors():
            return self._stub.GetCache(
                admin_pb2.GetCacheRequest(model=model), **self._call_options.arguments(timeout_s)
            )

    def close(self) -> None:
        """Cancel running calls and close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
