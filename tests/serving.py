"""gRPC server in this process with a fake model. Everything else is real, and tests can block its steps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry

from antiphon.architecture.config import preset
from antiphon.architecture.heads import HeadConfig
from antiphon.bundle.manifest import GenerationDefaults
from antiphon.domain.limits import EngineLimits
from antiphon.engine.engine import Engine
from antiphon.observability.call import CallRecord
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.grpc_fixes.resets import Resets
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.reloading import FileMetrics
from antiphon.rpc.standard_services import HealthServicer, Probes
from antiphon.rpc.v1.handlers import Handlers
from antiphon.rpc.v1.inputs import LongTexts
from antiphon.rpc.v1.model_info import AttentionExplainer, ModelInfo
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.rpc.v1.options import NO_DEFAULTS, default_options
from antiphon.rpc.v1.servicer import InferenceServicer
from antiphon.rpc.v1.streaming import Pacing
from antiphon.runtime.explain import NextTokenScorer
from antiphon.server.access import Access
from antiphon.server.app import SERVICES, build_server, build_waits, call_limits
from antiphon.server.ports import close_port, open_port
from antiphon.server.settings import ServerConfig
from antiphon.text.format import TextFormat
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import MASK_TOKEN, Tokenizer, byte_bpe_format, encoder_format
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.fakes import FakeRunner, limits_for

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub

MODEL_NAME = "fake"
_SENTENCES = ("the cat sat on the mat", "eine kühle Brücke über dem Fluß")
SOURCE = (9, 30, 31)  # the fake model answers with nine tokens


@cache
def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer with few merges: most tokens are single bytes, so that characters have several tokens."""
    return Tokenizer.train([*_SENTENCES] * 4, vocab_size=280)


@cache
def masked_tokenizer() -> Tokenizer:
    """Return tiny_tokenizer with a mask token, for encoders."""
    return Tokenizer.train([*_SENTENCES] * 4, vocab_size=280, extra_special=[MASK_TOKEN])


class Gate:
    """Blocks the engine before its next decoder step until `open`; reports when a step is reached."""

    def __init__(self, runner: FakeRunner) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        runner.before_decode = self._pass

    def open(self) -> None:
        self._open.set()

    def _pass(self, num_rows: int) -> None:
        self.reached.set()
        if not self._open.wait(timeout=60):
            raise AssertionError("the test did not open the gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Running server and its parts. `channel` neither retries nor encrypts. ended: calls that have ended."""

    target: str
    channel: grpc.aio.Channel
    runner: FakeRunner
    engine: Engine
    calls: Handlers
    tokenizer: Tokenizer
    registry: CollectorRegistry
    probes: Probes
    long_texts: LongTexts
    ended: list[CallRecord]

    async def settled(self) -> None:
        """Wait until every call has ended on the server, which is a moment later than on the client."""
        async with asyncio.timeout(60):
            await self.calls.wait_until_idle()


def fake_scorer(**settings: Any) -> NextTokenScorer:
    """Return a scorer of the fake model that `serving` serves, with settings of a FakeRunner."""
    return NextTokenScorer(lambda: FakeRunner(max_rows=1, vocab_size=tiny_tokenizer().vocab_size, **settings))


@contextlib.asynccontextmanager
async def serving(
    limits: EngineLimits | None = None,
    *,
    prepare: Callable[[FakeRunner], object] = lambda runner: None,
    max_messages_per_s: float = 1e6,
    clock: Callable[[], float] = time.monotonic,
    explainer: AttentionExplainer | None = None,
    scorer: NextTokenScorer | None = None,
    generation: GenerationDefaults = NO_DEFAULTS,
    text: TextFormat | None = None,
    heads: Sequence[HeadConfig] = (),
    shortlist: Shortlist | None = None,
    **settings: Any,
) -> AsyncIterator[Serving]:
    """Serve a fake model on a free port. At the end, check that every block is free.

    generation: the model's defaults. text: replaces the tokenizer's own format.
    heads: of an encoder-only model, which is then served.
    """
    config = ServerConfig(**settings)
    tokenizer = masked_tokenizer() if heads else tiny_tokenizer()
    runner = FakeRunner(
        vocab_size=tokenizer.vocab_size, has_decoder=not heads, heads={head.task: head for head in heads}
    )
    architecture: dict[str, Any] = dict(architecture="encoder", decoder_layers=0, heads=heads) if heads else {}
    own_text = encoder_format(tokenizer) if heads else byte_bpe_format(tokenizer)
    prepare(runner)
    registry = CollectorRegistry()
    families = MetricFamilies(registry)
    metrics = Metrics(families, MODEL_NAME)
    engine = Engine(runner, limits or limits_for(runner), metrics, clock=clock)
    described = pb.Limits(
        max_source_len=runner.facts.max_source_len,
        max_target_len=runner.facts.max_target_len,
        max_text_bytes=config.max_text_bytes,
    )
    long_texts = LongTexts(2 * max(config.max_message_bytes, config.max_text_bytes))
    description = pb.Model(
        name=MODEL_NAME,
        limits=described,
        default_options=default_options(generation),
        architecture=pb.ARCHITECTURE_ENCODER if heads else pb.ARCHITECTURE_ENCODER_DECODER,
        languages=sorted((text or own_text).languages),
    )
    model = ModelInfo(
        description=description,
        tokenizer=tokenizer,
        text=text or own_text,
        config=preset("tiny", vocab_size=tokenizer.vocab_size, **architecture),
        explainer=explainer,
        scorer=scorer,
        generation=generation,
        shortlist=shortlist,
    )
    waits = build_waits(config, families)
    pacing = Pacing(max_messages_per_s)
    servicer = InferenceServicer(model, engine, pacing, long_texts)
    models = Models()
    models.add(
        LoadedModel(
            name=MODEL_NAME,
            precision="float32",
            servicer=servicer,
            engine=engine,
            description=description,
            metrics=metrics,
        )
    )
    ended: list[CallRecord] = []
    telemetry = Telemetry(families, ended.append)
    access = Access(config, FileMetrics(families))
    resets = Resets(families.connections_closed.inc)
    calls = Handlers(models, CallMiddleware(telemetry, waits, call_limits(config), resets), pacing)
    health_servicer = HealthServicer()
    probes = Probes(health_servicer, SERVICES)
    server = build_server(config, calls, health_servicer, access.interceptors(telemetry, waits))
    certificates = access.port_certificates()
    engine.start()
    target = f"127.0.0.1:{await open_port(server, '127.0.0.1', 0, certificates)}"
    await probes.announce(MODEL_NAME, HealthCheckResponse.SERVING)
    await probes.ready()
    try:
        async with grpc.aio.insecure_channel(target, options=[("grpc.enable_retries", 0)]) as channel:
            yield Serving(
                target=target,
                channel=channel,
                runner=runner,
                engine=engine,
                calls=calls,
                tokenizer=tokenizer,
                registry=registry,
                probes=probes,
                long_texts=long_texts,
                ended=ended,
            )
            assert engine.drain(timeout_s=60)
        assert engine.num_free_blocks == engine.num_blocks
    finally:
        engine.stop()
        await close_port(server, certificates, None)


def stub_of(served: Serving) -> InferenceServiceAsyncStub:
    return InferenceServiceStub(served.channel)


def asking(ids: Sequence[int] = SOURCE, **options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), options=pb.GenerateOptions(**options))


def asking_whole(ids: Sequence[int] = SOURCE, **options: Any) -> pb.GenerateUnaryRequest:
    return pb.GenerateUnaryRequest(token_ids=pb.TokenIds(ids=ids), options=pb.GenerateOptions(**options))


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """Return the error of a unary call or a stream, which must arrive before any response header or message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    assert not caught.value.initial_metadata()
    return caught.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    """Return the google.rpc details of a refusal."""

    reason: str
    domain: str
    field: str | None
    retry_after_s: float | None


def details_of(error: grpc.aio.AioRpcError) -> Details:
    """Decode the details of a refusal."""
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_bad, has_retry = False, False
    for detail in status.details:
        detail.Unpack(info)
        has_bad |= detail.Unpack(bad)
        has_retry |= detail.Unpack(retry)
    return Details(
        reason=info.reason,
        domain=info.domain,
        field=bad.field_violations[0].field if has_bad else None,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if has_retry else None,
    )
