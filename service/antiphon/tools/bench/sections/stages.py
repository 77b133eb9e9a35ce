"""Section `stages`: microseconds of the event loop for each request, by stage, beside a bare echo of a unary call.

The server runs in the benchmark's own process, so that its functions can be measured; the client has another one.
Measuring takes some 5 us a request.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from antiphon.client import Source
from antiphon.observability.logging import configure_logging
from antiphon.rpc.reloading import FileMetrics
from antiphon.server.access import Access
from antiphon.server.app import App, observing, shared_resources
from antiphon.server.lifecycle import Stop
from antiphon.server.ports import address_of, listening
from antiphon.server.settings import ServerConfig
from antiphon.tools.bench.processes.server import EchoServer, run_client
from antiphon.tools.bench.report import Case, Finding
from antiphon.tools.bench.sections.served import STREAMS, WAYS, Way, work_of
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.stage_times import StageTimes

_REST = "grpc.aio, tasks, answers of the engine"


def stages(setup: Setup) -> list[Finding]:
    """Measure each way of the section grpc_overhead."""
    subject = setup.bundle_subject
    with EchoServer() as echo, Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        configure_logging("info", "text", nowhere)  # access lines are made, as in production
        _, asked = work_of(subject, setup)
        before_s = echo.loop_cpu_s
        run_client(echo.target, asked, kind="unary", concurrency=STREAMS, max_new_tokens=subject.max_new_tokens)
        echo_us = (echo.loop_cpu_s - before_s) / len(asked) * 1e6
        measured = uvloop.run(_measured(subject, setup, asked))
    return [
        _finding(way, name, seconds / len(asked) * 1e6, echo_us if name == "all" else None)
        for way, times in measured
        for name, seconds in times.items()
    ]


async def _measured(subject: Subject, setup: Setup, asked: Sequence[Source]) -> list[tuple[Way, dict[str, float]]]:
    """Serve in this event loop. Return the CPU seconds of each stage, and of all of them, for each way."""
    config = ServerConfig(bundle=subject.bundle.path, port=0, max_num_seqs=STREAMS, threads=setup.threads)
    shared = shared_resources(config, CollectorRegistry())
    access = Access(config, FileMetrics(shared.families))
    async with observing(config, shared.families) as telemetry:
        app = await App.build(config, access, shared, telemetry)
        async with listening(app.server, config.host, config.port, None) as port:
            await app.load(Stop())
            await app.probes.ready()
            target = address_of(config.host, port)
            ask = partial(run_client, target, asked, max_new_tokens=subject.max_new_tokens)
            found = []
            for way in WAYS:
                await asyncio.to_thread(ask, kind=way.kind, concurrency=way.concurrency)
                found.append((way, await _of_way(partial(ask, kind=way.kind, concurrency=way.concurrency))))
            await app.control.drain(0.0)
    return found


async def _of_way(ask: Callable[[], object]) -> dict[str, float]:
    times = StageTimes()
    with times.measuring():
        before_s = time.thread_time()
        await asyncio.to_thread(ask)
        total_s = time.thread_time() - before_s
    return {**times.seconds, _REST: total_s - sum(times.seconds.values()), "all": total_s}


def _finding(way: Way, name: str, us: float, echo_us: float | None) -> Finding:
    case = Case(name="stages", case=f"{way.name}, {name}", rows=STREAMS, against="a bare echo of a unary call")
    if echo_us is not None:
        return case.finding([(us, echo_us)], "us of CPU a request")
    return Finding(name="stages", case=case.case, rows=STREAMS, antiphon=round(us, 1), unit="us of CPU a request")
