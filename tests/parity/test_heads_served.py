"""Encoder-only models over real gRPC: answers equal those of transformers' pipelines for the same checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers

from antiphon.bundle.manifest import load_bundle
from antiphon.client import AsyncClient, ServerError
from antiphon.runtime.native import EncoderRunner
from antiphon.v1 import inference_pb2 as pb
from tests.integration.process import antiphon
from tests.parity.head_bundles import Imported, import_heads, serving

TEXTS = ("the big cat sat on the red mat", "a dog", "cats, dogs; the small blue mat!", "the the the")
CLOSE: dict[str, Any] = dict(rel=2e-4, abs=2e-5)


@pytest.fixture(scope="module")
def bundles() -> dict[str, Imported]:
    return import_heads()


@pytest.mark.parametrize("kind", ["classify", "one_label", "several_labels", "regression"])
async def test_labels_equal_those_of_the_pipeline(bundles: dict[str, Imported], kind: str) -> None:
    pipeline = bundles[kind].pipeline("text-classification", top_k=None)
    async with serving(bundles, kind) as served:
        found = await asyncio.gather(*(served.client.classify(text) for text in TEXTS))
        pair = await served.client.classify(TEXTS[0], pair=TEXTS[1], top_k=1)
    for text, answer in zip(TEXTS, found, strict=True):
        check_labels(answer.labels, pipeline([text])[0])
    check_labels(pair.labels, pipeline([{"text": TEXTS[0], "text_pair": TEXTS[1]}])[0][:1])


def check_labels(found: Any, expected: list[dict[str, Any]]) -> None:
    assert [one.label for one in found] == [one["label"] for one in expected]
    assert [one.score for one in found] == pytest.approx([one["score"] for one in expected], **CLOSE)


async def test_fill_mask_answers_equal_those_of_the_pipeline(bundles: dict[str, Imported]) -> None:
    original = bundles["pretraining"]
    model = transformers.BertForMaskedLM.from_pretrained(original.folder)
    pipeline = dataclasses.replace(original, model=model).pipeline("fill-mask", top_k=4)
    texts = ("the [MASK] sat on the mat", "a [MASK] dog ran on [MASK]")
    async with serving(bundles, "pretraining") as served:
        found = await asyncio.gather(*(served.client.fill_mask(text, top_k=4) for text in texts))
    for text, answer in zip(texts, found, strict=True):
        expected = pipeline(text)
        expected = expected if text.count("[MASK]") > 1 else [expected]
        ids = bundles["pretraining"].tokenizer(text)["input_ids"]
        assert [place.position for place in answer.places] == [i for i, token in enumerate(ids) if token == 4]
        for place, proposals in zip(answer.places, expected, strict=True):
            assert [one.token_id for one in place.fillings] == [one["token"] for one in proposals]
            assert [one.score for one in place.fillings] == pytest.approx([one["score"] for one in proposals], **CLOSE)
            assert [one.text for one in place.fillings] == [one["token_str"] for one in proposals]


async def test_next_sentence_scores_equal_those_of_the_original(bundles: dict[str, Imported]) -> None:
    original = bundles["pretraining"]
    async with serving(bundles, "pretraining") as served:
        found = await served.client.classify(TEXTS[0], pair=TEXTS[2], next_sentence=True)
    with torch.no_grad():
        made = original.model(**original.tokenizer(TEXTS[0], TEXTS[2], return_tensors="pt"))
    scores = made.seq_relationship_logits.softmax(dim=-1)[0].tolist()
    assert {one.label: one.score for one in found.labels} == {
        "is_next": pytest.approx(scores[0], **CLOSE),
        "not_next": pytest.approx(scores[1], **CLOSE),
    }
    assert found.usage.source_tokens == len(original.tokenizer(TEXTS[0], TEXTS[2])["input_ids"])


async def test_tags_and_spans_equal_those_of_the_pipeline(bundles: dict[str, Imported]) -> None:
    """Offsets count code points of the sent text; the pipeline's aggregation `first` joins words to spans."""
    texts = (*TEXTS, "the  big café cat\u0301s, dog", "x" * 3)
    each = bundles["tag"].pipeline("token-classification", ignore_labels=[])
    async with serving(bundles, "tag") as served:
        found = await asyncio.gather(*(served.client.tag(text) for text in texts))
    assert len({token.label for answer in found for token in answer.tokens}) > 1
    for text, answer in zip(texts, found, strict=True):
        expected = each(text)
        shown = [(one.start, one.end, one.label) for one in answer.tokens]
        assert shown == [(one["start"], one["end"], one["entity"]) for one in expected]
        assert [one.score for one in answer.tokens] == pytest.approx([one["score"] for one in expected], **CLOSE)
        check_spans(answer, bundles["tag"].pipeline("token-classification", aggregation_strategy="first")(text))


def check_spans(answer: Any, expected: list[dict[str, Any]]) -> None:
    assert [(one.start, one.end, one.label) for one in answer.spans] == [
        (one["start"], one["end"], one["entity_group"]) for one in expected
    ]
    assert [one.score for one in answer.spans] == pytest.approx([one["score"] for one in expected], **CLOSE)


async def test_embeddings_equal_the_states_of_the_original(bundles: dict[str, Imported]) -> None:
    original = bundles["pretraining"]
    with torch.no_grad():
        made = original.model.bert(**original.tokenizer(TEXTS[0], TEXTS[1], return_tensors="pt"))
    states = made.last_hidden_state[0].numpy()
    async with serving(bundles, "pretraining") as served:

        async def embed(**settings: Any) -> Any:
            return await served.client.embed(TEXTS[0], pair=TEXTS[1], **settings)

        np.testing.assert_allclose((await embed(pooling="none")).per_token, states, atol=2e-5)
        np.testing.assert_allclose((await embed()).vector, states.mean(axis=0), atol=2e-5)
        np.testing.assert_allclose((await embed(pooling="first")).vector, states[0], atol=2e-5)
        pooled = made.pooler_output[0].numpy()
        np.testing.assert_allclose((await embed(pooling="model")).vector, pooled, atol=2e-5)
        unit = pooled / np.linalg.norm(pooled)
        np.testing.assert_allclose((await embed(pooling="model", normalize=True)).vector, unit, atol=2e-5)


async def ask_everything(client: AsyncClient) -> list[Any]:
    """Make every call of a pre-training model concurrently."""
    asked: list[Any] = [client.fill_mask(text.replace("the", "[MASK]"), top_k=9) for text in TEXTS if "the" in text]
    asked += [client.classify(text, pair=TEXTS[1], next_sentence=True) for text in TEXTS]
    asked += [client.embed(text, pooling=pooling) for text in TEXTS for pooling in ("mean", "none")]
    return asked


async def test_answers_are_bit_identical_alone_and_in_a_crowd(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "pretraining") as served:
        alone = [comparable(await one) for one in await ask_everything(served.client)]
        together = await asyncio.gather(*await ask_everything(served.client))
        assert alone == list(map(comparable, together))


def test_states_and_outputs_of_heads_are_bit_identical_alone_and_in_a_crowd(bundles: dict[str, Imported]) -> None:
    """Sources of different lengths and types are encoded in one run and in separate runs, and so are heads run."""
    runner = EncoderRunner(load_bundle(bundles["pretraining"].bundle), max_rows=8, threads=1)
    dice = np.random.default_rng(3)
    sources = [dice.integers(5, 19, length).tolist() for length in (1, 31, 7, 16, 40)]
    types = [[0] * (len(source) // 2) + [1] * (len(source) - len(source) // 2) for source in sources]
    together = runner.encode(sources, [], type_ids=types).memory
    alone = [runner.encode([source], [], type_ids=[kinds]).memory for source, kinds in zip(sources, types, strict=True)]
    assert together is not None
    np.testing.assert_array_equal(together, np.concatenate([states for states in alone if states is not None]))
    for task in runner.facts.heads:
        outputs = runner.run_head(task, together)
        np.testing.assert_array_equal(
            outputs, np.concatenate([runner.run_head(task, together[[row]]) for row in range(len(together))])
        )


def comparable(answer: Any) -> Any:
    return next(getattr(answer, name) for name in ("places", "labels", "vector") if hasattr(answer, name))


async def test_refusals_name_the_field_or_the_abilities_of_the_model(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "pretraining") as served:
        client = served.client
        await check_refused(client.generate_text("a cat"), "UNIMPLEMENTED", "an encoder-only model")
        await check_refused(client.score("a cat", "a dog"), "UNIMPLEMENTED", "an encoder-only model")
        await check_refused(
            client.tag("a cat"), "UNIMPLEMENTED", "no tag head; it gives embeddings and has the heads fill"
        )
        await check_refused(client.fill_mask("a cat"), "INVALID_ARGUMENT", "with [MASK], token id 4, once", "text")
        await check_refused(client.fill_mask([5, 6]), "INVALID_ARGUMENT", "without a mask token", "token_ids")
        await check_refused(client.fill_mask("[MASK]", top_k=101), "INVALID_ARGUMENT", "0 to 100", "top_k")
        await check_refused(
            client.classify("a cat", next_sentence=True), "INVALID_ARGUMENT", "TASK_NEXT_SENTENCE", "text_pair"
        )
        await check_refused(client.embed("cat " * 50), "INVALID_ARGUMENT", "52 tokens long", "text")
        described = await client.get_model()
    assert described.architecture == pb.ARCHITECTURE_ENCODER
    assert described.mask_token == "[MASK]"
    assert not described.HasField("cache")
    tasks = {one.task: list(one.labels) for one in described.tasks}
    assert tasks == {pb.TASK_FILL_MASK: [], pb.TASK_NEXT_SENTENCE: ["is_next", "not_next"], pb.TASK_POOL: []}
    assert (described.limits.max_source_len, described.limits.max_target_len) == (40, 0)


async def check_refused(call: Any, code: str, words: str, field: str | None = None) -> None:
    with pytest.raises(ServerError) as caught:
        await call
    assert caught.value.code is grpc.StatusCode[code]
    assert words in caught.value.message
    assert caught.value.field == field


async def test_commands_print_one_line_for_each_input_line(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "pretraining") as served:
        where = ("--target", served.target)
        lines = b"the [MASK] sat\n\nno mask\n"
        filled = await asyncio.to_thread(antiphon, "fill-mask", "--top-k", "2", *where, stdin=lines)
        best = (await served.client.fill_mask("the [MASK] sat", top_k=2)).places[0].fillings
        pair = await asyncio.to_thread(antiphon, "classify", "--next-sentence", *where, "a cat\ta dog")
        labels = (await served.client.classify("a cat", pair="a dog", next_sentence=True)).labels
        whole = await asyncio.to_thread(antiphon, "fill-mask", "--json", *where, "a [MASK]")
        tagged = await asyncio.to_thread(antiphon, "tag", *where, "a cat")
    assert filled.stdout.decode() == "\t".join(f"{one.text} {one.score:.4f}" for one in best) + "\n\n\n"
    assert filled.returncode == 1
    assert "line 3: text is without a mask token" in filled.stderr.decode()
    assert pair.stdout.decode() == f"{labels[0].label} {labels[0].score:.4f}\n"
    assert json.loads(whole.stdout)["places"][0]["position"] == 2
    assert (tagged.returncode, tagged.stdout) == (2, b"")
    assert "no tag head" in tagged.stderr.decode()
    async with serving(bundles, "tag") as served:
        text = "the big cat sat"
        tagged = await asyncio.to_thread(antiphon, "tag", "--target", served.target, text)
        spans = (await served.client.tag(text)).spans
    assert tagged.stdout.decode() == "\t".join(f"{one.label}: {text[one.start : one.end]}" for one in spans) + "\n"
