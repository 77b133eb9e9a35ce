"""Streams, their unread tokens and the publisher in real event loops; tests move the loop's clock."""

import asyncio
import dataclasses
import gc
import random
import threading
import tracemalloc

import pytest

import antiphon.engine.stream as stream_module
from antiphon.domain.request import FinishReason, TokenEvent, TokenLogprob
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.stream import Item, OutputStream, Publisher, UnreadTokens
from antiphon.observability.call import CallRecord
from tests.fakes import request_of

LONG_S = 3600.0  # longer than any test


def final(stream: OutputStream, num_generated: int = 0) -> TokenEvent:
    return TokenEvent(
        request_id=stream.request_id, finish_reason=FinishReason.STOP, is_last=True, num_generated=num_generated
    )


def push_all(stream: OutputStream, token_ids: list[int]) -> None:
    for token_id in token_ids:
        stream.push(token_id)


async def settle() -> None:
    """Run every callback that is ready."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_stream_delivers_the_first_token_at_once() -> None:
    stream = OutputStream("a", coalesce_s=LONG_S)
    reader = asyncio.ensure_future(anext(stream))
    await settle()
    assert not reader.done()
    stream.push(7)
    await settle()
    assert reader.result() == TokenEvent(request_id="a", token_ids=(7,))
    stream.finish(final(stream))


async def test_stream_merges_tokens_until_its_window_ends() -> None:
    stream = OutputStream("a", coalesce_s=LONG_S)
    stream.push(1)
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    push_all(stream, [2, 3])
    await settle()
    assert not reader.done()
    stream._end_window()  # like the timer
    await settle()
    assert reader.result() == TokenEvent(request_id="a", token_ids=(2, 3))
    stream.finish(final(stream))


async def test_stream_sends_a_late_token_at_once_when_its_window_is_over() -> None:
    stream = OutputStream("a", coalesce_s=LONG_S)
    stream.push(1)
    await anext(stream)
    stream._end_window()
    reader = asyncio.ensure_future(anext(stream))
    await settle()
    stream.push(2)
    await settle()
    assert reader.result().token_ids == (2,)
    stream.finish(final(stream))


async def test_stream_window_ends_without_a_further_token() -> None:
    stream = OutputStream("a", coalesce_s=0.001)
    stream.push(1)
    await anext(stream)
    stream.push(2)
    async with asyncio.timeout(30):
        assert (await anext(stream)).token_ids == (2,)


async def test_stream_delivers_the_end_at_once_with_all_unread_tokens() -> None:
    stream = OutputStream("a", coalesce_s=LONG_S)
    stream.push(1)
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    push_all(stream, [2, 3])
    stream.finish(final(stream, num_generated=4))
    await settle()
    assert reader.result() == TokenEvent(
        request_id="a", token_ids=(2, 3), finish_reason=FinishReason.STOP, is_last=True, num_generated=4
    )
    assert [event async for event in stream] == []


async def test_stream_yields_one_terminal_event_and_ignores_later_events() -> None:
    stream = OutputStream("a", coalesce_s=0.0)
    push_all(stream, [1, 2])
    stream.finish(final(stream))
    stream.finish(TokenEvent(request_id="a", finish_reason=FinishReason.ERROR, is_last=True))
    events = [event async for event in stream]
    assert [event.finish_reason for event in events] == [FinishReason.STOP]
    with pytest.raises(StopAsyncIteration):
        await stream.collect()


async def test_stream_without_coalescing_sends_every_token_that_is_waited_for() -> None:
    stream = OutputStream("a", coalesce_s=0.0)
    for token_id in range(5):
        reader = asyncio.ensure_future(anext(stream))
        await settle()
        stream.push(token_id)
        assert (await reader).token_ids == (token_id,)


async def test_stream_collect_wakes_once_with_everything() -> None:
    stream = OutputStream("a", coalesce_s=0.0)
    reader = asyncio.ensure_future(stream.collect())
    for token_id in range(4):
        stream.push(token_id)
        await settle()
        assert not reader.done()
    stream.finish(final(stream, num_generated=5))
    (event,) = await reader
    assert event.token_ids == (0, 1, 2, 3)
    assert event.num_generated == 5


async def test_stream_continues_after_its_reader_is_cancelled() -> None:
    stream = OutputStream("a", coalesce_s=LONG_S)
    reader = asyncio.ensure_future(anext(stream))
    await settle()
    reader.cancel()
    await settle()
    stream.push(1)
    stream.finish(final(stream))
    assert (await anext(stream)).token_ids == (1,)


def test_stream_refuses_a_negative_window() -> None:
    loop = asyncio.new_event_loop()
    with pytest.raises(ValueError, match="coalesce_s"):
        OutputStream("a", coalesce_s=-1.0, loop=loop)
    loop.close()


async def test_publisher_delivers_a_step_with_one_call_into_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [OutputStream(str(i)) for i in range(5)]
    loop = asyncio.get_running_loop()
    calls: list[object] = []
    original = loop.call_soon_threadsafe

    def counted(callback: object, *args: object, **kwargs: object) -> object:
        calls.append(callback)
        return original(callback, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    publisher = Publisher()
    assert publisher.publish(streams, [10, 11, 12, 13, 14], [(streams[2], final(streams[2]))]) == []
    assert len(calls) == 1
    assert [(await anext(stream)).token_ids for stream in streams] == [(10,), (11,), (12,), (13,), (14,)]
    assert [event async for event in streams[2]] == []
    for stream in streams:
        stream.finish(final(stream))


async def test_publisher_delivers_to_streams_of_several_loops() -> None:
    here = [OutputStream(f"here{i}") for i in range(2)]
    there: list[OutputStream] = []
    ready, collected = threading.Event(), []

    async def elsewhere() -> None:
        there.extend(OutputStream(f"there{i}") for i in range(2))
        ready.set()
        collected.extend([(await stream.collect())[0].token_ids for stream in there])

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    assert await asyncio.to_thread(ready.wait, 30)
    streams = (here[0], there[0], here[1], there[1])
    publisher = Publisher()
    publisher.publish(streams, [1, 2, 3, 4])
    publisher.publish(streams, [5, 6, 7, 8], [(stream, final(stream)) for stream in streams])
    await asyncio.to_thread(thread.join, 30)
    assert [(await stream.collect())[0].token_ids for stream in here] == [(1, 5), (3, 7)]
    assert collected == [(2, 6), (4, 8)]


async def test_publisher_follows_a_change_of_streams() -> None:
    first, second = OutputStream("first"), OutputStream("second")
    publisher = Publisher()
    publisher.publish((first,), [1])
    publisher.publish((second, first), [2, 3])
    publisher.publish((), [], [(first, final(first)), (second, final(second))])
    assert (await first.collect())[0].token_ids == (1, 3)
    assert (await second.collect())[0].token_ids == (2,)


def test_publisher_returns_streams_whose_loop_is_closed() -> None:
    loop = asyncio.new_event_loop()
    stream = OutputStream("a", loop=loop)
    loop.close()
    assert Publisher().publish((stream,), [1]) == [stream]


def ended(index: int, *, is_last: bool = False, error: Exception | None = None) -> TokenEvent:
    return TokenEvent(request_id="a", output_index=index, finish_reason=FinishReason.STOP, is_last=is_last, error=error)


async def test_stream_merges_each_output_separately() -> None:
    stream = OutputStream("a", coalesce_s=0.0)
    outputs = [stream.output(index) for index in range(3)]
    for item, index in enumerate((0, 2, 0, 1, 2)):
        outputs[index].push(item)
    seen = [await anext(stream) for _ in range(3)]
    assert {event.output_index: event.token_ids for event in seen} == {0: (0, 2), 1: (3,), 2: (1, 4)}
    stream.finish(ended(2))
    outputs[1].push(9)
    for index in (0, 1):
        stream.finish(ended(index, is_last=index == 1))
    seen = [event async for event in stream]
    assert [(event.output_index, event.token_ids, event.is_last) for event in seen] == [
        (2, (), False),
        (0, (), False),
        (1, (9,), True),
    ]


async def test_stream_collects_outputs_by_index_and_their_log_probabilities() -> None:
    stream = OutputStream("a")
    stream.output(1).push(TokenLogprob(5, -0.5))
    stream.finish(ended(1))
    stream.push(6)
    stream.finish(dataclasses.replace(ended(0, is_last=True), token_ids=(7,), logprobs=(TokenLogprob(2, -0.25),)))
    first, second = await stream.collect()
    assert (first.token_ids, first.logprobs) == ((6, 7), (TokenLogprob(2, -0.25),))
    assert (second.token_ids, second.logprobs) == ((5,), (TokenLogprob(5, -0.5),))


async def test_stream_collects_only_the_error_of_a_failed_request() -> None:
    stream, error = OutputStream("a"), RuntimeError("broken")
    stream.finish(ended(0))
    stream.finish(ended(0, is_last=True, error=error))
    (event,) = await stream.collect()
    assert event.error is error
    with pytest.raises(StopAsyncIteration):
        await stream.collect()


async def test_ended_call_is_freed_without_garbage_collection() -> None:
    """Regression: call and stream referenced each other, and 60 MB of embeddings stayed until garbage collection."""
    name = "freed without garbage collection"
    stream = OutputStream(name)
    call = CallRecord(method="Test/Embed", request_id=name, arrival_s=0.0)
    call.admitted(request_of(name, (5,), params=SamplingParams(max_new_tokens=1)), stream)
    stream.finish(final(stream))
    gc.disable()
    try:
        del call, stream
        assert not [one for one in gc.get_objects() if type(one) is OutputStream and one.request_id == name]
    finally:
        gc.enable()


NUM_TOKENS = 256


def logprob(rng: random.Random, num_alternatives: int) -> TokenLogprob:
    """Return an entry whose numbers are exact in float32, as those of a model are."""
    alternatives = tuple((rng.randrange(300, 1 << 20), -rng.randrange(1 << 20) / 1024) for _ in range(num_alternatives))
    return TokenLogprob(rng.randrange(300, 1 << 20), -rng.randrange(1 << 20) / 1024, alternatives)


def pushed(items: list[Item]) -> UnreadTokens:
    tokens = UnreadTokens()
    for item in items:
        tokens.push(item)
    return tokens


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 8, 9, 10, 100])
@pytest.mark.parametrize("num_alternatives", [None, 0, 20])
def test_tokens_are_taken_as_they_were_pushed(num_tokens: int, num_alternatives: int | None) -> None:
    rng = random.Random(1)
    entries = [logprob(rng, num_alternatives or 0) for _ in range(num_tokens)]
    ids = tuple(entry.token_id for entry in entries)
    tokens = pushed(list(ids) if num_alternatives is None else list(entries))
    assert len(tokens) == num_tokens
    assert tokens.take() == (ids, () if num_alternatives is None else tuple(entries))
    assert (len(tokens), tokens.num_bytes, tokens.take()) == (0, 0, ((), ()))


def test_tokens_without_log_probabilities_may_stand_between_others() -> None:
    rng = random.Random(1)
    items = [logprob(rng, 2) if number % 3 else number for number in range(50)]
    ids, entries = pushed(items).take()
    assert ids == tuple(item.token_id if isinstance(item, TokenLogprob) else item for item in items)
    assert entries == tuple(item for item in items if isinstance(item, TokenLogprob))


@pytest.mark.parametrize(("num_alternatives", "max_token_bytes"), [(None, 8), (0, 24), (20, 230)])
def test_unread_tokens_take_the_memory_that_they_count(num_alternatives: int | None, max_token_bytes: int) -> None:
    """Regression: a token with 20 alternatives took 3 KB, and 500 streams that nobody read 400 MB."""
    rng = random.Random(1)
    # Other threads of this process allocate too. A compiled module has no lines: its objects are this file's.
    here = [tracemalloc.Filter(True, path) for path in (__file__, stream_module.__file__)]
    tracemalloc.start()
    try:
        tokens = UnreadTokens()
        for _ in range(NUM_TOKENS):
            entry = logprob(rng, num_alternatives or 0)
            tokens.push(entry.token_id if num_alternatives is None else entry)
        del entry
        gc.collect()  # empties the interpreter's list of freed tuples
        num_bytes = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(here).traces)
    finally:
        tracemalloc.stop()
    assert num_bytes <= NUM_TOKENS * max_token_bytes
    assert tokens.num_bytes == pytest.approx(num_bytes, rel=0.3, abs=1000)
