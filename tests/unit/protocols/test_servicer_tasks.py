"""Score, Embed, Explain and GetPositions over a real channel: their answers and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from antiphon.architecture.heads import HeadConfig
from antiphon.domain.request import Pooling
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


async def test_explain_uses_the_greedy_answer_when_no_target_is_given() -> None:
    explainer = FakeExplainer()
    async with serving(explainer=explainer) as served:
        answer = await stub_of(served).Explain(pb.ExplainRequest(token_ids=SOURCE_IDS))
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
        pieces = [served.tokenizer.piece(token_id) for token_id in (BOS_ID, *expected)]
    assert explainer.asked == [((*SOURCE, EOS_ID), (BOS_ID, *expected))]
    assert list(answer.target_tokens) == pieces


async def test_explain_ends_the_greedy_answer_where_the_maps_would_become_too_many() -> None:
    explainer = FakeExplainer(longest_target=3)
    async with serving(explainer=explainer) as served:
        answer = await stub_of(served).Explain(pb.ExplainRequest(token_ids=SOURCE_IDS))
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
    assert len(expected) > 2
    assert explainer.asked == [((*SOURCE, EOS_ID), (BOS_ID, *expected[:2]))]
    assert len(answer.target_tokens) == 3


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


async def test_explain_is_unimplemented_when_the_bundle_has_no_explain_graph() -> None:
    async with serving() as served:
        error = await refusal(stub_of(served).Explain(pb.ExplainRequest(text="a")))
    assert (error.code(), details_of(error).reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")


def has_no_encoder(runner: FakeRunner) -> None:
    runner.facts = replace(runner.facts, has_encoder=False)


async def test_tasks_that_the_model_lacks_are_unimplemented() -> None:
    async with serving(prepare=has_no_encoder) as served:
        error = await refusal(stub_of(served).Embed(pb.EmbedRequest(text="a")))
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
