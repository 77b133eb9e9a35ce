"""Checkpoints of sentence-transformers: Embed over real gRPC gives the declared vector, other declarations are refused.

The expected vectors are computed by transformers and PyTorch with the formulas of sentence-transformers 6.2, over a
padded batch and its attention mask.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from antiphon.bundle.manifest import load_bundle
from antiphon.cli.main import main
from antiphon.client import ServerError
from antiphon.errors import SourceError, VerificationError
from antiphon.importer import compare_pipeline
from antiphon.importer.importer import ImportOptions, import_checkpoint
from tests.bundle_serving import serving_bundle
from tests.marks import marked
from tests.parity import seq2seq_checkpoints
from tests.parity.encoder_checkpoints import randomise, write_checkpoint

WIDTH = 24
BERT: dict[str, Any] = dict(
    vocab_size=19, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
    max_position_embeddings=40,
)  # fmt: skip
ONE_LABEL: dict[str, Any] = BERT | dict(num_labels=1)
TEXTS = ("the cat sat on the mat", "a dog", "the small red cats ran")
FLAGS = dict(
    cls="cls_token", max="max_tokens", mean="mean_tokens", mean_sqrt_len_tokens="mean_sqrt_len_tokens",
    weightedmean="weightedmean_tokens", lasttoken="lasttoken",
)  # fmt: skip
IDENTITY = "torch.nn.modules.linear.Identity"


def flags(*modes: str) -> dict[str, Any]:
    """Return the settings of Pooling as older versions write them."""
    return {"word_embedding_dimension": WIDTH, **{f"pooling_mode_{FLAGS[mode]}": mode in modes for mode in FLAGS}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Modules after the Transformer, and what they make of a text.

    modes, width, bias, activation, normalize: expected poolings, dense layer (None: no layer) and normalisation.
    others: files beside modules.json by name. kept: number of elements that are kept.
    """

    pooling: dict[str, Any]
    modes: tuple[str, ...]
    width: int | None = None
    bias: bool = True
    activation: str | None = None
    normalize: bool = False
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompt: str = ""
    kept: int | None = None
    kind: str = "Bert"

    @property
    def modules(self) -> list[tuple[str, dict[str, Any] | None]]:
        settings = dict(in_features=WIDTH * len(self.modes), out_features=self.width, bias=self.bias)
        named = {} if self.activation is None else dict(activation_function=self.activation)
        dense = [] if self.width is None else [("Dense", settings | named)]
        return [("Pooling", self.pooling), *dense, *([("Normalize", None)] if self.normalize else [])]


CASES = {
    "first token, normalised": Case(pooling=flags("cls"), modes=("cls",), normalize=True),
    "no mode is the mean": Case(pooling=flags(), modes=("mean",)),
    "every mode, dense with bias, tanh by default": Case(
        pooling=flags(*FLAGS), modes=("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        width=32,
    ),
    "listed modes, prompt, cut": Case(
        pooling=dict(embedding_dimension=WIDTH, pooling_mode=["lasttoken", "max"]), modes=("lasttoken", "max"),
        normalize=True, prompt="the dog ", kept=30,
        others={
            "config_sentence_transformers.json": dict(
                prompts={"query": "the dog ", "document": "a "}, default_prompt_name="query", truncate_dim=30
            )
        },
    ),
    "T5 with dense without bias": Case(
        kind="T5", pooling=flags("mean"), modes=("mean",), width=16, bias=False, activation=IDENTITY, normalize=True
    ),
    "mT5 by its mean over the square root": Case(
        kind="MT5", pooling=flags("mean_sqrt_len_tokens"), modes=("mean_sqrt_len_tokens",)
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Written:
    """Checkpoint on disk with its encoder and its dense layer in PyTorch."""

    folder: Path
    case: Case
    original: Any
    dense: nn.Linear | None

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the declared vectors [B, O]."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        batch = tokenizer([self.case.prompt + text for text in texts], padding=True, return_tensors="pt")
        states = self.original(**batch).last_hidden_state
        vectors = torch.cat([pooled(states, batch["attention_mask"], mode) for mode in self.case.modes], dim=1)
        if self.dense is not None:
            vectors = self.dense(vectors)
            vectors = vectors if self.case.activation == IDENTITY else vectors.tanh()
        vectors = nn.functional.normalize(vectors, dim=1) if self.case.normalize else vectors
        return vectors[:, : self.case.kept]


def pooled(states: Tensor, attention_mask: Tensor, mode: str) -> Tensor:
    """Return one pooling [B, M] of padded states [B, S, M]."""
    mask = attention_mask[..., None].float()
    if mode == "cls":
        return states[:, 0]
    if mode == "max":
        return states.masked_fill(mask == 0, -torch.inf).max(dim=1).values
    if mode == "lasttoken":
        return states[torch.arange(len(states)), attention_mask.sum(dim=1) - 1]
    if mode == "weightedmean":
        mask = mask * torch.arange(1, states.shape[1] + 1)[None, :, None]
    total, count = (states * mask).sum(dim=1), mask.sum(dim=1)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def write(folder: Path, case: Case) -> Written:
    if case.kind == "Bert":
        original = write_checkpoint(folder, transformers.BertConfig(**BERT), "BertModel")
    else:
        settings = getattr(transformers, f"{case.kind}Config")(
            vocab_size=211, d_model=WIDTH, d_kv=6, d_ff=40, num_layers=2, num_heads=3,
            relative_attention_num_buckets=8, relative_attention_max_distance=20,
        )  # fmt: skip
        original = randomise(getattr(transformers, f"{case.kind}EncoderModel")(settings))
        original.save_pretrained(folder)
        seq2seq_checkpoints.write_tokenizers(folder, seq2seq_checkpoints.CHECKPOINTS["t5"])
    write_modules(folder, case.modules)
    for name, content in case.others.items():
        (folder / name).write_text(json.dumps(content))
    dense = None
    if case.width is not None:
        dense = randomise(nn.Linear(WIDTH * len(case.modes), case.width, bias=case.bias))
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in dense.named_parameters()}
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return Written(folder=folder, case=case, original=original, dense=dense)


def write_modules(folder: Path, modules: Sequence[tuple[str, dict[str, Any] | None]]) -> None:
    """Write modules.json and the directory of each module after the Transformer with its settings."""
    entries = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer")]
    for index, (kind, settings) in enumerate(modules, 1):
        place = folder / f"{index}_{kind}"
        place.mkdir()
        if settings is not None:
            (place / "config.json").write_text(json.dumps(settings))
        path, name = place.name, f"sentence_transformers.models.{kind}"
        entries.append(dict(idx=index, name=str(index), path=path, type=name))
    (folder / "modules.json").write_text(json.dumps(entries))


def imported(folder: Path, **options: Any) -> Path:
    target = folder.parent / "bundle"
    settings: dict[str, Any] = dict(precisions=("float32",), explain=False) | options
    import_checkpoint(ImportOptions(source=str(folder), target=target, **settings))
    return target


@pytest.mark.parametrize("name", marked(CASES, "combinations", but=["listed modes, prompt, cut"]))
async def test_embed_gives_the_declared_vector(name: str, tmp_path: Path) -> None:
    """One text alone and several at the same time; a request can still choose another pooling."""
    written = write(tmp_path / "checkpoint", CASES[name])
    expected = written.embed(TEXTS).numpy()
    async with serving_bundle(imported(written.folder)) as served:
        alone = [(await served.client.embed(text)).vector for text in TEXTS]
        together = [found.vector for found in await asyncio.gather(*map(served.client.embed, TEXTS))]
        unit = (await served.client.embed(TEXTS[0], normalize=True)).vector
        first = (await served.client.embed(TEXTS[0], pooling="first")).vector
    assert alone == together
    np.testing.assert_allclose(alone, expected, atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(unit, expected[0] / np.linalg.norm(expected[0]), atol=2e-5, rtol=1e-4)
    assert len(first) == WIDTH


@pytest.mark.combinations
async def test_int8_graphs_have_the_dense_layer_too(tmp_path: Path) -> None:
    written = write(tmp_path / "checkpoint", CASES["T5 with dense without bias"])
    bundle = imported(written.folder, precisions=("int8",))
    async with serving_bundle(bundle) as served:
        found = (await served.client.embed(TEXTS[0])).vector
    assert float(np.dot(found, written.embed(TEXTS[:1])[0].numpy())) > 0.97


@pytest.mark.combinations
async def test_evaluate_compares_the_vectors_that_clients_get_with_those_of_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = write(tmp_path / "checkpoint", CASES["listed modes, prompt, cut"])
    bundle = imported(written.folder, precisions=("float32", "int8"))
    texts = tmp_path / "texts"
    texts.write_text("\n".join([*TEXTS, "", "the cat " * 40]), encoding="utf-8")
    vectors = {}
    for precision in ("float32", "int8"):
        async with serving_bundle(bundle, precision=precision) as served:
            vectors[precision] = np.array([(await served.client.embed(text)).vector for text in TEXTS])
    exact, rounded = vectors["float32"], vectors["int8"]
    cosines = (exact * rounded).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rounded, axis=1)
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["evaluate", str(bundle), "--text", str(texts), "--json"]) == 0
    (score,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert score["mean_cosine"] == pytest.approx(cosines.mean(), abs=1e-6)
    assert score["least_cosine"] == pytest.approx(cosines.min(), abs=1e-6)
    assert score["least_cosine"] < 1 - 1e-6
    assert (score["system"], score["texts"], score["skipped"]) == ("antiphon int8", len(TEXTS), 2)
    assert main(["evaluate", str(bundle), "--text", str(texts), "--record"]) == 2
    assert "leave out --record" in capsys.readouterr().err


@pytest.mark.combinations
async def test_lower_case_and_length_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    case = Case(
        pooling=flags("mean"),
        modes=("mean",),
        others={"sentence_bert_config.json": dict(max_seq_length=8, do_lower_case=True)},
    )
    written = write(tmp_path / "checkpoint", case)
    async with serving_bundle(imported(written.folder)) as served:
        found = (await served.client.embed("The CAT sat")).vector
        with pytest.raises(ServerError) as refusal:
            await served.client.embed("the cat sat on the mat on the mat")
    np.testing.assert_allclose(found, written.embed(["the cat sat"])[0].numpy(), atol=2e-5)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "8" in refusal.value.message


@pytest.mark.combinations
def test_length_of_the_command_takes_precedence(tmp_path: Path) -> None:
    others = {"sentence_bert_config.json": dict(max_seq_length=8)}
    written = write(tmp_path / "checkpoint", Case(pooling=flags("cls"), modes=("cls",), others=others))
    bundle = imported(written.folder, max_source_len=20)
    assert load_bundle(bundle).manifest.model.max_source_len == 20


@pytest.mark.combinations
def test_what_is_left_out_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written = write(tmp_path / "checkpoint", CASES["listed modes, prompt, cut"])
    (written.folder / "sentence_bert_config.json").write_text(json.dumps(dict(max_seq_length=12)))
    imported(written.folder)
    printed = capfd.readouterr().err
    assert "prompts of config_sentence_transformers.json are left out" in printed
    assert "document ('a ')" in printed
    assert "query" not in printed
    assert "more than 12 tokens are refused" in printed


DENSE = dict(in_features=WIDTH, out_features=8, bias=True)


@pytest.mark.parametrize(
    ("modules", "others", "message"),
    [
        ([("WeightedLayerPooling", {}), ("Pooling", flags("mean"))], {}, "the module WeightedLayerPooling is not"),
        ([("SpladePooling", {})], {}, "the module SpladePooling is not supported"),
        ([("Pooling", flags("mean")), ("Normalize", None), ("Dense", DENSE)], {}, "Pooling, Normalize, Dense;"),
        ([("Normalize", None)], {}, "the modules are Transformer, Normalize; supported"),
        ([("Pooling", dict(pooling_mode="median"))], {}, "the pooling median is not supported"),
        ([("Pooling", dict(pooling_mode_attention=True))], {}, "the pooling pooling_mode_attention is not supported"),
        ([("Pooling", dict(flags("mean"), word_embedding_dimension=8))], {}, "the poolings read 8 numbers"),
        ([("Pooling", flags("mean")), ("Dense", dict(DENSE, activation_function="own.Swish"))], {}, "'own.Swish'"),
        ([("Pooling", flags("mean")), ("Dense", dict(DENSE, in_features=7))], {}, "in_features is 7"),
        ([("Pooling", flags("mean")), ("Dense", dict(DENSE, use_residual=True))], {}, "use_residual is true"),
        ([("Pooling", flags("mean")), ("Dense", DENSE)], {}, "2_Dense has no weights"),
        (
            [("Pooling", flags("mean")), ("Normalize", dict(module_input_name="token_embeddings"))],
            {},
            "module_input_name is 'token_embeddings'",
        ),
        (
            [("Pooling", dict(flags("mean"), include_prompt=False))],
            {"config_sentence_transformers.json": dict(prompts={"a": "b "}, default_prompt_name="a")},
            "include_prompt is false",
        ),
        (
            [("Pooling", flags("mean"))],
            {"sentence_bert_config.json": dict(transformer_task="fill-mask")},
            "transformer_task is 'fill-mask'",
        ),
    ],
)  # fmt: skip
def test_declarations_that_are_not_supported_are_refused_by_name(
    modules: Any, others: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, transformers.BertConfig(**BERT), "BertModel")
    write_modules(folder, modules)
    for name, content in others.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(SourceError) as refusal:
        imported(folder)
    assert message in str(refusal.value)


def test_code_and_paths_outside_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, transformers.BertConfig(**BERT), "BertModel")
    write_modules(folder, [("Pooling", flags("mean"))])
    path = folder / "modules.json"
    for old, new, message in (
        ("sentence_transformers.models.Pooling", "own_code.Pooling", "own_code.Pooling is code from outside"),
        ("1_Pooling", "../1_Pooling", "the path '../1_Pooling' is outside"),
    ):
        written = path.read_text()
        path.write_text(written.replace(old, new))
        with pytest.raises(SourceError, match=message):
            imported(folder)
        path.write_text(written)


def test_embeddings_of_a_model_with_a_decoder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    seq2seq_checkpoints.save(folder, "bart")
    write_modules(folder, [("Pooling", dict(pooling_mode="mean"))])
    with pytest.raises(SourceError, match=r"embeddings, which only encoder-only models have"):
        imported(folder)


def test_import_notices_another_vector_than_the_declared_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test simulates a server that forgets to normalise."""
    monkeypatch.setattr(compare_pipeline, "finished", lambda vector, _: vector)
    written = write(tmp_path / "checkpoint", CASES["first token, normalised"])
    with pytest.raises(VerificationError, match="for 'the cat sat on the mat' the pipeline of transformers gives"):
        imported(written.folder)


SIGMOID = "torch.nn.modules.activation.Sigmoid"
DECLARED_SCORES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "old name": ("config.json", dict(sbert_ce_default_activation_function=IDENTITY), lambda logits: logits),
    "newer name": ("config.json", dict(sentence_transformers=dict(activation_fn=SIGMOID)), torch.sigmoid),
    "file of its own": ("config_sentence_transformers.json", dict(activation_fn=IDENTITY), lambda logits: logits),
    "none": ("config.json", {}, torch.sigmoid),
}


@pytest.mark.parametrize("name", marked(DECLARED_SCORES, "combinations", but=["newer name"]))
async def test_scores_of_a_cross_encoder_are_those_that_it_declares(name: str, tmp_path: Path) -> None:
    file, settings, function = DECLARED_SCORES[name]
    folder = tmp_path / "checkpoint"
    original = write_checkpoint(folder, transformers.BertConfig(**ONE_LABEL), "BertForSequenceClassification")
    write_modules(folder, [])
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = float(function(original(**tokenizer(*TEXTS[:2], return_tensors="pt")).logits))
    async with serving_bundle(imported(folder)) as served:
        (found,) = (await served.client.classify(TEXTS[0], pair=TEXTS[1])).labels
    assert found.score == pytest.approx(expected, abs=2e-5)


def test_scores_by_a_function_that_is_not_supported_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, transformers.BertConfig(**ONE_LABEL), "BertForSequenceClassification")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(dict(activation_fn="torch.nn.Softplus")))
    with pytest.raises(SourceError, match=r"'torch.nn.Softplus'; supported are the classes Identity, Sigmoid, Softmax"):
        imported(folder)
