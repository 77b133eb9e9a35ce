"""Score, Embed, Explain and GetPositions over a real channel, and spans of tagged tokens."""

import dataclasses
from typing import Any

import grpc
import numpy as np
import pytest

from antiphon.architecture.heads import HeadConfig
from antiphon.domain.request import Pooling
from antiphon.rpc.v1.responses import tagged_spans
from antiphon.v1 import inference_pb2 as pb
from tests.explainers import NUM_HEADS, NUM_LAYERS, FakeExplainer
from tests.fakes import BOS_ID, EOS_ID, FakeRunner
from tests.serving import SOURCE, asking_whole, details_of, refusal, serving, stub_of

SOURCE_IDS = pb.TokenIds(ids=SOURCE)


def reads_history(runner: FakeRunner) -> None:
    runner.reads_history = True


async def test_score_returns_the_log_probabilities_of_generate() -> None:
    async with serving(prepare=reads_history) as served:
        stub = stub_of(served)
        written = (await stub.GenerateUnary(asking_whole(num_logprobs=3))).outputs[0]
        target = pb.TokenIds(ids=written.token_ids)
        scored = await stub.Score(pb.ScoreRequest(token_ids=SOURCE_IDS, target_token_ids=target, num_alternatives=3))
    assert list(scored.logprobs) == list(written.logprobs)
    assert scored.score == pytest.approx(written.score)
    assert scored.logprobs[-1].token_id == EOS_ID
    assert (scored.usage.source_tokens, scored.usage.generated_tokens) == (len(SOURCE) + 1, 0)
    assert scored.timing.total.ToNanoseconds() > 0


async def test_score_accepts_text_and_an_empty_target() -> None:
    async with serving(prepare=reads_history) as served:
        stub = stub_of(served)
        ids = (await stub.Tokenize(pb.TokenizeRequest(text="the cat"))).token_ids
        by_text = await stub.Score(pb.ScoreRequest(text="cat", target_text=" the cat"))
        by_ids = await stub.Score(pb.ScoreRequest(text="cat", target_token_ids=pb.TokenIds(ids=[*ids, EOS_ID])))
        empty = await stub.Score(pb.ScoreRequest(text="cat", target_text=""))
    assert [entry.token_id for entry in by_text.logprobs] == [*ids, EOS_ID]
    assert by_text.logprobs == by_ids.logprobs
    assert not any(entry.alternatives for entry in by_text.logprobs)
    assert [entry.token_id for entry in empty.logprobs] == [EOS_ID]


@pytest.mark.parametrize(
    ("wire", "pooling"),
    [
        (pb.POOLING_UNSPECIFIED, Pooling.MEAN),
        (pb.POOLING_MEAN, Pooling.MEAN),
        (pb.POOLING_MAX, Pooling.MAX),
        (pb.POOLING_FIRST, Pooling.FIRST),
    ],
)
async def test_embed_pools_the_states_of_the_encoder(wire: Any, pooling: Pooling) -> None:
    async with serving() as served:
        stub = stub_of(served)
        answer = await stub.Embed(pb.EmbedRequest(token_ids=SOURCE_IDS, pooling=wire))
        unit = await stub.Embed(pb.EmbedRequest(token_ids=SOURCE_IDS, pooling=wire, normalize=True))
        states = served.runner.memory((*SOURCE, EOS_ID))
    expected = {Pooling.MEAN: states.mean(axis=0), Pooling.MAX: states.max(axis=0), Pooling.FIRST: states[0]}[pooling]
    np.testing.assert_allclose(answer.embedding, expected, atol=1e-6)
    np.testing.assert_allclose(unit.embedding, expected / np.linalg.norm(expected), atol=1e-6)
    assert (answer.usage.source_tokens, answer.usage.generated_tokens) == (len(SOURCE) + 1, 0)


async def test_explain_returns_a_map_and_its_entropy_for_each_head() -> None:
    explainer = FakeExplainer()
    async with serving(explainer=explainer) as served:
        answer = await stub_of(served).Explain(pb.ExplainRequest(text="the cat", target_text="the mat"))
        source, target = (served.tokenizer.encode(text) for text in ("the cat", "the mat"))
    assert explainer.asked == [((*source, EOS_ID), (BOS_ID, *target))]
    assert answer.source_tokens[-1] == "</s>"
    assert "".join(answer.source_tokens[:-1]) == " the cat"
    assert answer.target_tokens[0] == "<s>"
    assert "".join(answer.target_tokens[1:]) == " the mat"
    num_source, num_target = len(answer.source_tokens), len(answer.target_tokens)
    shapes = {"encoder_self": (num_source,) * 2, "decoder_self": (num_target,) * 2, "cross": (num_target, num_source)}
    for name, (rows, columns) in shapes.items():
        maps = getattr(answer, name)
        assert [(m.layer, m.head) for m in maps] == [(i, j) for i in range(NUM_LAYERS) for j in range(NUM_HEADS)]
        assert {(m.rows, m.columns, len(m.weights)) for m in maps} == {(rows, columns, rows * columns)}
        expected = [0.0] * NUM_HEADS + [np.log(columns)] * NUM_HEADS
        assert [m.entropy for m in maps] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("longest_target", [1000, 3])
async def test_explain_uses_the_greedy_answer_until_the_maps_would_become_too_many(longest_target: int) -> None:
    explainer = FakeExplainer(longest_target)
    async with serving(explainer=explainer) as served:
        answer = await stub_of(served).Explain(pb.ExplainRequest(token_ids=SOURCE_IDS))
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
        target = [BOS_ID, *expected][:longest_target]
        pieces = [served.tokenizer.piece(token_id) for token_id in target]
    assert len(expected) > 2
    assert explainer.asked == [((*SOURCE, EOS_ID), tuple(target))]
    assert list(answer.target_tokens) == pieces


async def test_explain_of_an_encoder_only_model_reads_a_pair_and_has_no_target() -> None:
    explainer = FakeExplainer()
    async with serving(explainer=explainer, heads=[HeadConfig(task="fill_mask")]) as served:
        answer = await stub_of(served).Explain(pb.ExplainRequest(text="the cat", text_pair="the mat"))
        first, second = (served.tokenizer.encode(text) for text in ("the cat", "the mat"))
        refused = await refusal(stub_of(served).Explain(pb.ExplainRequest(text="a", target_text="b")))
    assert explainer.asked == [((BOS_ID, *first, EOS_ID, *second, EOS_ID), ())]
    assert len(answer.source_tokens) == len(explainer.asked[0][0])
    assert (len(answer.encoder_self), len(answer.decoder_self), len(answer.cross)) == (NUM_LAYERS * NUM_HEADS, 0, 0)
    assert not answer.target_tokens
    assert details_of(refused).field == "target_text"


async def test_get_positions_answers_as_many_positions_as_the_model_has_by_default() -> None:
    async with serving() as served:
        answer = await stub_of(served).GetPositions(pb.GetPositionsRequest())
        three = await stub_of(served).GetPositions(pb.GetPositionsRequest(num_positions=3))
    assert [each.part for each in answer.encodings] == [pb.ARCHITECTURE_ENCODER, pb.ARCHITECTURE_DECODER]
    for whole, first in zip(answer.encodings, three.encodings, strict=True):
        assert (whole.kind, whole.rows, whole.columns) == (pb.POSITION_KIND_SINUSOIDAL, 64, 32)
        assert (first.rows, first.columns, len(first.decay)) == (3, 32, 3)
        assert first.values == whole.values[: 3 * 32]


async def test_tasks_that_the_model_or_its_bundle_lacks_are_unimplemented() -> None:
    def has_no_encoder(runner: FakeRunner) -> None:
        runner.facts = dataclasses.replace(runner.facts, has_encoder=False)

    async with serving(prepare=has_no_encoder) as served:
        stub = stub_of(served)
        for call in (stub.Explain(pb.ExplainRequest(text="a")), stub.Embed(pb.EmbedRequest(text="a"))):
            error = await refusal(call)
            assert (error.code(), details_of(error).reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")


TOO_MANY = pb.TokenIds(ids=[5] * 40)
BAD_REQUESTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("Score", dict(text="a"), "target", "target_text or target_token_ids"),
    ("Score", dict(target_text="a"), "source", "text or token_ids"),
    ("Score", dict(text=" ", target_text="a"), "text", "not empty"),
    ("Score", dict(text="a", target_text="b", num_alternatives=21), "num_alternatives", "between 0 and 20"),
    ("Score", dict(text="a", target_text="b", num_alternatives=-1), "num_alternatives", "between 0 and 20"),
    ("Score", dict(text="a", target_token_ids=TOO_MANY), "target_token_ids", "0 to 32 tokens"),
    ("Score", dict(text="a", target_text="x" * 32), "target_text", "1 to 32 tokens"),
    ("Score", dict(text="a", target_token_ids=pb.TokenIds(ids=[280])), "target_token_ids", "280"),
    ("Embed", dict(), "source", "text or token_ids"),
    ("Embed", dict(token_ids=TOO_MANY), "token_ids", "1 to 32 tokens"),
    ("Embed", dict(token_ids=pb.TokenIds(ids=[280])), "token_ids", "280"),
    ("Embed", dict(text="a", pooling=7), "pooling", "values of Pooling"),
    ("Explain", dict(target_text="a"), "source", "text or token_ids"),
    ("Explain", dict(token_ids=pb.TokenIds(ids=[280]), target_text="a"), "token_ids", "280"),
    ("Explain", dict(text="a", target_text="b", text_pair="c"), "text_pair", "only encoder-only models"),
    ("GetPositions", dict(num_positions=65), "num_positions", "0 to 64"),
    ("Explain", dict(text="a", target_token_ids=pb.TokenIds(ids=[280])), "target_token_ids", "280"),
    ("Explain", dict(text="a", target_token_ids=pb.TokenIds(ids=[5] * 32)), "target_token_ids", "0 to 31 tokens"),
    ("Explain", dict(token_ids=pb.TokenIds(ids=[5] * 32), target_text="a"), "token_ids", "1 to 32 tokens"),
]


@pytest.mark.parametrize(("method", "fields", "field", "message"), BAD_REQUESTS)
async def test_tasks_name_the_field_when_a_request_is_bad(
    method: str, fields: dict[str, Any], field: str, message: str
) -> None:
    async with serving(explainer=FakeExplainer()) as served:
        stub = stub_of(served)
        error = await refusal(getattr(stub, method)(getattr(pb, f"{method}Request")(**fields)))
        assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert message in (error.details() or "")
        unknown = await refusal(getattr(stub, method)(getattr(pb, f"{method}Request")(**{**fields, "model": "nope"})))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND


Tagged = list[tuple[str, str]]
"""Tokens of a text in order, each with its label."""


def spans_of(text: str, tagged: Tagged) -> list[tuple[str, str]]:
    """Return label and text of each span. Tokens are found from left to right."""
    tokens, end = [], 0
    for piece, label in tagged:
        start = text.index(piece, end)
        end = start + len(piece)
        tokens.append(pb.TaggedToken(start=start, end=end, label=label, score=0.5))
    return [(span.label, text[span.start : span.end]) for span in tagged_spans(text, tokens)]


@pytest.mark.parametrize(
    ("text", "tagged", "expected"),
    [
        ("Ada met Bob", [("Ada", "B-PER"), ("met", "O"), ("Bob", "B-PER")], [("PER", "Ada"), ("PER", "Bob")]),
        ("Ada Bob", [("Ada", "B-PER"), ("Bob", "B-PER")], [("PER", "Ada"), ("PER", "Bob")]),
        ("New York", [("New", "B-LOC"), ("York", "I-LOC")], [("LOC", "New York")]),
        ("New York", [("New", "I-LOC"), ("York", "I-PER")], [("LOC", "New"), ("PER", "York")]),
        ("New York", [("New", "LOC"), ("York", "LOC")], [("LOC", "New York")]),
        # The label of a word is that of its first token.
        ("Lovelace", [("Love", "B-PER"), ("lace", "O")], [("PER", "Lovelace")]),
        ("Lovelace", [("Love", "O"), ("lace", "B-PER")], []),
        ("Berlin, too", [("Berlin", "B-LOC"), (",", "O"), ("too", "O")], [("LOC", "Berlin")]),
        # Vocabularies in which the space before a word belongs to it.
        ("in New York", [("in", "O"), (" New", "B-LOC"), (" York", "I-LOC")], [("LOC", "New York")]),
        # Every sign is a word, and so is every character in scripts without spaces; marks belong to their letter.
        ("東京に", [("東", "B-LOC"), ("京", "I-LOC"), ("に", "O")], [("LOC", "東京")]),
        ("cafe\u0301s", [("cafe", "B-LOC"), ("\u0301s", "O")], [("LOC", "cafe\u0301s")]),
    ],
)
def test_spans_are_adjacent_words_of_one_label(text: str, tagged: Tagged, expected: list[tuple[str, str]]) -> None:
    assert spans_of(text, tagged) == expected


def test_tokens_of_one_characters_bytes_are_one_word() -> None:
    tokens = [pb.TaggedToken(start=0, end=1, label=label, score=score) for label, score in (("B-X", 0.9), ("O", 0.1))]
    (span,) = tagged_spans("😀", tokens)
    assert (span.start, span.end, span.label) == (0, 1, "X")
    assert span.score == pytest.approx(0.9)


def test_tokens_without_a_place_in_the_text_are_not_words() -> None:
    tokens = [
        pb.TaggedToken(start=0, end=0, label="B-X", score=1.0),
        pb.TaggedToken(start=0, end=3, label="B-Y", score=1.0),
        pb.TaggedToken(start=3, end=4, label="I-Y", score=1.0),  # a space
    ]
    assert [(span.label, span.start, span.end) for span in tagged_spans("abc ", tokens)] == [("Y", 0, 3)]
