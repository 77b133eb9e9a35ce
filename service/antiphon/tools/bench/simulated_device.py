"""Section `simulated_device`: what lies between a fast device and its clients, on a machine without one.

The runner for GPUs and all that is above it run as they are, over a device that only waits (waiting_device.py). Server
and client have cores of their own, half of them each. The parts of a step that belong to the engine's thread add up to
all of it. With fronts, the process of the engine has the server's cores and the fronts share those of the client; a
step is then one token of every row. A launch and a wait give the lock of the interpreter away, and the thread runs
again once the event loop gives it back, or its core: this is part of a launch, and late after a wait.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.runtime.cuda.runner import CudaRunner
from antiphon.runtime.warm_up import warm_up
from antiphon.tools.bench.corpus import Ids
from antiphon.tools.bench.gpu.decoding import THIN
from antiphon.tools.bench.processes import WaitingServer, run_client
from antiphon.tools.bench.report import Finding
from antiphon.tools.bench.setup import Setup
from antiphon.tools.bench.static import translate_static
from antiphon.tools.bench.waiting_device import StepTimes, WaitingDevice, difference, in_place_of_a_card
from antiphon.tools.offline import Offline

ROWS = (128,)
SOURCE_LEN, TARGET_LEN = 350, 128
WAYS = {"many": "one GenerateMany call", "streams": "streams", "unary": "unary calls"}
_FILLS = 4
_SEED = 5

Run = tuple[float, dict[str, float]]
"""Tokens a second, and microseconds of a step by part."""


def simulated_device(setup: Setup) -> list[Finding]:
    """Measure tokens a second of the runner, the engine and each way of clients, and the parts of a step."""
    bundle = load_bundle(setup.cuda_folder(THIN) / "bundle")
    return [finding for rows in setup.rows or ROWS for finding in _of(bundle, rows, setup.repeat)]


def _of(bundle: Bundle, rows: int, repeat: int) -> list[Finding]:
    (ours, theirs), sources = divided_cores(), _sources(bundle, _FILLS * rows)
    runs: dict[str, list[Run]] = {}
    with in_place_of_a_card() as device, using(ours):
        runner = CudaRunner(bundle, device, max_rows=rows)
        warm_up(runner)
        static = partial(translate_static, runner, sources, rows=rows, max_new_tokens=TARGET_LEN, is_sorted=False)
        runs["runner, one batch after another"] = [_run_here(device, static) for _ in range(repeat)]
        with Offline(runner, rows=rows) as offline:
            engine = partial(offline.translate, sources, concurrency=len(sources), max_new_tokens=TARGET_LEN)
            runs["engine"] = [_run_here(device, engine) for _ in range(repeat)]
    with WaitingServer(bundle.path, rows=rows, cores=ours) as server:
        for kind, way in WAYS.items():
            _run_served(server, kind, sources, rows, theirs)  # not measured
            runs[f"{rows} rows, {way}"] = [_run_served(server, kind, sources, rows, theirs) for _ in range(repeat)]
    for fronts in fronts_of(theirs):
        with WaitingServer(bundle.path, rows=rows, cores=ours, fronts=fronts, front_cores=theirs) as server:
            for kind, way in WAYS.items():
                case = f"{rows} rows, {way}, {fronts} front{'s' if fronts > 1 else ''}"
                _run_fronts(server, kind, sources, rows, theirs)  # not measured
                runs[case] = [_run_fronts(server, kind, sources, rows, theirs) for _ in range(repeat)]
    best = statistics.median(speed for speed, _ in next(iter(runs.values())))
    return [finding for case, of_case in runs.items() for finding in _findings(case, rows, of_case, best)]


def _sources(bundle: Bundle, count: int) -> list[Ids]:
    model, dice = bundle.manifest.model, random.Random(_SEED)
    return [[*(dice.randrange(4, model.vocab_size) for _ in range(SOURCE_LEN - 1)), model.eos_id] for _ in range(count)]


def divided_cores() -> tuple[set[int], set[int]]:
    """Return the cores of the server and of its client: of two one each, of more a half each; one is for both."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half else (set(cores), set(cores))


def fronts_of(cores: set[int]) -> tuple[int, ...]:
    """Return the numbers of fronts to measure on the cores that they share with the client."""
    return tuple(count for count in (1, 2, 4) if count == 1 or 2 * count <= len(cores))


@contextmanager
def using(cores: set[int]) -> Iterator[None]:
    """Let this thread, and the threads that it starts, use some cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run_here(device: WaitingDevice, translate: Callable[[], Sequence[Sequence[int]]]) -> Run:
    before, started_s, cpu_s = replace(device.times), time.perf_counter(), time.process_time()
    num_tokens = sum(map(len, translate()))
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    times = difference(device.times, before)
    return num_tokens / seconds, _parts(times, seconds, {"other threads": cpu_s - times.cpu_s})


def _run_served(server: WaitingServer, kind: str, sources: Sequence[Ids], rows: int, cores: set[int]) -> Run:
    before, loop_s, process_s = server.times()
    run = run_client(server.target, sources, kind=kind, concurrency=rows, max_new_tokens=TARGET_LEN, cores=cores)
    after, loop_end_s, process_end_s = server.times()
    times, loop_s, process_s = difference(after, before), loop_end_s - loop_s, process_end_s - process_s
    cpu_s = {"event loop": loop_s, "other threads": process_s - loop_s - times.cpu_s, "client": run.cpu_s}
    return run.speed.num_tokens / run.speed.seconds, _parts(times, run.speed.seconds, cpu_s)


def _run_fronts(server: WaitingServer, kind: str, sources: Sequence[Ids], rows: int, cores: set[int]) -> Run:
    before = server.cpu_s()
    run = run_client(server.target, sources, kind=kind, concurrency=rows, max_new_tokens=TARGET_LEN, cores=cores)
    spent_s = {name: after_s - before[name] for name, after_s in server.cpu_s().items()} | {"client": run.cpu_s}
    steps = run.speed.num_tokens / rows
    parts = {"all": run.speed.seconds} | {f"CPU of {name}": of_name_s for name, of_name_s in spent_s.items()}
    return run.speed.num_tokens / run.speed.seconds, {name: 1e6 * part_s / steps for name, part_s in parts.items()}


def _parts(times: StepTimes, seconds: float, cpu_s: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step. cpu_s: of other threads and processes."""
    in_engine = {
        "engine: launches": times.launch_s,
        "engine: waits for the device": times.waiting_s,
        "engine: late after waits": times.late_s,
        "engine: its own CPU": times.cpu_s,
    }
    parts = {"all": seconds, "device at work": times.busy_s, **in_engine}
    parts["engine: the rest"] = seconds - sum(in_engine.values())
    parts |= {f"CPU of {name}": spent_s for name, spent_s in cpu_s.items()}
    return {name: 1e6 * spent_s / times.steps for name, spent_s in parts.items()}


def _findings(case: str, rows: int, runs: Sequence[Run], best: float) -> list[Finding]:
    speed = statistics.median(speed for speed, _ in runs)
    first = Finding(
        name="simulated_device", case=case, rows=rows, antiphon=round(speed, 1), baseline=round(best, 1),
        against="the runner", ratio=round(speed / best, 3), unit="tokens/s",
    )  # fmt: skip
    parts = {name: statistics.median(parts[name] for _, parts in runs) for name in runs[0][1]}
    return [first] + [
        Finding(name="simulated_device", case=f"{case}, {name}", rows=rows, antiphon=round(us, 1), unit="us a step")
        for name, us in parts.items()
    ]
