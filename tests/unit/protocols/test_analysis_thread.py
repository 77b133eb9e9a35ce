"""Calls that compute beside the engine: they share one thread of the model, and a draining server refuses them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from antiphon.domain.errors import Unavailable
from antiphon.engine.engine import Engine
from antiphon.runtime.explain import NextScores, NextTokenScorer
from antiphon.v1 import inference_pb2 as pb
from tests.explainers import FakeExplainer, HeldExplainer
from tests.fakes import FakeRunner
from tests.serving import Gate, asking_whole, details_of, fake_scorer, refusal, serving, stub_of, tiny_tokenizer

EXPLAIN = pb.ExplainRequest(text="the cat", target_text="the mat")
NEXT_TOKEN = pb.NextTokenRequest(text="the cat")
REQUESTS: list[Any] = [EXPLAIN, NEXT_TOKEN, pb.GetPositionsRequest()]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
async def test_call_beside_the_engine_is_unavailable_while_draining(request_: Any) -> None:
    async with serving(explainer=FakeExplainer(), scorer=fake_scorer()) as served:
        call = getattr(stub_of(served), type(request_).__name__.removesuffix("Request"))
        assert await call(request_)
        gate = Gate(served.runner)
        running = asyncio.ensure_future(stub_of(served).GenerateUnary(asking_whole()))
        await asyncio.to_thread(gate.reached.wait, 60)
        draining = asyncio.ensure_future(asyncio.to_thread(served.engine.drain, 60))
        await asyncio.to_thread(_until_draining, served.engine)
        error = await refusal(call(request_))
        gate.open()
        assert (await running).outputs
        assert await draining
    assert (error.code(), details_of(error).reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")


def _until_draining(engine: Engine) -> None:
    while True:
        try:
            engine.check_accepting()
        except Unavailable:
            return


class _RecordingScorer(NextTokenScorer):
    """Scorer that records the calling threads."""

    def __init__(self) -> None:
        super().__init__(lambda: FakeRunner(max_rows=1, vocab_size=tiny_tokenizer().vocab_size))
        self.threads: set[int] = set()

    def score(self, *arguments: Any) -> NextScores:
        self.threads.add(threading.get_ident())
        return super().score(*arguments)


async def test_calls_beside_the_engine_run_in_one_thread_so_that_no_other_thread_retains_memory() -> None:
    explainer, scorer = HeldExplainer(), _RecordingScorer()
    async with serving(explainer=explainer, scorer=scorer) as served:
        stub = stub_of(served)
        calls: list[Any] = [*(stub.Explain(EXPLAIN) for _ in range(4)), *(stub.NextToken(NEXT_TOKEN) for _ in range(4))]
        await asyncio.to_thread(explainer.came.wait, 60)
        await stub.Tokenize(pb.TokenizeRequest(text="a"))  # the event loop is free
        explainer.release.set()
        await asyncio.gather(*calls)
    assert len(explainer.asked) == 4
    assert explainer.threads == scorer.threads
    assert len(explainer.threads) == 1
