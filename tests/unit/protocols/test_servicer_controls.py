"""Decoding controls over a real channel, steps of a beam search, and a model's defaults."""

import asyncio
import random
import threading
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from antiphon.bundle.manifest import GenerationDefaults
from antiphon.client import AsyncClient, Beam, BeamStep, Client, Delta, Generation, Options, ServerError
from antiphon.controls.table import EarlyStopping
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.limits import EngineLimits
from antiphon.domain.sampling_params import SamplingParams
from antiphon.rpc.v1.options import default_options, read_options
from antiphon.text.shortlist import Shortlist
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import EOS_ID, FakeClock, FakeRunner
from tests.serving import (
    SOURCE,
    Gate,
    Serving,
    asking,
    asking_whole,
    details_of,
    refusal,
    serving,
    stub_of,
    tiny_tokenizer,
)

SAMPLES: dict[str, Any] = dict(temperature=1.5, num_return_sequences=4, seed=3)
BEAMS: dict[str, Any] = dict(beam_width=4, num_return_sequences=3, seed=3)


def test_read_options_draws_a_new_seed_for_every_request() -> None:
    """There are more requests than seeds drawn at a time; among so large a number, some seed needs all 64 bits."""
    seeds = [read_options(pb.GenerateOptions(), 50).params.seed for _ in range(2000)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) >> 63 == 1


def reads_history(runner: FakeRunner) -> None:
    runner.reads_history = True


def log_softmax(logits: Any) -> Any:
    wide = np.asarray(logits, np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def joined(messages: list[pb.GenerateResponse]) -> dict[int, pb.Output]:
    """Return the outputs that a stream's deltas add up to."""
    outputs: dict[int, pb.Output] = {}
    for message in messages:
        output = outputs.setdefault(message.output_index, pb.Output(output_index=message.output_index))
        assert not output.finish_reason, "no message follows an output's terminal message"
        output.text += message.text_delta
        output.token_ids.extend(message.token_ids)
        output.logprobs.extend(message.logprobs)
        output.finish_reason = message.finish_reason
        if message.HasField("score"):
            assert message.finish_reason
            output.score = message.score
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        SAMPLES,
        {**SAMPLES, "num_logprobs": 2, "stop_strings": ["a", "th"]},
        {**SAMPLES, "presence_penalty": 1.0, "min_new_tokens": 4, "max_new_tokens": 5, "ignore_eos": True},
        BEAMS,
        {**BEAMS, "num_logprobs": 0, "length_penalty": 0.5, "early_stopping": pb.EARLY_STOPPING_FIRST},
        {**BEAMS, "prefix_ids": pb.TokenIds(ids=[7, 8]), "no_repeat_ngram_size": 2},
        {"seed": 3, "num_logprobs": 3, "logit_bias": {40: 3.0}, "suppressed_ids": [41, 42], "repetition_penalty": 1.3},
    ],
)
async def test_streams_add_up_to_the_unary_outputs(options: dict[str, Any]) -> None:
    async with serving(prepare=reads_history) as served:
        stub = stub_of(served)
        messages = [message async for message in stub.Generate(asking(**options))]
        whole = await stub.GenerateUnary(asking_whole(**options))
    count = options.get("num_return_sequences", 1)
    assert [output.output_index for output in whole.outputs] == list(range(count))
    assert joined(messages) == {output.output_index: output for output in whole.outputs}
    assert sum(bool(message.finish_reason) for message in messages) == count
    *others, last = messages
    assert not any(message.HasField("usage") or message.HasField("timing") or message.seed for message in others)
    assert (last.usage, last.seed) == (whole.usage, whole.seed)


async def test_samples_differ_and_the_first_equals_a_single_sample() -> None:
    async with serving() as served:
        stub = stub_of(served)
        several = await stub.GenerateUnary(asking_whole(**SAMPLES))
        alone = await stub.GenerateUnary(asking_whole(**{**SAMPLES, "num_return_sequences": 1}))
    assert len({tuple(output.token_ids) for output in several.outputs}) == 4
    assert several.outputs[0] == alone.outputs[0]
    assert several.usage.generated_tokens == sum(
        len(output.token_ids) + (output.finish_reason == pb.FINISH_REASON_STOP) for output in several.outputs
    )


async def test_hypotheses_are_returned_best_first() -> None:
    async with serving(prepare=reads_history) as served:
        outputs = (await stub_of(served).GenerateUnary(asking_whole(**BEAMS))).outputs
    scores = [output.score for output in outputs]
    assert scores == sorted(scores, reverse=True)
    assert all(output.HasField("score") for output in outputs)


async def test_beam_search_streams_the_common_prefix_of_its_hypotheses() -> None:
    """All beams begin with the forced token: it is streamed while the search is held at its second step."""
    async with serving(prepare=reads_history) as served:
        is_told = threading.Event()

        def hold(num_rows: int) -> None:
            assert not served.runner.decoded_rows or is_told.wait(timeout=60)

        served.runner.before_decode = hold
        messages = []
        async for message in stub_of(served).Generate(asking(**BEAMS, forced_first_id=50)):
            messages.append(message)
            is_told.set()
        whole = await stub_of(served).GenerateUnary(asking_whole(**BEAMS, forced_first_id=50))
    assert (messages[0].output_index, list(messages[0].token_ids)) == (0, [50])
    assert not messages[0].finish_reason
    assert joined(messages) == {output.output_index: output for output in whole.outputs}


async def test_default_options_sent_back_change_nothing() -> None:
    async with serving() as served:
        stub = stub_of(served)
        plain = await stub.GenerateUnary(asking_whole())
        spelled_out = await stub.GenerateUnary(
            pb.GenerateUnaryRequest(token_ids=pb.TokenIds(ids=SOURCE), options=default_options())
        )
    assert plain.outputs == spelled_out.outputs


@pytest.mark.parametrize("first", range(4, 31, 3))
async def test_stop_string_ends_the_output_and_is_never_partly_sent(first: int) -> None:
    """Return two characters of the answer that come from different tokens."""
    async with serving() as served:
        stub = stub_of(served)
        plain = (await stub.GenerateUnary(asking_whole((20, first)))).outputs[0]
        stop = plain.text[5:7]
        options: dict[str, Any] = dict(stop_strings=["not there", stop])
        messages = [message async for message in stub.Generate(asking((20, first), **options))]
        whole = (await stub.GenerateUnary(asking_whole((20, first), **options))).outputs[0]
    expected = plain.text[: plain.text.index(stop)]
    assert whole.text == expected
    assert joined(messages)[0] == whole
    sent = ""
    for message in messages:
        sent += message.text_delta
        assert expected.startswith(sent)
    assert whole.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    decoded = served.tokenizer.decode(list(whole.token_ids))
    assert decoded.startswith(expected + stop), "the ids hold the stop string"
    before = served.tokenizer.stream().push(list(whole.token_ids)[:-1])
    assert stop not in before, "the ids end with the token that completed it"


async def test_held_back_text_is_sent_when_it_does_not_become_a_stop_string() -> None:
    async with serving() as served:
        stub = stub_of(served)
        plain = (await stub.GenerateUnary(asking_whole())).outputs[0]
        held = (await stub.GenerateUnary(asking_whole(stop_strings=[plain.text[-2:] + "never"]))).outputs[0]
    assert held == plain


async def test_stop_id_ends_the_output_and_is_omitted_but_scored() -> None:
    async with serving() as served:
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
        output = (await stub_of(served).GenerateUnary(asking_whole(stop_ids=[expected[4]], num_logprobs=0))).outputs[0]
    assert list(output.token_ids) == expected[:4]
    assert output.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert [entry.token_id for entry in output.logprobs] == expected[:5]


async def test_text_continues_the_prefix() -> None:
    async with serving() as served:
        stub = stub_of(served)
        ids = (await stub.Tokenize(pb.TokenizeRequest(text="the cat"))).token_ids
        by_text = (await stub.GenerateUnary(asking_whole(prefix_text=" the  cat "))).outputs[0]
        by_ids = (await stub.GenerateUnary(asking_whole(prefix_ids=pb.TokenIds(ids=ids)))).outputs[0]
        messages = [message async for message in stub.Generate(asking(prefix_text="the cat"))]
        expected, _ = served.runner.answer((*SOURCE, EOS_ID), prefix_len=len(ids))
    assert by_text == by_ids == joined(messages)[0]
    assert list(by_text.token_ids) == expected
    assert f"the cat{by_text.text}" == served.tokenizer.decode([*ids, *expected])


async def test_continuation_keeps_the_space_after_the_prefix() -> None:
    """The first word of an output loses its leading space, but not the first word after a prefix."""
    (word,) = tiny_tokenizer().encode("the")
    async with serving() as served:
        stub = stub_of(served)
        first = (await stub.GenerateUnary(asking_whole(forced_first_id=word, max_new_tokens=1))).outputs[0]
        later = (
            await stub.GenerateUnary(asking_whole(forced_first_id=word, max_new_tokens=1, prefix_text="cat"))
        ).outputs[0]
    assert (first.text, later.text) == ("the", " the")
    assert list(first.token_ids) == list(later.token_ids) == [word]


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("cat", " the"),
        ("cat ", "the"),
        ("cat \n", "the"),
        (" cat\u00a0", "the"),
        ("ca", " the"),
        ("", "the"),
        (" ", "the"),
    ],
)
async def test_prefix_text_and_text_join_with_one_space(prefix: str, text: str) -> None:
    """Regression: a prefix that ended in white space was followed by a second space."""
    (word,) = tiny_tokenizer().encode("the")
    several: dict[str, Any] = dict(num_return_sequences=3, temperature=1.0)
    async with serving() as served:
        stub = stub_of(served)
        given: dict[str, Any] = dict(forced_first_id=word, max_new_tokens=1, prefix_text=prefix)
        whole = await stub.GenerateUnary(asking_whole(**given, **several))
        streamed = [message async for message in stub.Generate(asking(**given))]
        stopped = await stub.GenerateUnary(asking_whole(**given, stop_strings=["the"]))
        spaced = await stub.GenerateUnary(asking_whole(**given, stop_strings=[" the"]))
    assert [output.text for output in whole.outputs] == [text] * 3
    assert joined(streamed)[0].text == text
    assert stopped.outputs[0].text == text.removesuffix("the")
    assert spaced.outputs[0].text == text.removesuffix(" the")


async def test_text_that_continues_the_last_word_of_the_prefix_is_complete() -> None:
    async with serving() as served:
        answers = [
            await stub_of(served).GenerateUnary(asking_whole(forced_first_id=20, max_new_tokens=1, prefix_text=prefix))
            for prefix in ("ca", "ca ")
        ]
    assert [answer.outputs[0].text for answer in answers] == [tiny_tokenizer().piece(20)] * 2


async def test_logprobs_are_those_of_the_model_and_score_is_their_sum() -> None:
    async with serving() as served:
        output = (await stub_of(served).GenerateUnary(asking_whole(num_logprobs=3, logit_bias={50: 50.0}))).outputs[0]
        expected = [log_softmax(served.runner.logits((*SOURCE, EOS_ID), position)) for position in range(10)]
    assert [entry.token_id for entry in output.logprobs] == [*output.token_ids, EOS_ID]
    assert set(output.token_ids) == {50}
    for entry, row in zip(output.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-5)
        assert entry.alternatives[0].token_id == entry.token_id
        for other in entry.alternatives:
            assert other.logprob == pytest.approx(row[other.token_id], abs=1e-5)
    assert output.score == pytest.approx(sum(entry.logprob for entry in output.logprobs))


async def test_time_limit_ends_the_answer_with_the_output_so_far() -> None:
    clock = FakeClock()
    async with serving(clock=clock) as served:
        gate = Gate(served.runner)
        call = asyncio.ensure_future(stub_of(served).GenerateUnary(asking_whole(time_limit_millis=1500)))
        await asyncio.to_thread(gate.reached.wait, 60)
        clock.advance(1.6)
        gate.open()
        output = (await call).outputs[0]
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
    assert output.finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert list(output.token_ids) == expected[: len(output.token_ids)]
    assert len(output.token_ids) < len(expected)


async def test_output_is_exhausted_when_no_token_is_allowed() -> None:
    async with serving() as served:
        options: dict[str, Any] = dict(allowed_ids=[40], suppressed_ids=[40], ignore_eos=True)
        output = (await stub_of(served).GenerateUnary(asking_whole(**options))).outputs[0]
    assert (output.finish_reason, list(output.token_ids)) == (pb.FINISH_REASON_EXHAUSTED, [])


def drawn_options(dice: random.Random) -> dict[str, Any]:
    """Draw a few random controls, most of them within range."""
    ids = [dice.randrange(4, 285) for _ in range(3)]
    choices: dict[str, list[Any]] = {
        "max_new_tokens": [0, 1, 5, 20, 1000],
        "min_new_tokens": [0, 3, 30],
        "temperature": [0.0, 0.7, 1.0, 101.0],
        "top_k": [0, 1, 5],
        "top_p": [0.1, 1.0, 1.5],
        "min_p": [0.0, 0.2],
        "typical_p": [0.3, 1.0],
        "num_return_sequences": [1, 2, 4, 9],
        "beam_width": [1, 2, 4, 9],
        "length_penalty": [-1.0, 1.0, 2.0],
        "early_stopping": [0, 1, 2, 3, 4],
        "repetition_penalty": [0.5, 1.0, 1.5],
        "presence_penalty": [-1.0, 1.0],
        "frequency_penalty": [-1.0, 1.0],
        "no_repeat_ngram_size": [0, 1, 3],
        "logit_bias": [{ids[0]: 2.0, ids[1]: -1e6}],
        "prefix_text": ["", "the cat"],
        "prefix_ids": [pb.TokenIds(), pb.TokenIds(ids=ids[:2])],
        "forced_first_id": [ids[0], EOS_ID],
        "suppressed_ids": [ids[:2]],
        "allowed_ids": [ids],
        "stop_ids": [ids[1:]],
        "stop_strings": [["a"], ["the", " t"], [""]],
        "ignore_eos": [False, True],
        "num_logprobs": [0, 3, 21],
    }
    names = dice.sample(sorted(choices), dice.choice([1, 2, 3, 5]))
    return {name: dice.choice(choices[name]) for name in names} | {"seed": dice.randrange(2**64)}


async def test_shortlist_makes_the_vocabulary_of_a_request_by_its_source() -> None:
    """Two sources of the same batch have different candidates; the others' answers stay as they are."""
    num_ids = tiny_tokenizer().vocab_size
    pairs = {9: (40, 41, 45), 30: (41, 50, 51), 31: (), 32: (60, 70)}
    sources, targets = zip(*((source, target) for source, ids in pairs.items() for target in ids), strict=True)
    shortlist = Shortlist.of_pairs(sources, targets, num_sources=num_ids, always=(20, 21))
    candidates = {(9, 30, 31): {20, 21, 40, 41, 45, 50, 51}, (9, 32): {20, 21, 40, 41, 45, 60, 70}}
    async with serving(prepare=reads_history, shortlist=shortlist) as served:
        stub = stub_of(served)
        for options in (dict(num_logprobs=3), dict(num_logprobs=3, forced_first_id=99), BEAMS):
            asked = [asking_whole(ids, use_shortlist=True, **options) for ids in candidates]
            answers = await asyncio.gather(*(stub.GenerateUnary(one) for one in [*asked, asking_whole(**options)]))
            for answer, (ids, allowed) in zip(answers, candidates.items(), strict=False):
                expected = allowed | {EOS_ID} | ({99} if "forced_first_id" in options else set())
                assert answer.usage.candidate_tokens == len(expected)
                assert {token_id for output in answer.outputs for token_id in output.token_ids} <= expected
                history = [1]
                for one in answer.outputs[0].logprobs:
                    logits = served.runner.logits_after((*ids, EOS_ID), history)[sorted(expected)]
                    assert one.logprob == pytest.approx(
                        log_softmax(logits)[sorted(expected).index(one.token_id)], abs=1e-5
                    )
                    assert {other.token_id for other in one.alternatives} <= expected
                    history.append(one.token_id)
            assert answers[-1].usage.candidate_tokens == 0
            alone = await stub.GenerateUnary(asking_whole(**options))
            assert [list(output.token_ids) for output in alone.outputs] == [
                list(output.token_ids) for output in answers[-1].outputs
            ]


async def test_shortlist_is_refused_by_name_where_the_model_has_none() -> None:
    async with serving() as served:
        error = await refusal(stub_of(served).GenerateUnary(asking_whole(use_shortlist=True)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error).field == "options.use_shortlist"
    assert "the model has no shortlist" in (error.details() or "")


async def test_any_controls_get_equal_unary_and_streamed_answers_or_a_named_refusal() -> None:
    """Many requests in one batch: none fails internally, and each stream adds up to the unary answer."""
    dice = random.Random(4)
    requests = [((dice.randrange(4, 20), 40 + i % 50), drawn_options(dice)) for i in range(300)]

    async def ask(stub: Any, ids: tuple[int, ...], options: dict[str, Any]) -> str | None:
        try:
            whole = await stub.GenerateUnary(asking_whole(ids, **options))
        except grpc.aio.AioRpcError as error:
            return details_of(error).field or f"{error.code()} for {options}"
        messages = [message async for message in stub.Generate(asking(ids, **options))]
        assert joined(messages) == {output.output_index: output for output in whole.outputs}, options
        assert messages[-1].usage == whole.usage
        return None

    limits = EngineLimits(max_num_seqs=8, max_queue_time_s=None, max_queued_requests=len(requests))
    async with serving(limits, prepare=reads_history) as served:
        fields = await asyncio.gather(*(ask(stub_of(served), ids, options) for ids, options in requests))
    refused = [field for field in fields if field is not None]
    assert [field for field in refused if not field.startswith("options.")] == []
    assert len(requests) / 5 < len(refused) < len(requests) * 4 / 5


VOCAB_SIZE = 100
BEAM_DEFAULTS = GenerationDefaults(
    beam_width=4, length_penalty=0.6, early_stopping="first", max_new_tokens=60, suppressed_ids=(7,), forced_first_id=9
)
SAMPLING_DEFAULTS = GenerationDefaults(temperature=0.7, top_k=50, top_p=0.9)


def params(generation: GenerationDefaults, **given: Any) -> SamplingParams:
    return read_options(pb.GenerateOptions(seed=1, **given), VOCAB_SIZE, generation).params


def test_absent_options_get_the_defaults_of_the_model() -> None:
    expected = SamplingParams(
        seed=1, beam_width=4, length_penalty=0.6, early_stopping=EarlyStopping.FIRST, max_new_tokens=60,
        suppressed_ids=(7,), forced_first_id=9,
    )  # fmt: skip
    assert params(BEAM_DEFAULTS) == expected


def test_option_replaces_the_default_of_the_model() -> None:
    found = params(BEAM_DEFAULTS, max_new_tokens=5, suppressed_ids=[8], length_penalty=1.5)
    assert (found.max_new_tokens, found.suppressed_ids, found.length_penalty) == (5, (8,), 1.5)
    assert found.beam_width == 4


@pytest.mark.parametrize(
    "given", [{"temperature": 0.8}, {"beam_width": 1}, {"stop_strings": ["."]}, {"num_logprobs": 2}]
)
def test_options_that_exclude_beams_drop_the_defaults_of_beams(given: dict[str, Any]) -> None:
    found = params(BEAM_DEFAULTS, **given)
    assert (found.beam_width, found.length_penalty, found.early_stopping) == (1, 1.0, EarlyStopping.HEURISTIC)
    assert (found.max_new_tokens, found.suppressed_ids, found.forced_first_id) == (60, (7,), 9)


def test_beams_drop_a_default_of_samples_and_a_prefix_the_forced_first_token() -> None:
    assert params(SAMPLING_DEFAULTS, beam_width=3) == SamplingParams(seed=1, beam_width=3)
    found = params(BEAM_DEFAULTS, prefix_ids=pb.TokenIds(ids=[5]))
    assert (found.forced_first_id, found.beam_width) == (None, 4)


def test_min_new_tokens_drops_a_lower_default_limit_and_keeps_what_it_needs() -> None:
    found = params(BEAM_DEFAULTS, min_new_tokens=80, length_penalty=0.9)
    assert (found.max_new_tokens, found.beam_width, found.length_penalty) == (None, 4, 0.9)


def test_options_that_exclude_each_other_are_refused_with_any_defaults() -> None:
    with pytest.raises(InvalidArgument, match=r"options\.temperature.*beam_width is above 1"):
        params(SAMPLING_DEFAULTS, temperature=1.0, beam_width=2)


def test_get_model_reports_defaults_that_change_nothing_when_sent_back() -> None:
    reported = default_options(BEAM_DEFAULTS)
    assert (reported.beam_width, reported.early_stopping) == (4, pb.EARLY_STOPPING_FIRST)
    reported.seed = 1
    assert read_options(reported, VOCAB_SIZE, BEAM_DEFAULTS).params == params(BEAM_DEFAULTS)


THREE_BEAMS: dict[str, Any] = dict(beam_width=3, num_return_sequences=2, seed=3)


def steps_of(**options: Any) -> tuple[pb.GenerateRequest, pb.GenerateUnaryRequest]:
    """Return requests for a stream and for a unary answer that report their steps."""
    streamed, whole = asking(**options), asking_whole(**options)
    streamed.report_beam_steps = whole.report_beam_steps = True
    return streamed, whole


async def whole_answer(served: Serving) -> pb.GenerateUnaryResponse:
    return await stub_of(served).GenerateUnary(steps_of(**THREE_BEAMS)[1])


async def many(served: Serving, *requests: pb.ManyRequest) -> list[pb.ManyAnswer]:
    """Return all answers of one call of many requests."""
    call: Any = stub_of(served).GenerateMany()
    await call.write(pb.GenerateManyRequest(requests=requests))
    await call.done_writing()
    return [answer async for response in call for answer in response.answers]


async def test_unary_answer_has_the_steps_that_lead_to_its_outputs() -> None:
    async with serving(prepare=reads_history) as served:
        answer = await whole_answer(served)
        plain = await stub_of(served).GenerateUnary(asking_whole(**THREE_BEAMS))
    assert (list(answer.outputs), answer.seed) == (list(plain.outputs), plain.seed)
    assert not plain.beam_steps
    assert [len(step.live) for step in answer.beam_steps[:-1]] == [3] * (len(answer.beam_steps) - 1)
    assert not any(beam.HasField("score") for step in answer.beam_steps for beam in step.live)
    scores = sorted((beam.score for step in answer.beam_steps for beam in step.finished), reverse=True)
    assert scores[:2] == [output.score for output in answer.outputs]


async def test_stream_has_the_steps_of_the_unary_answer_in_its_last_message() -> None:
    request, _ = steps_of(**THREE_BEAMS)
    async with serving(prepare=reads_history) as served:
        *others, last = [message async for message in stub_of(served).Generate(request)]
        whole = await whole_answer(served)
    assert not any(message.beam_steps for message in others)
    assert last.beam_steps == whole.beam_steps
    assert last.HasField("usage")


@pytest.mark.parametrize("is_whole", [False, True])
async def test_answer_of_many_has_the_steps_of_the_unary_answer(is_whole: bool) -> None:
    request, _ = steps_of(**THREE_BEAMS)
    async with serving(prepare=reads_history) as served:
        *others, last = await many(served, pb.ManyRequest(id=1, request=request, is_whole=is_whole))
        whole = await whole_answer(served)
    assert not any(answer.delta.beam_steps for answer in others)
    assert (last.whole if is_whole else last.delta).beam_steps == whole.beam_steps


@pytest.mark.parametrize("options", [{}, {"beam_width": 1}, {"temperature": 1.0, "num_return_sequences": 2}])
async def test_steps_of_a_request_without_beams_are_refused(options: dict[str, Any]) -> None:
    streamed, whole = steps_of(**options)
    async with serving() as served:
        stub = stub_of(served)
        for error in (await refusal(stub.Generate(streamed)), await refusal(stub.GenerateUnary(whole))):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(error).field == "report_beam_steps"
            assert "beam_width" in (error.details() or "")
        (answer,) = await many(served, pb.ManyRequest(id=1, request=streamed))
    assert answer.failure.field == "report_beam_steps"


async def test_steps_of_a_search_by_the_models_default_are_reported() -> None:
    (_, request), (_, explicit) = steps_of(), steps_of(beam_width=3)
    async with serving(prepare=reads_history, generation=GenerationDefaults(beam_width=3)) as served:
        stub = stub_of(served)
        answer, expected = await stub.GenerateUnary(request), await stub.GenerateUnary(explicit)
        for options in ({"beam_width": 1}, {"temperature": 1.0}):  # which replace the default
            request.options.CopyFrom(pb.GenerateOptions(**options))
            error = await refusal(stub.GenerateUnary(request))
            assert details_of(error).field == "report_beam_steps"
    assert len(answer.beam_steps[0].live) == 3
    assert answer.beam_steps == expected.beam_steps


def as_steps(steps: Any) -> tuple[BeamStep, ...]:
    """Return the client's form of reported steps."""

    def beams(messages: Any) -> tuple[Beam, ...]:
        return tuple(
            Beam(
                parent=one.parent,
                token_id=one.token_id,
                total_logprob=one.total_logprob,
                score=one.score if one.HasField("score") else None,
            )
            for one in messages
        )

    return tuple(BeamStep(live=beams(step.live), finished=beams(step.finished)) for step in steps)


async def test_clients_return_the_steps_and_the_blocks_of_a_search() -> None:
    options = Options(**THREE_BEAMS)

    def ask(target: str) -> tuple[list[Delta], list[Generation]]:
        with Client(target) as client:
            deltas = list(client.generate((9, 30, 31), options, report_beam_steps=True))
            return deltas, client.generate_outputs((9, 30, 31), options, report_beam_steps=True)

    async with serving(prepare=reads_history) as served, AsyncClient(served.target) as client:
        answer = await whole_answer(served)
        deltas = [delta async for delta in client.generate((9, 30, 31), options, report_beam_steps=True)]
        outputs = await client.generate_outputs((9, 30, 31), options, report_beam_steps=True)
        others = await asyncio.to_thread(ask, served.target)
        plain = await client.generate_outputs((9, 30, 31), options)
        with pytest.raises(ServerError, match="report_beam_steps is True"):
            await client.generate_outputs((9, 30, 31), report_beam_steps=True)
    expected = as_steps(answer.beam_steps)
    for found in (deltas, others[0]):
        assert [delta.beam_steps for delta in found] == [()] * (len(found) - 1) + [expected]
    for generations in (outputs, others[1]):
        assert [one.beam_steps for one in generations] == [expected] * 2
        assert generations[0].usage.cache_blocks == answer.usage.cache_blocks > 0
    assert [one.beam_steps for one in plain] == [(), ()]
