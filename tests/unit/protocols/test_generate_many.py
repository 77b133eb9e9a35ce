"""GenerateMany: every request answered once to the end, as by a call of its own; ids, cancellations, limits, ends."""

import asyncio
import gc
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from antiphon.domain.limits import EngineLimits
from antiphon.engine.sequence import SequenceGroup
from antiphon.rpc.v1 import generate_many
from antiphon.rpc.v1.generate_many import OpenRequest
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.fakes import FakeClock, FakeRunner, limits_for
from tests.serving import SOURCE, Gate, Serving, asking, asking_whole, details_of, serving, stub_of
from tests.waits import comes_true

BAD: dict[str, Any] = {"top_k": -1}
ENDLESS: dict[str, Any] = dict(ignore_eos=True)
SOURCES = [(9, 30, 31), (12, 200, 100), (4, 40), (7, 41, 42, 43)]


def one(request_id: int, source: tuple[int, ...] = SOURCE, **options: Any) -> pb.ManyRequest:
    return pb.ManyRequest(id=request_id, request=asking(source, **options))


def sending(*requests: pb.ManyRequest, cancelled: Iterable[int] = ()) -> pb.GenerateManyRequest:
    return pb.GenerateManyRequest(requests=requests, cancelled_ids=cancelled)


def is_last(answer: pb.ManyAnswer) -> bool:
    return not answer.HasField("delta") or answer.delta.HasField("usage")


class Talk:
    """A call and the answers read from it, by id. Every request must be answered to the end at most once."""

    def __init__(self, served: Serving, **call: Any) -> None:
        self.call = stub_of(served).GenerateMany(**call)
        self.answers: dict[int, list[pb.ManyAnswer]] = defaultdict(list)
        self.ended: set[int] = set()

    async def send(self, *requests: pb.ManyRequest, cancelled: Iterable[int] = ()) -> None:
        await self.call.write(sending(*requests, cancelled=cancelled))

    async def until(self, *ids: int) -> None:
        """Read until these requests have their last answers."""
        async with asyncio.timeout(120):
            while not self.ended.issuperset(ids):
                assert await self._read()

    async def finish(self) -> None:
        """End the client's side and read the rest."""
        await self.call.done_writing()
        async with asyncio.timeout(60):
            while await self._read():
                pass

    def failure(self, request_id: int) -> pb.Failure:
        (answer,) = self.answers[request_id]
        assert answer.HasField("failure")
        return answer.failure

    def text(self, request_id: int, output: int = 0) -> tuple[str, list[int]]:
        deltas = [one.delta for one in self.answers[request_id] if one.delta.output_index == output]
        return "".join(one.text_delta for one in deltas), [token for one in deltas for token in one.token_ids]

    async def _read(self) -> bool:
        """Read one message; False at the end of the call."""
        response: Any = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        assert response.answers
        for answer in response.answers:
            assert answer.id not in self.ended, "an answer after the last one"
            self.answers[answer.id].append(answer)
            if is_last(answer):
                self.ended.add(answer.id)
        return True


async def read_to_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("whole", [False, True])
async def test_answers_equal_those_of_single_calls(whole: bool) -> None:
    options: list[dict[str, Any]] = [
        {},
        dict(beam_width=3, num_return_sequences=2),
        dict(temperature=1.0, seed=7),
        dict(num_logprobs=2),
    ]
    async with serving() as served:
        talk = Talk(served)
        requests = [one(i, source, **options[i]) for i, source in enumerate(SOURCES)]
        for request in requests:
            request.is_whole = whole
        await talk.send(*requests[:3])
        await talk.send(requests[3])
        await talk.finish()
        assert await talk.call.code() is grpc.StatusCode.OK
        for i, source in enumerate(SOURCES):
            alone = await stub_of(served).GenerateUnary(asking_whole(source, **options[i]))
            if whole:
                (answer,) = talk.answers[i]
                assert list(answer.whole.outputs) == list(alone.outputs)
                assert answer.whole.usage == alone.usage
            else:
                for output in alone.outputs:
                    assert talk.text(i, output.output_index) == (output.text, list(output.token_ids))
                last = talk.answers[i][-1].delta
                assert (last.usage, last.seed) == (alone.usage, alone.seed if "seed" in options[i] else last.seed)


async def test_failure_ends_only_its_own_request_and_names_the_field() -> None:
    async with serving() as served:
        talk = Talk(served)
        other = pb.ManyRequest(id=3, request=pb.GenerateRequest(model="other", text="x"))
        timeless = one(5)
        timeless.timeout_millis = 0
        await talk.send(one(1, **BAD), one(2), other, pb.ManyRequest(id=4), timeless)
        await talk.finish()
    codes = grpc.StatusCode
    for request_id, code, reason, field in (
        (1, codes.INVALID_ARGUMENT, "INVALID_FIELD", "options.top_k"),
        (3, codes.NOT_FOUND, "MODEL_NOT_FOUND", ""),
        (4, codes.INVALID_ARGUMENT, "INVALID_FIELD", "source"),
        (5, codes.INVALID_ARGUMENT, "INVALID_FIELD", "timeout_millis"),
    ):
        failure = talk.failure(request_id)
        assert (failure.code, failure.reason, failure.field) == (code.value[0], reason, field)
        assert failure.message
    assert talk.text(2)[1]


async def test_id_of_an_unanswered_request_cannot_be_used_again_but_that_of_an_answered_one_can() -> None:
    async with serving() as served:
        talk = Talk(served)
        await talk.send(one(1))
        await talk.until(1)
        talk.ended.clear()
        await talk.send(one(1, SOURCES[1]))
        await talk.until(1)
        gate = Gate(served.runner)
        await talk.send(one(2), one(2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talk.call.read()
        gate.open()
        await served.settled()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(caught.value).field == "requests.id"
    assert "2" in (caught.value.details() or "")


async def test_requests_are_cancelled_by_id_before_during_and_after_their_work() -> None:
    async with serving() as served:
        talk = Talk(served)
        gate = Gate(served.runner)
        await talk.send(one(1, **ENDLESS), one(2, **ENDLESS), one(3))
        await asyncio.to_thread(gate.reached.wait)
        await talk.send(cancelled=[1, 99])  # 99 was never asked
        await talk.send(one(4, **ENDLESS), cancelled=[2])
        await talk.send(one(5, **BAD), cancelled=[4])
        await talk.until(5)  # refused at once: the server has read every message before
        gate.open()
        await talk.until(1, 2, 3, 4)
        await talk.send(cancelled=[3])  # answered
        await talk.finish()
    for request_id in (1, 2, 4):
        failure = talk.answers[request_id][-1].failure
        assert (failure.code, failure.reason) == (grpc.StatusCode.CANCELLED.value[0], "CANCELLED")
    assert talk.text(3)[1]


async def test_long_text_is_cancelled_while_it_waits_to_be_read() -> None:
    reading = threading.Event()
    async with serving() as served:
        talk = Talk(served)
        busy = asyncio.ensure_future(served.long_texts.run("", 1, lambda: reading.wait(60)))
        await talk.send(pb.ManyRequest(id=1, request=pb.GenerateRequest(text="a" * 5_000)), one(2))
        await talk.send(cancelled=[1])
        await talk.until(1, 2)
        reading.set()
        await busy
        await talk.finish()
    assert talk.failure(1).code == grpc.StatusCode.CANCELLED.value[0]
    assert talk.text(2)[1]


async def test_message_is_not_filled_beyond_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_many, "_FULL_BYTES", 1)
    async with serving() as served:
        talk = Talk(served)
        requests = [one(i, max_new_tokens=2) for i in range(8)]
        for request in requests:
            request.is_whole = True
        await talk.send(*requests)
        await talk.call.done_writing()
        sizes = [len(response.answers) async for response in talk.call]
    assert sizes == [1] * 8


async def test_every_request_of_thousands_is_answered_once() -> None:
    async with serving() as served:
        talk = Talk(served)

        async def send() -> None:
            for begin in range(0, 10_000, 100):
                await talk.send(*(one(i, SOURCES[i % 4], max_new_tokens=2) for i in range(begin, begin + 100)))

        sender = asyncio.create_task(send())
        await talk.until(*range(10_000))
        await sender
        await talk.finish()
        firsts = {
            source: await stub_of(served).GenerateUnary(asking_whole(source, max_new_tokens=2)) for source in SOURCES
        }
    assert sorted(talk.answers) == list(range(10_000))
    for i, answers in talk.answers.items():
        assert is_last(answers[-1])
        assert talk.text(i)[1] == list(firsts[SOURCES[i % 4]].outputs[0].token_ids)


async def test_no_message_is_read_beyond_the_limit_of_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_many, "MAX_OPEN_REQUESTS", 2)
    async with serving() as served:
        gate = Gate(served.runner)
        talk = Talk(served)
        for i in range(6):
            await talk.send(one(i))
        await asyncio.to_thread(gate.reached.wait)
        await stub_of(served).GetModel(pb.GetModelRequest())
        busy = served.engine.num_running + served.engine.num_waiting
        gate.open()
        await talk.finish()
    assert busy <= 2
    assert all(is_last(talk.answers[i][-1]) for i in range(6))


async def test_deadline_of_a_request_ends_it_alone() -> None:
    clock = FakeClock()
    async with serving(clock=clock) as served:
        gate = Gate(served.runner)
        talk = Talk(served)
        limited = one(1, **ENDLESS)
        limited.timeout_millis = 200
        await talk.send(limited, one(2))
        await asyncio.to_thread(gate.reached.wait)
        clock.advance(0.3)
        gate.open()
        await talk.finish()
    failure = talk.answers[1][-1].failure
    assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "DEADLINE_EXCEEDED")
    assert talk.text(2)[1]


async def test_full_queue_is_a_failure_with_advice() -> None:
    def limits() -> EngineLimits:
        return limits_for(FakeRunner(max_rows=1), max_queued_requests=1)

    async with serving(limits()) as served:
        gate = Gate(served.runner)
        talk = Talk(served)
        await talk.send(one(0))
        await asyncio.to_thread(gate.reached.wait)
        await talk.send(*(one(i) for i in range(1, 6)))
        await talk.until(5)
        gate.open()
        await talk.finish()
    refused = [answers[-1].failure for answers in talk.answers.values() if answers[-1].HasField("failure")]
    assert refused
    for failure in refused:
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "QUEUE_FULL")
        assert failure.retry_after.ToMilliseconds() >= 1


async def test_client_that_vanishes_leaves_nothing_behind() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        talk = Talk(served)
        await talk.send(*(one(i, **ENDLESS) for i in range(20)))
        await asyncio.to_thread(gate.reached.wait)
        # All have begun; the call itself counts too.
        await comes_true(lambda: served.registry.get_sample_value("antiphon_grpc_server_in_flight") == 21)
        talk.call.cancel()
        gate.open()
        # Their records end with the engine's next step.
        await comes_true(lambda: sum(call.method.endswith(":request") for call in served.ended) == 20)
        assert {call.code for call in served.ended if call.method.endswith(":request")} == {"CANCELLED"}
    # `serving` checks that every row and block is free.


async def test_call_that_ends_at_its_deadline_ends_its_requests() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        talk = Talk(served, timeout=0.5)
        await talk.send(one(1, **ENDLESS))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talk.call.read()
        gate.open()
        await served.settled()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_each_request_is_counted_and_logged_with_an_id_of_its_own() -> None:
    async with serving() as served:
        talk = Talk(served, metadata=(("x-request-id", "mine"),))
        await talk.send(one(1), one(2, **BAD))
        await talk.finish()
        await served.settled()
        counted = {
            (sample.labels["method"].partition("/")[2], sample.labels["code"]): sample.value
            for metric in served.registry.collect()
            for sample in metric.samples
            if sample.name == "antiphon_grpc_server_handled_total" and sample.value
        }
        logged = {call.request_id: (call.code, call.model_name, len(call.requests)) for call in served.ended}
    assert counted == {
        ("GenerateMany:request", "OK"): 1,
        ("GenerateMany:request", "INVALID_ARGUMENT"): 1,
        ("GenerateMany", "OK"): 1,
    }
    assert logged == {"mine/1": ("OK", "fake", 1), "mine/2": ("INVALID_ARGUMENT", "fake", 0), "mine": ("OK", "", 0)}


async def test_call_is_ended_when_its_client_reads_no_answer() -> None:
    """Its flow-control window is as small as gRPC allows, so that the answers of a few requests overflow it."""
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
    async with (
        serving(slow_reader_timeout_s=0.3) as served,
        grpc.aio.insecure_channel(served.target, options=window) as channel,
    ):
        stub: Any = InferenceServiceStub(channel)
        stream = stub.GenerateMany()
        for i in range(8):
            await stream.write(sending(*(one(64 * i + j, (30, 30, 31), num_logprobs=20) for j in range(64))))
        assert await stream.read() is not grpc.aio.EOF
        other = await stub_of(served).GenerateUnary(asking_whole())  # a slow reader delays its own call only
        async with asyncio.timeout(60):
            await served.calls.wait_until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(stream)
    assert other.outputs[0].token_ids
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(caught.value).reason == "SLOW_READER"


async def test_message_holds_everything_that_one_window_produced() -> None:
    async with serving(max_messages_per_s=4.0) as served:  # two windows a second with one stream
        talk = Talk(served)
        await talk.send(*(one(i, max_new_tokens=3) for i in range(8)))
        await talk.call.done_writing()
        sizes = [len(response.answers) async for response in talk.call]
    assert sum(sizes) >= 8
    assert len(sizes) <= 3  # the first token of some, then all the rest


async def test_whole_answer_is_written_at_once_if_no_other_can_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_many, "_WHOLE_WINDOW_S", 3600)
    async with serving() as served:
        talk = Talk(served)
        for index in range(3):
            request = one(index)
            request.is_whole = True
            await talk.send(request)
            await talk.until(index)
        await talk.finish()
        assert await talk.call.code() is grpc.StatusCode.OK


async def test_priorities_are_those_of_single_calls() -> None:
    async with serving(limits_for(FakeRunner(max_rows=1))) as served:
        gate = Gate(served.runner)
        talk = Talk(served)
        await talk.send(one(0))
        await asyncio.to_thread(gate.reached.wait)
        batch = one(1)
        batch.request.priority = pb.PRIORITY_BATCH
        wrong = one(3)
        wrong.request.priority = cast("Any", 17)
        await talk.send(batch, one(2), wrong)
        await talk.until(3)
        gate.open()
        await talk.finish()
        ended = [call.request_id.rpartition("/")[2] for call in served.ended if call.method.endswith(":request")]
    assert talk.failure(3).field == "priority"
    assert ended.index("2") < ended.index("1")
    assert Counter(ended) == Counter("0123")


async def test_answered_requests_are_freed_without_garbage_collection() -> None:
    def left(call_id: str) -> list[object]:
        # Not isinstance, which other packages' objects answer with warnings.
        found = [one for one in gc.get_objects() if type(one) in (OpenRequest, SequenceGroup)]
        ids = [one.record.request_id if type(one) is OpenRequest else one.request_id for one in found]
        return [one for one in ids if one.startswith(f"{call_id}/")]

    async with serving() as served:
        gc.collect()
        gc.disable()  # by nothing else in this process meanwhile: tests of a worker run one after the other
        try:
            talk = Talk(served, metadata=(("x-request-id", "freed-at-once"),))
            await talk.send(*(one(i) for i in range(20)), one(20, **BAD))
            await talk.until(*range(21))
            await comes_true(lambda: not left("freed-at-once"))  # after the last turns of the event loop and the engine
        finally:
            gc.enable()
        await talk.finish()
