"""Servers that a benchmark runs as child processes, besides a plain `antiphon serve`.

    python -m antiphon.tools.bench.child_servers echo
    python -m antiphon.tools.bench.child_servers stages BUNDLE [FLAG ...]
    python -m antiphon.tools.bench.child_servers waiting BUNDLE [FLAG ...]

`echo` is a bare grpc.aio server that answers every call at once with the same message: what a call costs without any
work. It prints `echo: ready on HOST:PORT`. `stages` is `antiphon serve` with these arguments. For every byte on
standard input it prints {"stages": {name: seconds}, "all": seconds}: CPU time of the event loop since its start, for
each stage of `STAGES`, and for all of its work. From the first byte on, its access lines are made but not shown.
`waiting` is `antiphon serve` with a device that only waits (waiting_device.py), and reports what that has measured,
with CPU seconds of the event loop and of the process. All end with their parent's SIGTERM.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NoReturn
from unittest import mock

import grpc
import grpc.aio
import uvloop

from antiphon.observability.telemetry import Telemetry
from antiphon.text.tokenizer import IncrementalDecoder, Tokenizer
from antiphon.v1 import inference_pb2 as pb

HANDLERS = "handlers: limits, requests, queue, messages"
"""Stage of everything in the handlers of RPCs that no other stage counts."""

STAGES: dict[str, tuple[type, tuple[Callable[..., Any], ...]]] = {
    "tokenising": (Tokenizer, (Tokenizer.encode, Tokenizer.encode_source, Tokenizer.encode_target)),
    "detokenising": (IncrementalDecoder, (IncrementalDecoder.push, IncrementalDecoder.finish)),
    "record, log and metrics": (Telemetry, (Telemetry.begin, Telemetry.begin_request, Telemetry.end)),
}
"""Name of each stage within handlers, and its methods, which are public and not compiled."""

_STDIN, _STDERR = 0, 2
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_ANSWER = pb.GenerateUnaryResponse(
    outputs=[pb.Output(text="Wie geht es dir?", token_ids=range(8), finish_reason=pb.FINISH_REASON_STOP)]
)
_DELTA = pb.GenerateResponse(
    text_delta="Wie geht es dir?", token_ids=range(8), finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage()
)


def main() -> int:
    """Run the server that the first argument names, or a worker of one that waits."""
    kind, *arguments = sys.argv[1:]
    if kind.isdigit():
        _run_waiting_worker()
    if kind == "echo":
        uvloop.run(_echo())
        return 0
    from antiphon.cli.main import main as antiphon

    with _reporting(kind):
        return antiphon(["serve", *arguments])


@contextmanager
def _reporting(kind: str) -> Iterator[None]:
    """Measure in this context, and print the figures when they are asked for."""
    times = StageTimes()
    with ExitStack() as stack:
        if kind == "stages":
            stack.enter_context(times.measuring())
            report = times.report
        else:
            from antiphon.server.workers import supervisor
            from antiphon.tools.bench.waiting_device import in_place_of_a_card

            stack.enter_context(mock.patch.object(supervisor, "_MODULE", __spec__.name))
            device = stack.enter_context(in_place_of_a_card())

            def report() -> dict[str, Any]:
                return {"device": asdict(device.times), "loop_s": times.thread_s(), "process_s": time.process_time()}

        threading.Thread(target=_report, args=(report,), daemon=True).start()
        yield


def _run_waiting_worker() -> NoReturn:
    from antiphon.server.workers import worker
    from antiphon.tools.bench.waiting_device import in_place_of_a_card

    with in_place_of_a_card():
        worker.main()


def _report(report: Callable[[], dict[str, Any]]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Not sys.stdin: a thread that waits in its buffer would stop the end of the interpreter.
    while os.read(_STDIN, 1):
        os.dup2(nowhere, _STDERR)
        print(json.dumps(report()), flush=True)


class StageTimes:
    """CPU seconds of each stage in the main thread, which runs the event loop. Time of another stage is not counted."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*STAGES, HANDLERS), 0.0)
        self._thread = threading.get_ident()
        self._inner: list[int] = []  # nanoseconds of the stages within each open one

    def thread_s(self) -> float:
        """Return the CPU seconds of the main thread since its start."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))

    def report(self) -> dict[str, Any]:
        """Return the seconds of each stage, and of all work of the thread."""
        return {"stages": self.seconds, "all": self.thread_s()}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the methods of all stages, and the handlers of every gRPC server that is made in this context."""
        patches = [
            mock.patch.object(owner, method.__name__, self._measured(name, method))
            for name, (owner, methods) in STAGES.items()
            for method in methods
        ]
        patches.append(mock.patch.object(grpc.aio, "server", self._server_maker(grpc.aio.server)))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """Count the time of this context for a stage."""
        began_ns = time.thread_time_ns()
        self._inner.append(0)
        try:
            yield
        finally:
            spent_ns = time.thread_time_ns() - began_ns
            self.seconds[stage] += (spent_ns - self._inner.pop()) / 1e9
            if self._inner:
                self._inner[-1] += spent_ns

    def _measured(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            with self.within(stage):
                return method(*args, **kwargs)

        return measured

    def _measured_handler(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handle)
        async def measured(*args: Any) -> Any:
            return await _Steps(self, handle(*args))

        return measured

    def _server_maker(self, make: Callable[..., grpc.aio.Server]) -> Callable[..., grpc.aio.Server]:
        def measured(*args: Any, **kwargs: Any) -> grpc.aio.Server:
            server = make(*args, **kwargs)
            add = server.add_generic_rpc_handlers

            def add_measured(handlers: Iterable[grpc.GenericRpcHandler]) -> None:
                add(tuple(_MeasuredHandlers(handler, self._measured_handler) for handler in handlers))

            server.add_generic_rpc_handlers = add_measured  # type: ignore[method-assign, assignment]
            return server

        return measured


class _MeasuredHandlers(grpc.GenericRpcHandler):
    """Handlers of a service whose coroutines are measured."""

    def __init__(self, service: grpc.GenericRpcHandler, measure: Callable[[Any], Any]) -> None:
        self._service = service
        self._measure = measure
        self._measured: dict[Any, Any] = {}  # by handler: a service asks for it at every call

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call; None if the service has no such method."""
        handler: Any = self._service.service(handler_call_details)
        if handler is None:
            return None
        if handler not in self._measured:
            kinds = {kind: getattr(handler, kind) for kind in _KINDS}
            coroutines = {kind: run for kind, run in kinds.items() if inspect.iscoroutinefunction(run)}
            self._measured[handler] = handler._replace(**{kind: self._measure(run) for kind, run in coroutines.items()})
        return self._measured[handler]


class _Steps(Awaitable[Any]):
    """Awaits a coroutine of a handler and measures it, except while it is suspended."""

    def __init__(self, times: StageTimes, coroutine: Any) -> None:
        self._times = times
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        sent: Any = None
        while True:
            try:
                with self._times.within(HANDLERS):
                    awaited = self._coroutine.send(sent)
            except StopIteration as end:
                return end.value
            sent = yield awaited


async def _echo() -> None:
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GenerateUnary": grpc.unary_unary_rpc_method_handler(
            _unary, pb.GenerateUnaryRequest.FromString, pb.GenerateUnaryResponse.SerializeToString
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            _stream, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            _model, pb.GetModelRequest.FromString, pb.GetModelResponse.SerializeToString
        ),
    }
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("antiphon.v1.InferenceService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"echo: ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _unary(request: pb.GenerateUnaryRequest, context: Any) -> pb.GenerateUnaryResponse:
    return _ANSWER


async def _stream(request: pb.GenerateRequest, context: Any) -> None:
    await context.write(_DELTA)


async def _model(request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
    return pb.GetModelResponse()


if __name__ == "__main__":
    sys.exit(main())
