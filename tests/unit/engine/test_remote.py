"""An engine and its front, linked by a pair of sockets: answers, refusals, cancellations, and the end of either."""

import asyncio
import pickle
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from antiphon.bundle.manifest import load_bundle
from antiphon.domain.errors import (
    AntiphonError,
    DeadlineExceeded,
    InvalidArgument,
    QueueFull,
    TooManyRpcs,
    TooManyTexts,
    Unavailable,
)
from antiphon.domain.request import CancelCause, FinishReason, Request, TokenEvent, TokenLogprob
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.remote import Channel, EngineLink, FrontLink, Load, LocalModel, RemoteEngine, RemoteModel
from antiphon.engine.stream import OutputStream
from antiphon.rpc.v1.responses import Detokenizer
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from tests.fakes import FakeRunner, changed, limits_for, request_of, scored, source_of, tokens_of
from tests.unit.engine.engine_bench import TIMEOUT_S, Bench, Gate, arrive, read
from tests.waits import comes_true

DESCRIPTION = b"description"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(SHIPPED_BUNDLE, load_bundle(SHIPPED_BUNDLE).manifest.text)


class Linked:
    """A front in this process, linked to the engine of a bench."""

    def __init__(self, bench: Bench, tokenizer: Tokenizer) -> None:
        self.bench = bench
        self.tokenizer = tokenizer
        self.is_there: list[bool] = []
        self.fronts: list[FrontLink] = []
        self.link = EngineLink(self.is_there.append)
        self.engine: RemoteEngine

    async def attach(self) -> None:
        """Link the front to the engine, as to one that takes the place of another."""
        ours, theirs = socket.socketpair()
        model = LocalModel(
            engine=self.bench.engine, tokenizer=self.tokenizer, facts=RemoteModel.of(self.bench.engine, DESCRIPTION)
        )
        self.fronts.append(FrontLink(theirs, lambda: {"fake": model}, self.fronts.remove))
        self.link.attach(ours)
        facts = await asyncio.to_thread(self.link.model, "fake", TIMEOUT_S)
        assert facts is not None
        assert facts.description == DESCRIPTION
        self.engine = RemoteEngine("fake", self.link, facts, self.tokenizer, self.bench.metrics)
        self.engine.start()

    def submit(self, request: Request) -> OutputStream:
        stream = OutputStream(request.request_id, coalesce_s=0.0)
        self.engine.submit(request, stream)
        return stream

    def close(self) -> None:
        self.link.close()
        for front in list(self.fronts):
            front.close()


@pytest.fixture
async def linked(bench: Bench, tokenizer: Tokenizer) -> AsyncIterator[Linked]:
    linked = Linked(bench, tokenizer)
    await linked.attach()
    yield linked
    linked.close()


def _requests() -> list[Request]:
    """Return requests of every kind that the fake model can answer."""
    dice = random.Random(3)
    requests = []
    for index in range(30):
        source = source_of(target_len=1 + index % 7, length=2 + index % 4, variant=index)
        params = dice.choice(
            [
                SamplingParams(),
                SamplingParams(num_logprobs=3),
                SamplingParams(temperature=0.8, seed=index, num_return_sequences=3),
                SamplingParams(temperature=0.8, seed=index, num_return_sequences=2, num_logprobs=1),
                SamplingParams(max_new_tokens=2),
                SamplingParams(beam_width=3, num_return_sequences=2),
            ]
        )
        request = request_of(f"{index}", source, params=params)
        requests.append(changed(request, is_streamed=bool(index % 2)))
    requests.append(scored(request_of("scored", source_of(target_len=4)), (5, 6, 7, 2)))
    return requests


def _comparable(events: list[TokenEvent]) -> list[tuple[object, ...]]:
    """Return what does not depend on when a reader takes tokens: the sums of the events of each output."""
    outputs: dict[int, list[TokenEvent]] = {}
    for event in events:
        outputs.setdefault(event.output_index, []).append(event)
    return [
        (
            index,
            tokens_of(of_output),
            [entry for event in of_output for entry in event.logprobs],
            of_output[-1].finish_reason,
            of_output[-1].score,
            of_output[-1].beam_steps,
        )
        for index, of_output in sorted(outputs.items())
    ]


async def test_remote_answers_equal_local_ones(linked: Linked) -> None:
    remote = [linked.submit(request) for request in _requests()]
    over_link = [_comparable(await read(stream)) for stream in remote]
    local = [OutputStream(f"local {stream.request_id}", coalesce_s=0.0) for stream in remote]
    for request, stream in zip(_requests(), local, strict=True):
        linked.bench.engine.submit(changed(request, request_id=stream.request_id), stream)
    here = [_comparable(await read(stream)) for stream in local]
    for answer, expected in zip(over_link, here, strict=True):
        # Unread log-probabilities are packed in float32 by the stream, those that are read at once are not.
        assert repr(_rounded(answer)) == repr(_rounded(expected))
    assert [stream.end_reason for stream in remote] == [stream.end_reason for stream in local]


def _rounded(answer: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [
        (
            index,
            ids,
            [
                (entry.token_id, round(entry.logprob, 5), len(entry.alternatives))
                for entry in cast("list[TokenLogprob]", entries)
            ],
            *rest,
        )
        for index, ids, entries, *rest in answer
    ]


async def test_engine_without_a_report_counts_as_idle_until_it_reports(linked: Linked) -> None:
    """Regression: all blocks of an idle engine were reported as used."""
    remote, engine = linked.engine, linked.bench.engine
    assert (remote.num_running, remote.num_waiting) == (0, 0)
    assert remote.num_free_blocks == remote.num_blocks == engine.num_blocks
    linked.fronts[0].report({"fake": Load(num_running=2, num_waiting=1, num_free_blocks=3)})
    await comes_true(lambda: remote.num_running)
    assert (remote.num_running, remote.num_waiting, remote.num_free_blocks) == (2, 1, 3)


async def test_events_of_a_request_have_its_id_and_timing(linked: Linked) -> None:
    events = await read(linked.submit(request_of("a", source_of(target_len=3))))
    assert {event.request_id for event in events} == {"a"}
    assert events[-1].is_last
    assert events[-1].timing is not None
    assert events[-1].num_generated == 4


async def test_cancellation_frees_the_rows_and_blocks_of_a_request(linked: Linked, gate: Gate) -> None:
    stream = linked.submit(request_of("a", source_of(target_len=20)))
    await arrive(gate)
    linked.engine.give_up(stream, CancelCause.CLIENT)
    assert stream.cancel_cause is CancelCause.CLIENT
    await comes_true(lambda: bool(linked.bench.engine._cancellations))
    gate.open()
    assert (await read(stream))[-1].finish_reason is FinishReason.CANCELLED
    assert stream.end_reason is FinishReason.CANCELLED
    assert linked.bench.engine.num_free_blocks == linked.bench.engine.num_blocks
    linked.engine.give_up(stream, CancelCause.CLIENT)  # has ended: nothing happens


async def test_answer_that_was_not_read_is_counted_by_the_front(linked: Linked) -> None:
    stream = linked.submit(request_of("a", source_of(target_len=2)))
    await comes_true(lambda: stream.end_reason is not None)
    linked.engine.give_up(stream, CancelCause.SLOW_READER)
    assert linked.bench.sample("cancellations_total", stage="streaming", cause="slow_reader") == 1


async def test_request_that_can_never_run_is_refused_by_the_front(linked: Linked) -> None:
    with pytest.raises(InvalidArgument, match="source is"):
        linked.submit(request_of("a", ()))
    with pytest.raises(DeadlineExceeded):
        linked.submit(request_of("a", source_of(target_len=2), deadline_s=linked.engine.clock() - 1))
    assert linked.bench.engine.num_waiting == 0


async def test_full_queue_is_the_last_event_with_the_engine_s_error(tokenizer: Tokenizer) -> None:
    runner = FakeRunner(max_rows=1, block_size=4)
    bench = Bench(runner, replace(limits_for(runner), max_queued_requests=1))
    gate = Gate()
    runner.before_decode = gate
    bench.engine.start()
    linked = Linked(bench, tokenizer)
    await linked.attach()
    running = linked.submit(request_of("running", source_of(target_len=3)))
    await arrive(gate)
    waiting, refused = [linked.submit(request_of(name, source_of(target_len=3))) for name in ("waiting", "refused")]
    (event,) = await read(refused)
    assert isinstance(event.error, QueueFull)
    assert event.error.retry_after_s > 0
    assert str(event.error) == "1 requests wait already"
    assert event.request_id == "refused"
    assert event.finish_reason is None
    gate.open()
    for stream in (running, waiting):
        assert (await read(stream))[-1].finish_reason is FinishReason.STOP
    linked.close()
    bench.engine.stop()


async def test_requests_of_a_front_that_ends_are_ended(linked: Linked, gate: Gate) -> None:
    for index in range(6):  # more than the rows
        linked.submit(request_of(f"{index}", source_of(target_len=20)))
    await arrive(gate)
    linked.link.close()
    await comes_true(lambda: not linked.fronts)
    gate.open()
    engine = linked.bench.engine
    await comes_true(lambda: engine.num_running == engine.num_waiting == 0)
    await asyncio.to_thread(engine.drain, TIMEOUT_S)
    assert engine.num_free_blocks == engine.num_blocks
    ended = [
        linked.bench.sample("cancellations_total", stage=stage, cause="lost_loop") or 0
        for stage in ("waiting", "encoding", "running")
    ]
    assert sum(ended) == 6


async def test_requests_of_an_engine_that_ends_fail_and_further_ones_go_to_its_successor(
    linked: Linked, gate: Gate
) -> None:
    stream = linked.submit(request_of("a", source_of(target_len=5)))
    await arrive(gate)
    linked.fronts[0].close()
    (last,) = [event for event in await read(stream) if event.is_last]
    assert isinstance(last.error, Unavailable)
    assert linked.is_there == [True, False]
    with pytest.raises(Unavailable, match="another takes its place"):
        linked.submit(request_of("b", source_of(target_len=5)))
    gate.open()
    await linked.attach()
    assert linked.is_there == [True, False, True]
    source = source_of(target_len=5)
    events = await read(linked.submit(request_of("b", source)))
    assert (tokens_of(events), events[-1].finish_reason) == linked.bench.runner.answer(source)


async def test_drain_of_a_front_waits_for_its_requests_and_refuses_further_ones(linked: Linked, gate: Gate) -> None:
    stream = linked.submit(request_of("a", source_of(target_len=3)))
    await arrive(gate)
    draining = asyncio.create_task(asyncio.to_thread(linked.engine.drain, TIMEOUT_S))
    await comes_true(lambda: not linked.engine.is_alive)
    with pytest.raises(Unavailable):
        linked.submit(request_of("b", source_of(target_len=3)))
    gate.open()
    assert await draining
    assert (await read(stream))[-1].finish_reason is FinishReason.STOP


async def test_drain_of_a_front_ends_what_is_left_over(linked: Linked, gate: Gate) -> None:
    stream = linked.submit(request_of("a", source_of(target_len=3)))
    await arrive(gate)
    assert not await asyncio.to_thread(linked.engine.drain, 0.0)
    (last,) = [event for event in await read(stream) if event.is_last]
    assert isinstance(last.error, Unavailable)
    gate.open()


async def test_stop_strings_are_found_by_the_engine_s_own_tokenizer(linked: Linked, tokenizer: Tokenizer) -> None:
    request = request_of("a", source_of(target_len=12))
    whole = tokens_of(await read(linked.submit(request)))
    text = tokenizer.decode(whole)
    detokenizer = Detokenizer(tokenizer, prefix_ids=(), prefix_text="", stop_strings=(text[4:7],))
    stream = linked.submit(changed(request, stop_matcher=detokenizer.matcher))
    events = await read(stream)
    assert stream.end_reason is FinishReason.STOP_SEQUENCE
    num_tokens = len(tokens_of(events))
    assert text[4:7] in tokenizer.decode(whole[:num_tokens])
    assert text[4:7] not in tokenizer.decode(whole[: num_tokens - 1])


def test_every_error_is_the_same_in_another_process() -> None:
    kinds = [AntiphonError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) >= 20
    plain = [kind("in words") for kind in kinds if kind.__init__ is AntiphonError.__init__]
    full_kinds: tuple[type[QueueFull], ...] = (QueueFull, TooManyRpcs, TooManyTexts)
    full = [full_kind("full", retry_after_s=0.5) for full_kind in full_kinds]
    for error in (*plain, *full, InvalidArgument("top_k", 7, "at most 5")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), vars(copy), copy.reason) == (str(error), vars(error), error.reason)


async def test_messages_larger_than_the_buffers_of_a_socket_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    received: list[bytes] = []
    ends: list[str] = []
    dice = random.Random(1)
    sent = [dice.randbytes(dice.choice([0, 1, 3, 100, 5_000, 3_000_000])) for _ in range(40)]
    sender = Channel(ours, received.append, lambda: ends.append("sender"))
    assert all(sender.send(message) for message in sent)  # nobody reads yet
    assert sender.num_unsent_bytes > 0
    receiver = Channel(theirs, received.append, lambda: ends.append("receiver"))
    await comes_true(lambda: len(received) == len(sent))
    assert received == sent
    assert sender.num_unsent_bytes == 0
    sender.close()
    await comes_true(lambda: ends == ["receiver"])
    assert not sender.send(b"late")
    await comes_true(lambda: not receiver.send(b"late"))


async def test_end_that_does_not_read_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    sender = Channel(ours, lambda message: None, lambda: None)
    with theirs:
        num_sent = next(number for number in range(1000) if not sender.send(bytes(1 << 20)))
    assert 64 <= num_sent < 80
    sender.close()
