"""Decoder-only and encoder-only models, step by step over the fake model: prompts, heads, and freed blocks."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.architecture.heads import HeadConfig, Scores
from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.domain.request import Arrival, FinishReason, Pooling, Request, Task
from antiphon.domain.sampling_params import SamplingParams
from antiphon.ops.readout import scores_of
from tests.fakes import EOS_ID, FIRST_WORD_ID, changed, request_of, scored, source_of, stream_of
from tests.parity.transformers_reference import Reference, generate
from tests.unit.engine.step_bench import Bench

WORDS = st.integers(FIRST_WORD_ID, 60)
HEADS = {
    head.task: head
    for head in (
        HeadConfig(task="classify", labels=("low", "middle", "high")),
        HeadConfig(task="tag", labels=("O", "B-X"), scores="sigmoid"),
        HeadConfig(task="fill_mask"),
        HeadConfig(task="pool", transform_width=4),
    )
}


def prompted(name: str, prompt: tuple[int, ...], params: SamplingParams, prefix: tuple[int, ...] = ()) -> Request:
    """Return a request in the servicer's form for a decoder-only model."""
    return changed(
        request_of(name, (), params=params),
        begin_id=prompt[0],
        prefix_ids=(*prompt[1:], *prefix),
        num_prompt_ids=len(prompt),
    )


def reference(bench: Bench, request: Request) -> list[list[int]]:
    """Return the output of transformers' `generate` for a prompt over the fake model's logits."""
    params, begin_id = request.params, request.decoder_input_ids(0)[0]
    model = Reference(lambda target: bench.runner.logits_after((), target), bos_id=begin_id, eos_id=EOS_ID)
    room = bench.runner.facts.max_target_len - 1 - len(request.prefix_ids)
    outputs = generate(
        model,
        prefix=request.prefix_ids,
        max_new_tokens=min(params.max_new_tokens or room, room),
        num_beams=params.beam_width,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens,
    )
    return [ids for ids, _ in outputs]


@st.composite
def prompts(draw: st.DrawFn, name: str) -> Request:
    max_new_tokens = draw(st.none() | st.integers(1, 9))
    params = SamplingParams(
        beam_width=draw(st.sampled_from([1, 1, 3])),
        max_new_tokens=max_new_tokens,
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 2])),
        min_new_tokens=draw(st.sampled_from([0, 1])),
    )
    prompt = tuple(draw(st.lists(WORDS, min_size=1, max_size=24)))
    return prompted(name, prompt, params, tuple(draw(st.lists(WORDS, max_size=3))))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_prompts_in_a_crowd_get_the_outputs_of_each_alone(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    bench = Bench(loop, max_rows=8, num_blocks=200, reads_history=True, has_encoder=False)
    asked = [data.draw(prompts(str(index))) for index in range(data.draw(st.integers(1, 4)))]
    groups = []
    for request in asked:
        groups.append(bench.ask(request))
        for _ in range(data.draw(st.integers(0, 2))):
            bench.step()
    bench.finish()
    assert bench.pool.num_free == bench.pool.num_blocks
    for request, group in zip(asked, groups, strict=True):
        event = bench.output(group)
        assert list(event.token_ids) == reference(bench, request)[0]
        assert 1 + len(request.prefix_ids) + event.num_generated <= bench.runner.facts.max_target_len
    assert bench.sample("prompt_tokens_total") == sum(request.num_prompt_ids for request in asked)


def test_prompts_are_prefilled_within_the_token_budget(loop: asyncio.AbstractEventLoop) -> None:
    """The bench prefills at most 16 tokens in a step, or one longer prompt alone."""
    bench = Bench(loop, max_rows=8, num_blocks=200, reads_history=True, has_encoder=False)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for name, length in (("a", 8), ("b", 8), ("c", 30), ("d", 5)):
        bench.ask(prompted(name, (FIRST_WORD_ID,) * length, dataclasses.replace(params, max_new_tokens=2)))
    bench.finish()
    assert bench.runner.decoded_tokens == [8 + 8, 1 + 1 + 30, 1 + 5, 1]


def test_target_is_scored_after_its_prompt(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, reads_history=True, has_encoder=False)
    prompt, target = (9, 30, 31), (17, 5, EOS_ID)
    request = prompted("score", prompt, SamplingParams())
    group = bench.ask(scored(request, target))
    bench.finish()
    found = [one.logprob for one in bench.output(group).logprobs]
    for index, logprob in enumerate(found):
        logits = bench.runner.logits_after((), (*prompt, *target[:index])).astype(np.float64)
        expected = logits[target[index]] - np.log(np.exp(logits).sum())
        assert logprob == pytest.approx(expected, abs=1e-5)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("prompt_len", "prefix_len", "target_len", "field"),
    [(32, 0, 0, "source"), (31, 1, 0, "prefix"), (31, 0, 2, "target")],
)
def test_prompt_and_output_share_the_length_of_the_model(
    loop: asyncio.AbstractEventLoop, prompt_len: int, prefix_len: int, target_len: int, field: str
) -> None:
    bench = Bench(loop, reads_history=True, has_encoder=False)
    facts = bench.runner.facts
    # As of decoder-only models.
    bench.runner.facts = dataclasses.replace(facts, max_source_len=facts.max_target_len - 1)
    request = prompted("a", (5,) * prompt_len, SamplingParams(), (6,) * prefix_len)
    with pytest.raises(InvalidArgument) as caught:
        bench.ask(scored(request, (7,) * target_len) if target_len else request)
    assert caught.value.field == field


def test_prompt_is_refused_when_it_is_too_large_for_the_pool(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, num_blocks=4, reads_history=True, has_encoder=False)
    with pytest.raises(InvalidArgument, match="source is 20 tokens long; it must be at most 15 tokens long"):
        bench.ask(prompted("a", (5,) * 20, SamplingParams(max_new_tokens=1)))


def test_the_queue_counts_the_tokens_of_prompts(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, reads_history=True, has_encoder=False)
    bench.ask(prompted("a", (5,) * 20, SamplingParams(max_new_tokens=1)))
    assert bench.queue.num_source_tokens == 20
    bench.finish()
    assert bench.queue.num_source_tokens == 0


def reading(name: str, task: Task, picks: tuple[int, ...], length: int = 6, num_fillings: int = 0) -> Request:
    """Return a request for the outputs of a head."""
    source = source_of(target_len=3, length=length, variant=length)
    arrival = Arrival(request_id=name, arrival_s=0.0)
    return Request(arrival=arrival, source_ids=source, task=task, picks=picks, num_fillings=num_fillings)


def embedding(name: str, length: int = 6, *, pooling: Pooling = Pooling.MEAN, normalize: bool = False) -> Request:
    """Return a request for an embedding."""
    source = source_of(target_len=3, length=length, variant=length)
    arrival = Arrival(request_id=name, arrival_s=0.0)
    return Request(task=Task.EMBED, arrival=arrival, source_ids=source, pooling=pooling, normalize=normalize)


def every_reading() -> list[Request]:
    return [
        reading("classify", Task.CLASSIFY, (0,)),
        reading("tag", Task.TAG, (1, 2, 3), length=5),
        reading("fill", Task.FILL_MASK, (4, 2), length=7, num_fillings=5),
        embedding("mean"),
        embedding("states", 4, pooling=Pooling.NONE, normalize=True),
        embedding("pooled", 9, pooling=Pooling.MODEL),
    ]


def read(loop: asyncio.AbstractEventLoop, requests: list[Request]) -> dict[str, tuple[bytes, bytes | None]]:
    """Return the bytes of every readout. The engine must be empty afterwards."""
    bench = Bench(loop, heads=HEADS)
    groups = [bench.ask(request) for request in requests]
    bench.finish()
    assert (bench.pool.num_blocks, bench.stepper.num_running) == (0, 0)
    found = {}
    for group in groups:
        event = bench.output(group)
        assert (event.finish_reason, event.is_last) == (FinishReason.STOP, True)
        assert event.encoder_outputs is not None
        ids = event.encoder_outputs.token_ids
        found[group.request_id] = (event.encoder_outputs.values.tobytes(), None if ids is None else ids.tobytes())
    return found


def test_readouts_are_the_same_bits_alone_and_in_a_crowd(loop: asyncio.AbstractEventLoop) -> None:
    together = read(loop, every_reading())
    alone = [read(loop, [request]) for request in every_reading()]
    assert together == {name: bits for one in alone for name, bits in one.items()}


def test_readouts_are_computed_from_the_states_of_their_own_request(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, heads=HEADS)
    groups = {request.request_id: bench.ask(request) for request in every_reading()}
    bench.finish()
    found = {name: bench.output(group).encoder_outputs for name, group in groups.items()}
    states = {name: bench.runner.memory(group.request.source_ids) for name, group in groups.items()}

    def outputs(name: str, task: str) -> np.ndarray:
        picked = states[name][list(groups[name].request.head_positions)]
        return bench.runner.head_outputs(task, picked).astype(np.float64)  # type: ignore[arg-type]

    softmax = np.exp(outputs("classify", "classify")) / np.exp(outputs("classify", "classify")).sum()
    np.testing.assert_allclose(found["classify"].values, softmax, rtol=1e-6)  # type: ignore[union-attr]
    sigmoid = 1 / (1 + np.exp(-outputs("tag", "tag")))
    np.testing.assert_allclose(found["tag"].values, sigmoid, rtol=1e-6)  # type: ignore[union-attr]
    raw = np.exp(outputs("fill", "fill_mask"))
    shares = raw / raw.sum(axis=1, keepdims=True)
    best = np.argsort(-shares, axis=1, kind="stable")[:, :5]
    assert found["fill"].token_ids.tolist() == best.tolist()  # type: ignore[union-attr]
    np.testing.assert_allclose(found["fill"].values, np.take_along_axis(shares, best, 1), rtol=1e-6)  # type: ignore[union-attr]
    unit = states["states"] / np.linalg.norm(states["states"], axis=1, keepdims=True)
    np.testing.assert_allclose(found["states"].values, unit, rtol=1e-6)  # type: ignore[union-attr]
    np.testing.assert_allclose(found["pooled"].values, outputs("pooled", "pool")[0], rtol=1e-6)  # type: ignore[union-attr]


def test_non_finite_head_outputs_end_only_their_own_requests(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, heads=HEADS)
    head_outputs = bench.runner.head_outputs
    bench.runner.head_outputs = lambda task, states: (  # type: ignore[method-assign]
        head_outputs(task, states) * (np.nan if task == "classify" else 1)
    )
    groups = {request.request_id: bench.ask(request) for request in every_reading()}
    bench.finish()
    ended = {}
    for name, group in groups.items():
        events = loop.run_until_complete(asyncio.wait_for(stream_of(group).collect(), 30))
        ended[name] = events[-1].finish_reason
    assert ended.pop("classify") is FinishReason.ERROR
    assert set(ended.values()) == {FinishReason.STOP}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            request_of("a", source_of(target_len=3)),
            "this is an encoder-only model, which generates nothing; it gives embeddings and has",
        ),
        (
            reading("a", Task.NEXT_SENTENCE, (0,)),
            "this model has no next_sentence head; it gives embeddings and has the heads classify",
        ),
    ],
    ids=["generate", "next_sentence"],
)
def test_tasks_of_an_encoder_are_refused(loop: asyncio.AbstractEventLoop, request_: Request, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Bench(loop, heads=HEADS).ask(request_)


def test_tasks_that_a_decoder_lacks_are_refused_by_name(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, has_encoder=False)
    with pytest.raises(Unsupported, match="this is a decoder-only model, which encodes nothing"):
        bench.ask(embedding("a"))


@pytest.mark.parametrize(("scores", "expected"), [("sigmoid", [0.0, 0.5, 1.0]), ("softmax", [0.0, 0.0, 1.0])])
def test_scores_of_outputs_far_apart_do_not_overflow(scores: Scores, expected: list[float]) -> None:
    found = scores_of(np.array([[-2000.0, 0.0, 2000.0]], np.float32), scores)
    np.testing.assert_array_equal(found, [expected])
