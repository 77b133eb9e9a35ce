"""Load reports agree with the engines' gauges, with every RPC and out of band."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
from xds.service.orca.v3.orca_pb2 import OrcaLoadReportRequest

from antiphon.domain.limits import EngineLimits
from antiphon.observability.call import CallRecord
from antiphon.oip.inference_pb2_grpc import GRPCInferenceServiceStub
from antiphon.server.load_report import LoadReports
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.fakes import FakeClock
from tests.oip import ids_request
from tests.serving import SOURCE, Gate, Serving, asking, asking_whole, refusal, serving, stub_of
from tests.wire import tapped


def out_of_band(served: Serving, **fields: Any) -> Any:
    call: Any = served.channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )
    return call(OrcaLoadReportRequest(**fields))


async def hold_two(served: Serving) -> tuple[Gate, list[Any]]:
    """Start two requests: one runs and is blocked, one waits."""
    gate = Gate(served.runner)
    calls = [stub_of(served).GenerateUnary(asking_whole()) for _ in range(2)]
    await asyncio.to_thread(gate.reached.wait)
    while served.engine.num_waiting < 1:
        await stub_of(served).Tokenize(pb.TokenizeRequest(text="x"))
    return gate, calls


async def test_report_contains_the_state_of_the_engine() -> None:
    clock = FakeClock()
    async with serving(EngineLimits(max_num_seqs=1)) as served:
        reports = LoadReports(served.calls.models, clock=clock)
        idle = OrcaLoadReport.FromString(reports.packed())
        gate, calls = await hold_two(served)
        still = OrcaLoadReport.FromString(reports.packed())
        clock.advance(0.1)
        held = OrcaLoadReport.FromString(reports.packed())
        used = (served.engine.num_blocks - served.engine.num_free_blocks) / served.engine.num_blocks
        gate.open()
        await asyncio.gather(*calls)
    assert idle == still
    assert dict(idle.named_metrics) == {"kv_cache_usage": 0, "num_requests_running": 0, "num_requests_waiting": 0}
    assert dict(held.named_metrics) == {"kv_cache_usage": used, "num_requests_running": 1, "num_requests_waiting": 1}
    assert dict(held.utilization) == {"kv_cache_usage": used}
    assert used > 0
    assert held.application_utilization == max(2.0, used)
    assert 0 < held.mem_utilization < 1


def test_rates_are_those_of_the_recent_past() -> None:
    clock, cpu = FakeClock(), FakeClock(0)
    reports = LoadReports([], clock=clock, cpu_clock=cpu)  # type: ignore[arg-type]
    reports._cores = 2
    for _ in range(600):
        for code in ("OK", "OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):
            reports.trailer(CallRecord(method="m", request_id="r", arrival_s=0, code=code))
        clock.advance(0.1)
        cpu.advance(0.1)
    steady = OrcaLoadReport.FromString(reports.packed())
    clock.advance(2.0)
    later = OrcaLoadReport.FromString(reports.packed())
    assert steady.rps_fractional == pytest.approx(40, rel=0.01)
    assert steady.eps == pytest.approx(10, rel=0.01)
    assert steady.cpu_utilization == pytest.approx(0.5, rel=0.01)
    assert later.rps_fractional == pytest.approx(steady.rps_fractional / 2)


async def test_every_rpc_ends_with_a_report_on_success_and_on_failure() -> None:
    async with serving() as served, tapped(served.target) as tap, grpc.aio.insecure_channel(tap.target) as channel:
        stub: Any = InferenceServiceStub(channel)
        oip: Any = GRPCInferenceServiceStub(channel)
        for ask, request in ((stub.GenerateUnary, asking_whole()), (oip.ModelInfer, ids_request(SOURCE))):
            await ask(request)
            assert len(tap.take_reports()) == 1
        for ask, asked in ((stub.Generate, asking()), (oip.ModelStreamInfer, iter([ids_request(SOURCE)]))):
            assert [message async for message in ask(asked)]
            assert len(tap.take_reports()) == 1
        for bad in (asking_whole(top_k=-1), asking_whole((9999,))):
            await refusal(stub.GenerateUnary(bad))
            assert len(tap.take_reports()) == 1


async def test_trailer_holds_the_gauges_of_the_moment() -> None:
    async with serving(EngineLimits(max_num_seqs=1)) as served:
        gate, calls = await hold_two(served)
        async with tapped(served.target) as tap, grpc.aio.insecure_channel(tap.target) as channel:
            stub: Any = InferenceServiceStub(channel)
            # A report is reused for 100 ms, so the test repeats the call until the report is newer than both requests.
            async with asyncio.timeout(60):
                while True:
                    await stub.Tokenize(pb.TokenizeRequest(text="x"))
                    (found,) = tap.take_reports()
                    if found.named_metrics["num_requests_waiting"]:
                        break
        gate.open()
        await asyncio.gather(*calls)
    assert (found.named_metrics["num_requests_running"], found.named_metrics["num_requests_waiting"]) == (1, 1)


async def test_reports_are_sent_out_of_band_no_more_often_than_allowed() -> None:
    async with serving(load_report_interval_s=0.1) as served:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        call = out_of_band(served, report_interval=Duration(nanos=1))
        first, _, third = [await call.read() for _ in range(3)]
        took_s = clock() - start_s
        await asyncio.wait_for(served.calls.wait_until_idle(), 60)  # the stream does not delay the drain
        call.cancel()
        error = await refusal(out_of_band(served, report_interval=Duration(seconds=-1)))
    assert took_s >= 0.15  # two intervals, one of which can have begun before
    assert "num_requests_running" in first.named_metrics
    assert third.rps_fractional >= 0
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_no_report_is_sent_when_reports_are_off() -> None:
    async with serving(load_reports="off") as served:
        async with tapped(served.target) as tap, grpc.aio.insecure_channel(tap.target) as channel:
            stub: Any = InferenceServiceStub(channel)
            await stub.GenerateUnary(asking_whole())
            assert tap.received
            assert not tap.take_reports()
        assert (await refusal(out_of_band(served))).code() == grpc.StatusCode.UNIMPLEMENTED
