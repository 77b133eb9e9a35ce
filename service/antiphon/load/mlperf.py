"""MLPerf's LoadGen as an independent load generator: its Server scenario with the same calls. Needs mlperf_loadgen.

LoadGen schedules each query (Poisson), measures and decides on validity; this module only sends its queries. LoadGen
has no failed queries: this module counts them, and they make the verdict INVALID.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import mlperf_loadgen

from antiphon.load.calls import Caller
from antiphon.load.drive import DriveError
from antiphon.load.mlperf_summary import Verdict, read_summary
from antiphon.load.plan import Plan, PlanError
from antiphon.load.results import OK

_PERCENTILE = 0.99
_T = TypeVar("_T")


def run_server_scenario(plan: Plan, folder: Path) -> Verdict:
    """Run LoadGen with a plan's texts, rate and duration. Its logs go to `folder`, which is created.

    With an objective for first tokens, LoadGen checks token latencies, otherwise the latency of the whole answer: at
    least 99 % must be within the objective. An interrupt ends the process, because LoadGen cannot be stopped. Raises
    PlanError, DriveError.
    """
    check_plan(plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--mlperf {folder} cannot be created: {error.strerror}") from None
    with _Answering(plan) as answering:
        previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            _test(plan, folder, answering)
        finally:
            signal.signal(signal.SIGINT, previous)
    return Verdict(summary=read_summary(folder), errors=dict(answering.errors))


def check_plan(plan: Plan) -> None:
    """Raise PlanError for a plan that LoadGen cannot run."""
    if plan.rate is None or plan.warmup_s or plan.processes > 1:
        raise PlanError("--mlperf excludes --trace, --warmup and --processes: LoadGen schedules the requests")
    if not plan.objective.has_limit:
        raise PlanError("--mlperf needs --objective-ttft-ms or --objective-p99-ms: LoadGen checks a run against it")


def _test(plan: Plan, folder: Path, answering: _Answering) -> None:
    num_samples = len(plan.asks)
    system = mlperf_loadgen.ConstructSUT(answering.issue, lambda: None)
    samples = mlperf_loadgen.ConstructQSL(num_samples, num_samples, lambda indices: None, lambda indices: None)
    try:
        mlperf_loadgen.StartTestWithLogSettings(system, samples, _settings(plan), _log_settings(folder))
    finally:
        mlperf_loadgen.DestroyQSL(samples)
        mlperf_loadgen.DestroySUT(system)


def _settings(plan: Plan) -> Any:
    settings = mlperf_loadgen.TestSettings()
    settings.scenario = mlperf_loadgen.TestScenario.Server
    settings.mode = mlperf_loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = plan.rate
    settings.server_target_latency_percentile = _PERCENTILE
    settings.schedule_rng_seed = settings.sample_index_rng_seed = settings.qsl_rng_seed = plan.seed
    settings.min_duration_ms = round(1e3 * plan.duration_s)
    settings.min_query_count = 1
    whole_ns = _nanoseconds(plan.objective.e2e_s or plan.timeout_s)
    if plan.objective.ttft_s is None:
        settings.server_target_latency_ns = whole_ns
    else:
        settings.use_token_latencies = True
        settings.ttft_latency = _nanoseconds(plan.objective.ttft_s)
        # LoadGen needs a limit for the time per token: one that no answer within the limit of the whole can miss.
        settings.tpot_latency = whole_ns
    return settings


def _log_settings(folder: Path) -> Any:
    output = mlperf_loadgen.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    log = mlperf_loadgen.LogSettings()
    log.log_output = output
    log.enable_trace = False
    return log


class _Answering:
    """Connections in an event loop with its own thread, because LoadGen's thread must not wait for answers."""

    def __init__(self, plan: Plan) -> None:
        self.errors: Counter[str] = Counter()
        self._plan = plan
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answers")
        self._caller: Caller

    def issue(self, samples: Sequence[Any]) -> None:
        """Send queries; LoadGen calls this from its own thread."""
        for sample in samples:
            asyncio.run_coroutine_threadsafe(self._answer(sample.id, sample.index), self._loop)

    async def _answer(self, query: int, ask: int) -> None:
        def report_first_token() -> None:
            mlperf_loadgen.FirstTokenComplete([mlperf_loadgen.QuerySampleResponse(query, 0, 0)])

        reply = await self._caller.call(ask, 0.0, 0.0, report_first_token)
        if reply.outcome.status != OK:
            self.errors[reply.outcome.status] += 1
        mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(query, 0, 0, reply.num_tokens)])

    async def _open(self) -> Caller:
        caller = Caller(self._plan)
        await caller.connect()
        return caller

    def _run_in_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._caller = self._run_in_loop(self._open())
        except TimeoutError:
            self._end()
            raise DriveError(f"no connection to {self._plan.target}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run_in_loop(self._caller.close())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
