"""Texts of served imported checkpoints with their tokenizers, compared with transformers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from antiphon.cli import main as cli
from antiphon.client import Client, Options, ServerError
from tests.integration.process import ServerProcess
from tests.parity.tokenizer_checkpoints import KINDS

MAX_NEW = 12
TEXTS = ["the cat sat on the mat.", "  Größe  und\tÜbung", "👩‍👩‍👧 naïve café", "日本語 hello </s>", "שלום עולם"]
_BART_LIKE: dict[str, Any] = dict(
    d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.2, forced_eos_token_id=None,
)  # fmt: skip
_T5_LIKE: dict[str, Any] = dict(
    d_model=24, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, initializer_factor=3.0
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """Tokenizer and model of a family in transformers."""

    tokenizer: Any
    model: Any

    def answer(self, text: str, **how: Any) -> str:
        """Generate greedily; special tokens in a text are text."""
        inputs = self.tokenizer(text, return_tensors="pt", split_special_tokens=True)
        with torch.no_grad():
            ids = self.model.generate(
                **inputs, num_beams=1, do_sample=False, max_new_tokens=MAX_NEW, min_new_tokens=MAX_NEW, **how
            )
        answer: str = self.tokenizer.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return answer


MODELS: dict[str, tuple[str, type[Any], type[Any], dict[str, Any]]] = {
    "marian": ("Marian", transformers.MarianConfig, transformers.MarianMTModel, _BART_LIKE),
    "mbart": ("mBART", transformers.MBartConfig, transformers.MBartForConditionalGeneration, _BART_LIKE),
    "mbart50": ("mBART-50", transformers.MBartConfig, transformers.MBartForConditionalGeneration, _BART_LIKE),
    "t5": ("T5", transformers.T5Config, transformers.T5ForConditionalGeneration, _T5_LIKE),
}


def make(name: str, folder: Path) -> Original:
    """Save a tokenizer and a random model with a larger, padded vocabulary."""
    kind, config, model, settings = MODELS[name]
    (folder / "trained").mkdir(parents=True)
    tokenizer = KINDS[kind].build(folder / "trained")
    tokenizer.save_pretrained(folder / "saved")
    special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    begin = tokenizer.pad_token_id if name in ("marian", "t5") else tokenizer.eos_token_id
    torch.manual_seed(4)
    described = config(vocab_size=len(tokenizer) + 7, decoder_start_token_id=begin, **special, **settings)
    made = model(described).eval()
    made.generation_config.update(bos_token_id=None, forced_eos_token_id=None)
    made.save_pretrained(folder / "saved")
    return Original(tokenizer=tokenizer, model=made)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Original, Path]]:
    found = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp(name)
        original = make(name, folder)
        options = ["--no-verify", "--no-explain", "--precision", "float32"]
        assert cli.main(["import", str(folder / "saved"), str(folder / "bundle"), *options]) == 0
        found[name] = original, folder / "bundle"
    return found


@pytest.fixture(scope="module")
def server(originals: dict[str, tuple[Original, Path]]) -> Iterator[ServerProcess]:
    arguments = [word for name, (_, path) in originals.items() for word in ("--model", f"{name}={path}")]
    with ServerProcess(None, arguments) as process:
        yield process


def ours(server: ServerProcess, model: str, text: str, source_language: str = "", target_language: str = "") -> str:
    """Return the complete answer, which must equal the streamed one."""
    options = Options(max_new_tokens=MAX_NEW, min_new_tokens=MAX_NEW, beam_width=1, temperature=0.0)
    with Client(server.target, model=model).with_languages(source_language, target_language) as client:
        whole = client.generate_text(text, options).text
        assert "".join(delta.text for delta in client.generate(text, options)) == whole
    return whole


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_answers_equal_those_of_transformers(
    name: str, text: str, server: ServerProcess, originals: dict[str, tuple[Original, Path]]
) -> None:
    assert ours(server, name, text) == originals[name][0].answer(text)


@pytest.mark.parametrize("text", TEXTS[:3])
def test_languages_of_mbart50_are_the_first_tokens(
    text: str, server: ServerProcess, originals: dict[str, tuple[Original, Path]]
) -> None:
    original = originals["mbart50"][0]
    original.tokenizer.src_lang = "de_DE"
    forced = original.tokenizer.convert_tokens_to_ids("fr_XX")
    expected = original.answer(text, forced_bos_token_id=forced)
    assert ours(server, "mbart50", text, source_language="de_DE", target_language="fr_XX") == expected


@pytest.mark.parametrize("text", TEXTS[:3])
def test_languages_of_mbart_are_after_the_source_and_first_in_the_target(
    text: str, server: ServerProcess, originals: dict[str, tuple[Original, Path]]
) -> None:
    original = originals["mbart"][0]
    original.tokenizer.src_lang = "de_DE"
    begin = original.tokenizer.convert_tokens_to_ids("fr_XX")
    expected = original.answer(text, decoder_start_token_id=begin)
    assert ours(server, "mbart", text, source_language="de_DE", target_language="fr_XX") == expected


def test_target_language_of_marian_is_a_code_before_the_source(
    server: ServerProcess, originals: dict[str, tuple[Original, Path]]
) -> None:
    expected = originals["marian"][0].answer(">>fra<< the cat")
    assert ours(server, "marian", "the cat", target_language="fra") == expected
    assert ours(server, "marian", ">>fra<< the cat") == expected


def test_models_report_their_languages_and_refuse_others(server: ServerProcess) -> None:
    with Client(server.target, model="mbart") as client:
        assert {"de_DE", "en_XX", "fr_XX"} <= {*client.get_model().languages}
    with Client(server.target, model="marian", target_language="xxx") as client:
        assert list(client.get_model().languages) == ["deu", "fra"]
        with pytest.raises(ServerError, match="target_language is 'xxx'; it must be one of deu, fra"):
            client.generate_text("the cat")
