"""NextToken over a real channel with a fake model: its answers and refusals, and the engine beside it."""

import asyncio
import gc
import math
import threading
from typing import Any

import grpc
import pytest

from antiphon.architecture.heads import HeadConfig
from antiphon.runtime.explain import NextScores, NextTokenScorer
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import EOS_ID, FakeRunner
from tests.serving import SOURCE, Gate, asking_whole, details_of, fake_scorer, refusal, serving, stub_of, tiny_tokenizer

SOURCE_IDS = pb.TokenIds(ids=SOURCE)
STAGES = [number for number in pb.SamplingStage.values() if number]


def asking_next(**fields: Any) -> pb.NextTokenRequest:
    return pb.NextTokenRequest(token_ids=SOURCE_IDS, **fields)


def with_options(**options: Any) -> pb.NextTokenRequest:
    return asking_next(options=pb.GenerateOptions(**options))


def reads_history(runner: FakeRunner) -> None:
    runner.reads_history = True


async def test_next_token_returns_the_log_probabilities_of_generate() -> None:
    async with serving(prepare=reads_history, scorer=fake_scorer(reads_history=True)) as served:
        stub = stub_of(served)
        prefix = pb.TokenIds(ids=[50, 51])
        written = (await stub.GenerateUnary(asking_whole(num_logprobs=20, prefix_ids=prefix))).outputs[0]
        assert len(written.token_ids) > 2
        for index, expected in enumerate(written.logprobs):
            found = await stub.NextToken(
                asking_next(
                    options=pb.GenerateOptions(prefix_ids=prefix),
                    generated_ids=pb.TokenIds(ids=written.token_ids[:index]),
                )
            )
            assert [stage.stage for stage in found.stages] == STAGES
            assert list(found.token_ids) == [one.token_id for one in expected.alternatives]
            assert list(found.stages[0].logprobs) == [one.logprob for one in expected.alternatives]
            assert [served.tokenizer.piece(token_id) for token_id in found.token_ids] == list(found.pieces)
            for stage in found.stages[2:]:  # greedy: the chosen token alone
                assert stage.num_kept == 1
                assert stage.logprobs[list(found.token_ids).index(expected.token_id)] == 0.0


async def test_next_token_reports_the_likeliest_tokens_of_the_model_then_those_of_the_last_stage() -> None:
    async with serving(scorer=fake_scorer()) as served:
        stub = stub_of(served)
        plain = await stub.NextToken(with_options(temperature=1.0))
        last_id = plain.token_ids[-1]
        biased = await stub.NextToken(
            asking_next(options=pb.GenerateOptions(temperature=1.0, logit_bias={last_id: 50.0, 60: 40.0}), num_tokens=3)
        )
    assert len(plain.token_ids) == 20
    assert list(plain.stages[0].logprobs) == sorted(plain.stages[0].logprobs, reverse=True)
    assert list(biased.token_ids[:3]) == list(plain.token_ids[:3])
    assert list(biased.token_ids[3:5]) == [last_id, 60]
    assert all(len(stage.logprobs) == len(biased.token_ids) for stage in biased.stages)


async def test_next_token_applies_each_control_at_its_stage() -> None:
    async with serving(scorer=fake_scorer()) as served:
        found = await stub_of(served).NextToken(
            with_options(temperature=0.5, top_k=20, top_p=0.9, min_p=0.5, typical_p=0.6, suppressed_ids=range(4, 30))
        )
        vocab_size = served.tokenizer.vocab_size
    kept = [stage.num_kept for stage in found.stages]
    assert kept[:4] == [vocab_size - 4, vocab_size - 4 - 26, vocab_size - 4 - 26, 20]  # the fake model excludes four
    assert kept[3] > kept[4] > kept[5] > kept[6] > 0
    entropies = [stage.entropy for stage in found.stages]
    assert entropies[0] == pytest.approx(expected_entropy(served.runner), abs=1e-5)
    assert entropies[3:] == sorted(entropies[3:], reverse=True)


def expected_entropy(runner: FakeRunner) -> float:
    logits = [float(one) for one in runner.logits((*SOURCE, EOS_ID), 0)]
    total = sum(math.exp(one) for one in logits)
    return -sum(math.exp(one) / total * (one - math.log(total)) for one in logits if one > -math.inf)


@pytest.mark.parametrize("generated", [[], [60]])
async def test_next_token_forces_the_first_generated_token_only(generated: list[int]) -> None:
    async with serving(scorer=fake_scorer()) as served:
        options = pb.GenerateOptions(forced_first_id=60, temperature=1.0, prefix_ids=pb.TokenIds(ids=[50]))
        found = await stub_of(served).NextToken(asking_next(options=options, generated_ids=pb.TokenIds(ids=generated)))
    assert [stage.num_kept == 1 for stage in found.stages] == [False] + [not generated] * 6
    if not generated:
        assert found.stages[-1].logprobs[list(found.token_ids).index(60)] == 0.0


@pytest.mark.parametrize(("num_generated", "can_end"), [(1, False), (2, True)])
async def test_next_token_counts_generated_tokens_for_the_minimum_length(num_generated: int, can_end: bool) -> None:
    async with serving(scorer=fake_scorer()) as served:
        found = await stub_of(served).NextToken(
            pb.NextTokenRequest(
                token_ids=pb.TokenIds(ids=(1, *SOURCE[1:])),  # the model ends after one token
                options=pb.GenerateOptions(min_new_tokens=2),
                generated_ids=pb.TokenIds(ids=[50] * num_generated),
            )
        )
    assert found.token_ids[0] == EOS_ID
    assert (found.stages[1].logprobs[0] > -math.inf) == can_end


async def test_next_token_keeps_nothing_when_the_constraints_leave_no_token() -> None:
    async with serving(scorer=fake_scorer()) as served:
        options: dict[str, Any] = dict(allowed_ids=[40], suppressed_ids=[40], ignore_eos=True)
        found = await stub_of(served).NextToken(with_options(**options))
        written = await stub_of(served).GenerateUnary(asking_whole(**options))
    assert written.outputs[0].finish_reason == pb.FINISH_REASON_EXHAUSTED
    assert [stage.num_kept for stage in found.stages[1:]] == [0] * 6
    assert len(found.token_ids) == 20


TOO_MANY = pb.TokenIds(ids=[5] * 40)
BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    (dict(), "source", "text or token_ids"),
    (dict(text=" "), "text", "not empty"),
    (dict(token_ids=TOO_MANY), "token_ids", "1 to 32 tokens"),
    (dict(token_ids=pb.TokenIds(ids=[280])), "token_ids", "280"),
    (dict(text="a", num_tokens=1001), "num_tokens", "0 to 1000"),
    (dict(text="a", priority=7), "priority", "PRIORITY_INTERACTIVE"),
    (dict(text="a", source_language="en"), "source_language", "this model takes none"),
    (dict(text="a", options=pb.GenerateOptions(top_p=2.0)), "options.top_p", "at most 1"),
    (dict(text="a", options=pb.GenerateOptions(beam_width=2, temperature=1.0)), "options.temperature", "0"),
    (dict(text="a", options=pb.GenerateOptions(prefix_ids=TOO_MANY)), "options.prefix_ids", "31 tokens"),
    (dict(text="a", options=pb.GenerateOptions(prefix_text="x" * 32)), "options.prefix_text", "0 to 31 tokens"),
    (dict(text="a", options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[280]))), "options.prefix_ids", "280"),
    (dict(text="a", generated_ids=TOO_MANY), "generated_ids", "0 to 31 tokens"),
    (
        dict(
            text="a",
            generated_ids=pb.TokenIds(ids=[5] * 22),
            options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[5] * 10)),
        ),
        "generated_ids",
        "0 to 21 tokens",
    ),
    (dict(text="a", generated_ids=pb.TokenIds(ids=[280])), "generated_ids", "280"),
    (dict(text="a", generated_ids=pb.TokenIds(ids=[5, EOS_ID])), "generated_ids", "end token 2"),
]


@pytest.mark.parametrize(("fields", "field", "message"), BAD_REQUESTS)
async def test_next_token_names_the_field_of_a_bad_request(fields: dict[str, Any], field: str, message: str) -> None:
    async with serving(scorer=fake_scorer()) as served:
        error = await refusal(stub_of(served).NextToken(pb.NextTokenRequest(**fields)))
    assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert message in (error.details() or "")


async def test_next_token_accepts_the_longest_target() -> None:
    async with serving(scorer=fake_scorer()) as served:
        found = await stub_of(served).NextToken(asking_next(generated_ids=pb.TokenIds(ids=[5] * 31)))
    assert found.token_ids


async def test_next_token_is_unimplemented_on_a_gpu_and_for_encoders() -> None:
    async with serving() as served:
        error = await refusal(stub_of(served).NextToken(asking_next()))
    async with serving(heads=[HeadConfig(task="fill_mask")]) as served:
        encoder_error = await refusal(stub_of(served).NextToken(pb.NextTokenRequest(text="a")))
    assert (error.code(), details_of(error).reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")
    assert "runs on a GPU" in (error.details() or "")
    assert (encoder_error.code(), details_of(encoder_error).reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")
    assert "an encoder-only model" in (encoder_error.details() or "")


async def test_next_token_takes_no_blocks_and_no_step_of_the_engine() -> None:
    async with serving(scorer=fake_scorer()) as served:
        gate = Gate(served.runner)
        running = asyncio.ensure_future(stub_of(served).GenerateUnary(asking_whole()))
        await asyncio.to_thread(gate.reached.wait, 60)
        free = served.engine.num_free_blocks
        assert free < served.engine.num_blocks
        assert (await stub_of(served).NextToken(asking_next())).token_ids  # answered although the engine is held
        assert served.engine.num_free_blocks == free
        gate.open()
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
        assert list((await running).outputs[0].token_ids) == expected


class HeldScorer(NextTokenScorer):
    """Scorer that blocks every call until released, and records the calling threads."""

    def __init__(self) -> None:
        super().__init__(lambda: FakeRunner(max_rows=1, vocab_size=tiny_tokenizer().vocab_size))
        self.came, self.release = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()

    def score(self, *arguments: Any) -> NextScores:
        self.threads.add(threading.current_thread())
        self.came.set()
        if not self.release.wait(timeout=60):
            raise AssertionError("the test did not release the scorer")
        return super().score(*arguments)


async def test_next_token_runs_in_one_thread_that_ends_with_the_model() -> None:
    scorer = HeldScorer()
    async with serving(scorer=scorer) as served:
        stub = stub_of(served)
        calls = [stub.NextToken(asking_next()) for _ in range(4)]
        await asyncio.to_thread(scorer.came.wait, 60)
        await stub.Tokenize(pb.TokenizeRequest(text="a"))  # the event loop is free
        scorer.release.set()
        answers = await asyncio.gather(*calls)
    assert len({answer.SerializeToString(deterministic=True) for answer in answers}) == 1
    (thread,) = scorer.threads
    del served, stub, calls
    gc.collect()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
