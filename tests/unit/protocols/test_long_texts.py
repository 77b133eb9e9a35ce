"""Threads of long texts and of calls that compute beside the engine: one at a time, in turns, until a drain."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from antiphon.domain.errors import InvalidArgument, TooManyTexts, Unavailable
from antiphon.engine.engine import Engine
from antiphon.rpc.v1.inputs import LongTexts
from antiphon.runtime.explain import NextScores, NextTokenScorer
from antiphon.v1 import inference_pb2 as pb
from tests.explainers import FakeExplainer, HeldExplainer
from tests.fakes import FakeRunner
from tests.serving import Gate, asking_whole, details_of, fake_scorer, refusal, serving, stub_of, tiny_tokenizer

PATIENCE_S = 60
KIB = 1024


class Blocked:
    """Work that blocks the thread until `open`."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.opened.wait(PATIENCE_S)
        return "blocked"


def ask(texts: LongTexts, caller: str, num_bytes: int, work: Callable[[], Any] = lambda: None) -> asyncio.Task[Any]:
    """Submit a text of a caller in a separate task, as an RPC does. The task begins before the next one."""

    async def run() -> Any:
        return await texts.run(caller, num_bytes, work)

    return asyncio.create_task(run())


async def blocked(texts: LongTexts, num_bytes: int = 1, caller: str = "blocker") -> tuple[Blocked, asyncio.Task[Any]]:
    """Return the thread, blocked by a text of another caller."""
    work = Blocked()
    task = ask(texts, caller, num_bytes, work)
    await asyncio.to_thread(work.started.wait, PATIENCE_S)
    return work, task


async def begun(*tasks: asyncio.Task[Any]) -> None:
    """Let new tasks run until they wait."""
    await asyncio.wait(tasks, timeout=0.0)


async def test_callers_take_turns_and_one_text_is_processed_at_a_time() -> None:
    texts, order = LongTexts(100), []
    work, holding = await blocked(texts)
    names = ["greedy", "greedy", "greedy", "modest", "other"]
    tasks = [ask(texts, name, 10, lambda name=name: order.append(name)) for name in names]  # type: ignore[misc]
    await begun(*tasks)
    assert (texts.held_bytes, order) == (51, [])
    work.opened.set()
    await asyncio.gather(*tasks)
    assert await holding == "blocked"
    assert order == ["greedy", "modest", "other", "greedy", "greedy"]
    assert texts.held_bytes == 0


async def test_texts_are_refused_beyond_the_limit_and_of_one_caller_beyond_half_of_it() -> None:
    texts = LongTexts(100)
    work, holding = await blocked(texts, num_bytes=20)
    waiting = [ask(texts, "a", 50), ask(texts, "b", 20)]
    await begun(*waiting)
    with pytest.raises(TooManyTexts, match=r"50 bytes of this caller's long texts wait .* 1 more .* above 50"):
        await ask(texts, "a", 1)
    with pytest.raises(TooManyTexts, match=r"90 bytes of long texts wait .* 11 more .* above 100") as caught:
        await ask(texts, "c", 11)
    assert caught.value.retry_after_s > 0
    waiting.append(ask(texts, "c", 10))
    work.opened.set()
    await asyncio.gather(holding, *waiting)
    await ask(texts, "a", 50)
    assert texts.held_bytes == 0


async def test_waiting_texts_are_removed_when_their_callers_leave() -> None:
    texts, read = LongTexts(100), []
    work, holding = await blocked(texts)
    tasks = [ask(texts, "a", 25, lambda: read.append("a")) for _ in range(2)]
    staying = ask(texts, "b", 10, lambda: read.append("b"))
    await begun(*tasks, staying)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert texts.held_bytes == 11
    work.opened.set()
    await asyncio.gather(holding, staying)
    assert read == ["b"]


async def test_text_in_progress_counts_until_its_work_ends_when_its_caller_leaves() -> None:
    texts = LongTexts(100)
    work, holding = await blocked(texts, num_bytes=30)
    holding.cancel()
    await asyncio.wait([holding])
    assert texts.held_bytes == 30
    after = ask(texts, "b", 10, lambda: "read")
    work.opened.set()
    assert await after == "read"
    assert texts.held_bytes == 0


async def test_next_caller_gets_the_turn_of_a_caller_that_leaves_at_that_moment() -> None:
    texts = LongTexts(100)
    work, holding = await blocked(texts)
    leaving, staying = ask(texts, "a", 10), ask(texts, "b", 10, lambda: "read")
    await begun(leaving, staying)
    holding.add_done_callback(lambda _: leaving.cancel())
    work.opened.set()
    assert await staying == "read"
    await asyncio.wait([leaving])
    assert texts.held_bytes == 0


async def test_error_of_the_work_is_raised_in_its_caller_and_the_next_text_is_processed() -> None:
    texts = LongTexts(100)

    def fail() -> None:
        raise InvalidArgument("text", "x", "shorter")

    with pytest.raises(InvalidArgument):
        await ask(texts, "a", 50, fail)
    assert await ask(texts, "a", 50, lambda: "read") == "read"
    assert texts.held_bytes == 0


async def test_server_refuses_long_texts_beyond_its_bound_with_pushback() -> None:
    async with serving(max_text_bytes=4 * KIB, max_message_bytes=4 * KIB) as served:
        stub = stub_of(served)
        work, holding = await blocked(served.long_texts, 3000, caller="ipv4:127.0.0.1")
        for asking in (
            stub.Tokenize(pb.TokenizeRequest(text="a " * 1500)),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=[9] * 3000)),
            stub.GenerateUnary(pb.GenerateUnaryRequest(text="a " * 1500)),
        ):
            error = await refusal(asking)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details_of(error).reason == "TOO_MANY_TEXTS"
            assert (details_of(error).retry_after_s or 0) > 0
        assert (await stub.Tokenize(pb.TokenizeRequest(text="a cat"))).token_ids  # a short text does not wait
        work.opened.set()
        await holding
        assert (await stub.Tokenize(pb.TokenizeRequest(text="a " * 1500))).normalized_text == ("a " * 1500).strip()


TOO_LONG = "x" * (4 * KIB + 1)


@pytest.mark.parametrize(
    ("method", "field", "request_"),
    [
        ("Tokenize", "text", pb.TokenizeRequest(text=TOO_LONG)),
        ("Tokenize", "text", pb.TokenizeRequest(text="\u00e9" * (2 * KIB + 1))),
        ("Tokenize", "text", pb.TokenizeRequest(text=" " * len(TOO_LONG))),
        ("Generate", "text", pb.GenerateRequest(text=TOO_LONG)),
        ("GenerateUnary", "text", pb.GenerateUnaryRequest(text=TOO_LONG)),
        (
            "GenerateUnary",
            "options.prefix_text",
            pb.GenerateUnaryRequest(text="a", options=pb.GenerateOptions(prefix_text=TOO_LONG)),
        ),
        ("Score", "text", pb.ScoreRequest(text=TOO_LONG, target_text="a")),
        ("Score", "target_text", pb.ScoreRequest(text="a", target_text=TOO_LONG)),
        ("Embed", "text", pb.EmbedRequest(text=TOO_LONG)),
        ("Detokenize", "token_ids", pb.DetokenizeRequest(token_ids=[9] * (4 * KIB + 1))),
    ],
)
async def test_texts_above_max_text_bytes_are_refused_before_tokenising(method: str, field: str, request_: Any) -> None:
    async with serving(max_text_bytes=4 * KIB) as served:
        call = getattr(stub_of(served), method)(request_)
        error = await refusal(call.read() if method == "Generate" else call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error).field == field
        what = "ids" if method == "Detokenize" else "bytes"
        size = 4 * KIB + (2 if "\u00e9" in str(getattr(request_, "text", "")) else 1)
        assert f"{field} is {size} {what} long; it must be at most {4 * KIB} {what} long" in (error.details() or "")


async def test_texts_of_max_text_bytes_are_accepted() -> None:
    async with serving(max_text_bytes=4 * KIB) as served:
        stub = stub_of(served)
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="\u00e9" * (2 * KIB)))
        ids = tokens.token_ids[: 4 * KIB]
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
        assert tokens.normalized_text == "\u00e9" * (2 * KIB)
        assert (await stub.GetModel(pb.GetModelRequest())).model.limits.max_text_bytes == 4 * KIB


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
