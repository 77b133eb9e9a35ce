"""Checkpoints in the configurations of public bug reports give the ids and answers of transformers when served."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from antiphon.bundle.manifest import Bundle, GenerationDefaults, load_bundle
from antiphon.cli import main as cli
from antiphon.client import Options
from antiphon.text.format import LanguageIds, fill
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from tests.bundle_serving import serving_bundle

DATA = Path(os.environ.get("ANTIPHON_DATA", ".")) / "reported-checkpoints"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="ANTIPHON_DATA has no reported-checkpoints")

TEXTS = ("the cat sat", "The Small word number 7 is here", "  is  again, here  ")
NUM_TOKENS = 12
GENERATING = {
    "bart_cnn": "AutoModelForSeq2SeqLM",
    "bpe_dropout": "AutoModelForSeq2SeqLM",
    "nllb_legacy": "AutoModelForSeq2SeqLM",
    "mbart_nostart": "AutoModelForSeq2SeqLM",
    "eos_int": "AutoModelForCausalLM",
    "gpt2_old2": "AutoModelForCausalLM",
}


def imported(name: str, target: Path, *options: str) -> Bundle:
    """Import a checkpoint by the command, which compares it with the original, and return its bundle."""
    arguments = ["import", str(DATA / name), str(target), "--no-explain", "--precision", "float32", *options]
    assert cli.main(arguments) == 0
    return load_bundle(target)


def complete_ids(bundle: Bundle, text: str) -> list[int]:
    """Return the source of a text as the bundle's model reads it, in its default languages."""
    described = bundle.manifest.text
    codes = (described.default_source_language, described.default_target_language)
    languages = LanguageIds(*(None if code is None else described.languages[code] for code in codes))
    return list(fill(described, tokenizer_of(bundle).encode(text), None, languages)[0])


def tokenizer_of(bundle: Bundle) -> Tokenizer:
    return open_tokenizer(bundle.path, bundle.manifest.text)


def original_tokenizer(name: str) -> Any:
    """Return the tokenizer of transformers, without the randomness of training."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DATA / name)
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer


def original_model(name: str) -> Any:
    return getattr(transformers, GENERATING[name]).from_pretrained(DATA / name).eval()


def original_answer(model: Any, source: list[int], **options: Any) -> list[int]:
    """Return the new tokens of `generate` without the end token, under the settings of the checkpoint."""
    with torch.no_grad():
        ids = model.generate(torch.tensor([source]), max_new_tokens=NUM_TOKENS, **options)[0].tolist()
    new = ids[1:] if model.config.is_encoder_decoder else ids[len(source) :]
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return list(itertools.takewhile(lambda token_id: token_id not in ends, new))


@pytest.mark.combinations
@pytest.mark.parametrize("name", [name for name in GENERATING if name != "mbart_nostart"])
async def test_served_ids_and_answers_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    bundle = await asyncio.to_thread(imported, name, tmp_path / "bundle")
    model = original_model(name)
    tokenizer = original_tokenizer(name)
    language = bundle.manifest.text.languages.get(bundle.manifest.text.default_target_language or "")
    forced = {} if language is None else {"forced_bos_token_id": language}
    async with serving_bundle(bundle.path) as served:
        for text in TEXTS:
            source = tokenizer(text).input_ids
            assert complete_ids(bundle, text) == source
            answer = await served.client.generate_text(text, Options(max_new_tokens=NUM_TOKENS))
            assert list(answer.token_ids) == original_answer(model, source, **forced)


async def test_first_decoder_input_is_the_begin_token_if_no_other_is_named(tmp_path: Path) -> None:
    """transformers cannot open this tokenizer, so the source is given as ids."""
    bundle = await asyncio.to_thread(imported, "mbart_nostart", tmp_path / "bundle")
    model = original_model("mbart_nostart")
    source = [30, 41, 52, 63, 2, bundle.manifest.text.languages["en_XX"]]
    async with serving_bundle(bundle.path) as served:
        answer = await served.client.generate_text(source, Options(max_new_tokens=NUM_TOKENS))
    assert list(answer.token_ids) == original_answer(model, source)


def test_flags_of_tokenizer_config_override_tokenizer_json(tmp_path: Path) -> None:
    bundle = imported("bert_case", tmp_path / "bundle")
    tokenizer = original_tokenizer("bert_case")
    for text in ("The Cat sat", "THE", "the cat sat", "Ünïcode"):
        assert complete_ids(bundle, text) == tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in complete_ids(bundle, "The Cat sat")


def test_tokens_without_a_row_are_characters_in_a_text(tmp_path: Path) -> None:
    """transformers fails for a text with such a token."""
    bundle = imported("bart_cnn", tmp_path / "bundle")
    ids = complete_ids(bundle, "the <mask> cat")
    assert original_tokenizer("bart_cnn").mask_token_id == bundle.manifest.model.vocab_size
    assert max(ids) < bundle.manifest.model.vocab_size
    assert bundle.manifest.text.mask_id is None


def test_text_has_one_tokenisation(tmp_path: Path) -> None:
    bundle = imported("bpe_dropout", tmp_path / "bundle")
    assert len({tuple(complete_ids(bundle, TEXTS[1])) for _ in range(20)}) == 1


def test_sampling_settings_become_defaults(tmp_path: Path) -> None:
    bundle = imported("sample_minp", tmp_path / "bundle")
    stated = transformers.GenerationConfig.from_pretrained(DATA / "sample_minp")
    assert bundle.manifest.generation == GenerationDefaults(
        temperature=stated.temperature, min_p=stated.min_p, typical_p=stated.typical_p
    )


@pytest.mark.combinations
async def test_settings_that_no_server_accepts_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = await asyncio.to_thread(imported, "g_beams_early", tmp_path / "bundle")
    said = capsys.readouterr().err
    assert "beam_width=17 of its generation settings is left out" in said
    assert "early_stopping='first' of its generation settings is left out" in said
    async with serving_bundle(bundle.path) as served:
        assert (await served.client.generate_text("the small word", Options(max_new_tokens=4))).token_ids


@pytest.mark.combinations
async def test_score_of_a_single_label_is_that_of_the_pipeline(tmp_path: Path) -> None:
    """Every cross-encoder has one label and no problem_type."""
    bundle = await asyncio.to_thread(imported, "cross", tmp_path / "bundle")
    pipe = transformers.pipeline("text-classification", model=str(DATA / "cross"))
    expected = pipe({"text": "the cat sat", "text_pair": "a dog ran"}, top_k=None)
    async with serving_bundle(bundle.path) as served:
        answer = await served.client.classify("the cat sat", pair="a dog ran")
    assert [label.score for label in answer.labels] == pytest.approx([label["score"] for label in expected], abs=1e-5)


@pytest.mark.combinations
async def test_vector_of_a_text_is_the_declared_one(tmp_path: Path) -> None:
    """modules.json names pooling by the first token, and normalisation."""
    bundle = await asyncio.to_thread(imported, "st_cls", tmp_path / "bundle")
    inputs = original_tokenizer("st_cls")("the cat sat on the mat", return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(DATA / "st_cls").eval()
    with torch.no_grad():
        expected = torch.nn.functional.normalize(model(**inputs).last_hidden_state[0, 0], dim=0)
    async with serving_bundle(bundle.path) as served:
        answer = await served.client.embed("the cat sat on the mat")
    torch.testing.assert_close(torch.tensor(answer.vector), expected, atol=1e-5, rtol=1e-4)
