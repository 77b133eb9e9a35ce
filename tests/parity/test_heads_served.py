"""Encoders alone behind real gRPC: what clients get, beside what transformers' pipelines say of the same checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from antiphon.client import AsyncClient
from antiphon.model.importer import ImportOptions, import_checkpoint
from tests.bundle_serving import serving_bundle
from tests.parity.answers_together import one_torch_thread
from tests.parity.encoder_checkpoints import write_checkpoint

SIZES: dict[str, Any] = dict(
    vocab_size=19, hidden_size=36, num_hidden_layers=1, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40,
)  # fmt: skip
NAMES = {0: "O", 1: "B-ANIMAL", 2: "I-ANIMAL", 3: "B-PLACE"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining": ("BertForPreTraining", {}),
    "classify": ("BertForSequenceClassification", dict(id2label={0: "low", 1: "middle", 2: "high"})),
    "tag": ("BertForTokenClassification", dict(id2label=NAMES)),
    "base": ("BertModel", {}),
}
TEXTS = ("the big cat sat on the red mat", "a dog", "cats, dogs; the small blue mat!", "the the the")
CLOSE: dict[str, Any] = dict(rel=2e-4, abs=2e-5)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint of transformers, and the bundle of it."""

    folder: Path
    model: Any
    tokenizer: Any
    bundle: Path

    def pipeline(self, task: str, **settings: Any) -> Any:
        make: Any = transformers.pipeline
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(task, model=self.model, tokenizer=self.tokenizer, device="cpu", **settings)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Imported]:
    return {kind: imported(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def imported(folder: Path, kind: str) -> Imported:
    name, settings = KINDS[kind]
    checkpoint = folder / "checkpoint"
    model = write_checkpoint(checkpoint, transformers.BertConfig(**SIZES, **settings), name)
    if kind == "tag":  # so that its labels differ
        with torch.no_grad():
            model.classifier.weight.mul_(8)
            model.classifier.bias.zero_()
        model.save_pretrained(checkpoint)
    options = ImportOptions(source=str(checkpoint), target=folder / "bundle", precisions=("float32",))
    import_checkpoint(options)
    load: Any = transformers.PreTrainedTokenizerFast
    named = {f"{part}_token": f"[{part.upper()}]" for part in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = load(tokenizer_file=str(checkpoint / "tokenizer.json"), model_input_names=inputs, **named)
    return Imported(folder=checkpoint, model=model, tokenizer=tokenizer, bundle=folder / "bundle")


def serving(bundles: dict[str, Imported], kind: str) -> Any:
    return serving_bundle(bundles[kind].bundle)


async def test_labels_are_those_of_the_pipeline(bundles: dict[str, Imported]) -> None:
    pipeline = bundles["classify"].pipeline("text-classification", top_k=None)
    async with serving(bundles, "classify") as served:
        found = await asyncio.gather(*(served.client.classify(text) for text in TEXTS))
        pair = await served.client.classify(TEXTS[0], pair=TEXTS[1], top_k=1)
    for text, answer in zip(TEXTS, found, strict=True):
        check_labels(answer.labels, pipeline([text])[0])
    check_labels(pair.labels, pipeline([{"text": TEXTS[0], "text_pair": TEXTS[1]}])[0][:1])


def check_labels(found: Any, expected: list[dict[str, Any]]) -> None:
    assert [one.label for one in found] == [one["label"] for one in expected]
    assert [one.score for one in found] == pytest.approx([one["score"] for one in expected], **CLOSE)


async def test_fillings_are_those_of_the_pipeline(bundles: dict[str, Imported]) -> None:
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


async def test_next_sentences_are_judged_as_by_the_original(bundles: dict[str, Imported]) -> None:
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


async def test_tags_and_spans_are_those_of_the_pipeline(bundles: dict[str, Imported]) -> None:
    """Offsets count code points of the text as it was sent; the pipeline's `first` aggregation makes spans of words."""
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


async def test_embeddings_are_the_originals_states(bundles: dict[str, Imported]) -> None:
    original = bundles["base"]
    with torch.no_grad():
        made = original.model(**original.tokenizer(TEXTS[0], TEXTS[1], return_tensors="pt"))
    states = made.last_hidden_state[0].numpy()
    async with serving(bundles, "base") as served:

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
    """Every call of a pre-training model at once."""
    asked: list[Any] = [client.fill_mask(text.replace("the", "[MASK]"), top_k=9) for text in TEXTS if "the" in text]
    asked += [client.classify(text, pair=TEXTS[1], next_sentence=True) for text in TEXTS]
    asked += [client.embed(text, pooling=pooling) for text in TEXTS for pooling in ("mean", "none")]
    return asked


async def test_answers_are_the_same_bits_alone_and_in_a_crowd(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "pretraining") as served:
        alone = [told(await one) for one in await ask_everything(served.client)]
        together = await asyncio.gather(*await ask_everything(served.client))
        assert alone == list(map(told, together))
        batches = served.registry.get_sample_value("antiphon_encode_batch_size_sum", {"model_name": "bundle"})
        runs = served.registry.get_sample_value("antiphon_encode_batch_size_count", {"model_name": "bundle"})
        assert batches is not None
        assert runs is not None
        assert batches > runs  # some were encoded together


def told(answer: Any) -> Any:
    return next(getattr(answer, name) for name in ("places", "labels", "vector") if hasattr(answer, name))
