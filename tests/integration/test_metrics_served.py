"""/metrics of the real process after traffic of every kind: all documented metrics exist, and the numbers add up."""

import asyncio
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from antiphon.bundle.manifest import load_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.process import ServerProcess, is_idle
from tests.unit.observability.test_metrics import documented

# Exported only with a budget, a certificate, or a profile in the bundle.
CONDITIONAL = {
    "antiphon_memory_budget_bytes",
    "antiphon_tls_certificate_expiry_timestamp_seconds",
    "antiphon_encoder_workspace_fit_coefficient",
    "antiphon_encoder_workspace_fit_residual_ratio",
    "antiphon_worker_restarts_total",
    "antiphon_workers_configured",
    "antiphon_workers_serving",
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NUM_ANSWERED, NUM_STREAMED, NUM_REFUSED, NUM_LATE, NUM_CANCELLED = 5, 4, 3, 3, 4
AT_ONCE_S = 0.02  # service/antiphon/rpc/v1/streaming.py allows as much between the clocks


async def traffic(target: str) -> tuple[list[pb.Usage], int]:
    """Make answered, streamed, refused, expired and cancelled requests.

    Returns the usage of the answered ones, and the number of expired calls, beside NUM_LATE, that a busy server read
    too late to know that their deadline ended them.
    """
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_retries", 0)]) as channel:
        await channel.channel_ready()  # otherwise the first deadlines would pass before anything is sent
        stub: Any = InferenceServiceStub(channel)
        asked = [
            stub.GenerateUnary(_whole(3 + index), metadata=(("traceparent", PARENT),)) for index in range(NUM_ANSWERED)
        ]
        streams = [_read(stub.Generate(_stream(5 + index))) for index in range(NUM_STREAMED)]
        bad = [stub.GenerateUnary(_whole(3, temperature=-1)) for _ in range(NUM_REFUSED)]
        dropped = [_drop(stub.Generate(_stream(2000))) for _ in range(NUM_CANCELLED)]
        answers = await asyncio.gather(*asked)
        usages = await asyncio.gather(*streams)
        failed = await asyncio.gather(*bad, return_exceptions=True)
        await asyncio.gather(*dropped)
        doubtful = sum([await _outlast(stub) for _ in range(NUM_LATE)])
    assert all(isinstance(one, grpc.aio.AioRpcError) for one in failed)
    return [*(answer.usage for answer in answers), *usages], doubtful


def _whole(max_new_tokens: int, **options: Any) -> pb.GenerateUnaryRequest:
    options = {"max_new_tokens": max_new_tokens, **options}
    return pb.GenerateUnaryRequest(text="Eine Katze.", options=pb.GenerateOptions(**options))


def _stream(max_new_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="Ein Buch.", options=pb.GenerateOptions(max_new_tokens=max_new_tokens))


async def _read(stream: Any) -> pb.Usage:
    messages: list[pb.GenerateResponse] = [message async for message in stream]
    return messages[-1].usage


async def _drain(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def _outlast(stub: Any) -> int:
    """Stream beyond a deadline; return how many attempts were made before one whose first token came at once.

    The server's deadline begins when it reads the call. Only if that was at once does it know the end for a deadline.
    """
    for attempt in range(20):
        sent_s = time.monotonic()
        stream = stub.Generate(_stream(2000), timeout=0.1)
        try:
            await stream.read()
        except grpc.aio.AioRpcError:
            continue
        waited_s = time.monotonic() - sent_s
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await _drain(stream)
        if waited_s <= AT_ONCE_S:
            return attempt
    pytest.fail(f"no first token within {AT_ONCE_S} s")


async def _drop(stream: Any) -> None:
    await stream.read()
    stream.cancel()


def total(metrics: Mapping[str, float], name: str, *having: str) -> float:
    """Return the sum of a family's samples with some labels, of the first model or without a model."""
    prefix = f"antiphon_{name}"
    samples = {key: value for key, value in metrics.items() if key == prefix or key.startswith(f"{prefix}{{")}
    assert samples, name
    return sum(value for key, value in samples.items() if all(label in key for label in having))


async def test_every_documented_metric_is_served_and_the_numbers_add_up(bundle: Path) -> None:
    with ServerProcess(bundle) as server:
        usages, doubtful = await traffic(server.target)
        metrics = await asyncio.to_thread(server.wait_for_metrics, _is_ended)
    names = {key.partition("{")[0] for key in metrics}
    for name, (kind, *_) in documented().items():
        assert f"{name}_count" in names if kind == "histogram" else name in {*names, *CONDITIONAL}, name
    _check_ends(metrics, doubtful)
    _check_tokens(metrics, usages)


def _is_ended(metrics: Mapping[str, float]) -> bool:
    """Return whether nothing runs and every call was counted: a client may know of its deadline before the server."""
    return is_idle(metrics) and total(metrics, "grpc_server_in_flight") == 0


def _check_ends(metrics: Mapping[str, float], doubtful: int) -> None:
    inner = ("stage=waiting", "stage=encoding", "stage=running")
    answered = total(metrics, "request_success_total")
    cancelled = sum(total(metrics, "cancellations_total", stage) for stage in inner)
    late = sum(total(metrics, "deadline_misses_total", stage) for stage in inner)
    hopeless = total(metrics, "deadline_misses_total", "stage=submit")  # on a very busy machine
    errors = total(metrics, "request_errors_total")
    assert (answered, errors) == (NUM_ANSWERED + NUM_STREAMED, 0)
    assert NUM_LATE <= late + hopeless <= NUM_LATE + doubtful
    assert NUM_CANCELLED <= cancelled <= NUM_CANCELLED + doubtful
    assert cancelled + late + hopeless <= NUM_CANCELLED + NUM_LATE + doubtful
    assert total(metrics, "requests_submitted_total") == answered + cancelled + late + errors
    assert total(metrics, "requests_refused_total") == NUM_REFUSED + hopeless
    assert total(metrics, "requests_refused_total", "reason=INVALID_FIELD") == NUM_REFUSED
    codes = {"OK": answered, "INVALID_ARGUMENT": NUM_REFUSED, "DEADLINE_EXCEEDED": late + hopeless}
    handled = {code: total(metrics, "grpc_server_handled_total", f"code={code}") for code in (*codes, "CANCELLED")}
    cancelled_rpcs = handled.pop("CANCELLED")
    assert handled == codes
    assert cancelled <= cancelled_rpcs <= cancelled + doubtful  # a call that ended before it was read
    assert total(metrics, "grpc_server_handled_total") == sum(codes.values()) + cancelled_rpcs
    assert total(metrics, "grpc_server_in_flight") == 0


def _check_tokens(metrics: Mapping[str, float], usages: list[pb.Usage]) -> None:
    reported = sum(usage.generated_tokens for usage in usages)
    assert total(metrics, "generation_tokens_total") == total(metrics, "decode_batch_size_sum") > reported
    assert total(metrics, "prompt_tokens_total") >= sum(usage.source_tokens for usage in usages)
    assert total(metrics, "padding_tokens_total") == 0  # native graphs pack
    runs = total(metrics, "encode_batch_size_count")
    for kind in ("predicted_materialised_run_bytes", "measured_run_bytes"):
        assert total(metrics, f"encoder_workspace_{kind}_count") == runs
    assert total(metrics, "arena_peak_bytes") >= total(metrics, "encoder_workspace_measured_max_bytes") > 0
    assert total(metrics, "arena_reserved_bytes") >= total(metrics, "arena_cached_bytes")


async def test_prediction_measurement_and_residual_of_an_encoder_run_are_consistent() -> None:
    with ServerProcess(SHIPPED_BUNDLE) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            answer = await cast(Any, InferenceServiceStub(channel)).GenerateUnary(_whole(3))
        metrics = await asyncio.to_thread(server.wait_for_metrics, is_idle)
    a, b, c = (total(metrics, "encoder_workspace_fit_coefficient", f"term={term}") for term in "abc")
    length, heads = answer.usage.source_tokens, load_bundle(SHIPPED_BUNDLE).manifest.model.num_heads
    predicted = total(metrics, "encoder_workspace_predicted_fused_bytes")
    measured = total(metrics, "encoder_workspace_measured_bytes")
    assert predicted == pytest.approx(a + b * length + c * length**2)
    assert total(metrics, "encoder_workspace_predicted_materialised_bytes") == 4 * heads * length**2
    assert total(metrics, "encoder_workspace_residual_bytes") == pytest.approx(measured - predicted)
    assert total(metrics, "encoder_workspace_measured_to_predicted_ratio_sum") == pytest.approx(measured / predicted)
    for kind in ("predicted_materialised_run_bytes", "predicted_fused_run_bytes", "measured_run_bytes"):
        assert total(metrics, f"encoder_workspace_{kind}_count") == 1


async def test_counted_tokens_equal_those_reported_to_clients(server: ServerProcess) -> None:
    before = await asyncio.to_thread(server.wait_for_metrics, is_idle)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = InferenceServiceStub(channel)
        answers = await asyncio.gather(*(stub.GenerateUnary(_whole(3 + index)) for index in range(6)))
    after = await asyncio.to_thread(server.wait_for_metrics, is_idle)
    grown = {
        name: total(after, name) - total(before, name) for name in ("prompt_tokens_total", "generation_tokens_total")
    }
    assert grown == {
        "prompt_tokens_total": sum(answer.usage.source_tokens for answer in answers),
        "generation_tokens_total": sum(answer.usage.generated_tokens for answer in answers),
    }


def test_openmetrics_is_served_with_exemplars_when_it_is_requested(server: ServerProcess) -> None:
    asyncio.run(_ask_traced(server.target))
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.metrics_port}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        text = response.read().decode()
    parse = cast(Any, text_string_to_metric_families)
    traced = {
        family.name for family in parse(text) for sample in family.samples if "0af7651916" in str(sample.exemplar or "")
    }
    assert traced == {
        "antiphon_time_to_first_token_seconds", "antiphon_e2e_request_latency_seconds",
        "antiphon_request_queue_time_seconds",
    }  # fmt: skip


async def _ask_traced(target: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = InferenceServiceStub(channel)
        await stub.GenerateUnary(_whole(3), metadata=(("traceparent", PARENT),))
