"""Tokenizers as transformers opens them: tokenizer.json of the bundle gives the ids of the checkpoint's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.family import family_of
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.errors import NoTokenizersFile, TokenizerError
from antiphon.importer.original_tokenizer import open_original_tokenizer, write_tokenizer
from antiphon.text.tokenizer import open_tokenizer
from tests.parity.tokenizer_checkpoints import KINDS, TEXTS, pieces

AWKWARD = ["", "the cat's  mat", "Größe über naïve café", "hello, WORLD!?", "der Hund läuft 🙂"]


def word_pieces(folder: Path) -> Callable[[str], list[int]]:
    """Write vocab.txt, as in the first publication of bert-base-uncased."""
    written = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    written.normalizer = normalizers.BertNormalizer(lowercase=True)
    written.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    written.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    by_id = sorted(written.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in by_id), encoding="utf-8")
    describe(folder, "bert", tokenizer_class="BertTokenizer", do_lower_case=True)
    return lambda text: written.encode(text).ids


def merges(folder: Path) -> Callable[[str], list[int]]:
    """Write vocab.json and merges.txt, as in GPT-2."""
    written = Tokenizer(models.BPE())
    written.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    written.train_from_iterator(TEXTS, trainer)
    written.model.save(str(folder))
    describe(folder, "gpt2", tokenizer_class="GPT2Tokenizer")
    return lambda text: written.encode(text).ids


def shifted_pieces(folder: Path) -> Callable[[str], list[int]]:
    """Write only sentencepiece.bpe.model, as in mBART-50: all ids except four are SentencePiece's ids plus one."""
    pieces(folder / "sentencepiece.bpe.model", add_dummy_prefix=True)
    describe(folder, "mbart", tokenizer_class="MBart50Tokenizer", src_lang="en_XX", tgt_lang="de_DE")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    return lambda text: [index + 1 if index else 3 for index in processor.encode(text)]


def describe(folder: Path, model_type: str, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("write", [word_pieces, merges, shifted_pieces])
def test_converted_tokenizer_gives_the_ids_of_the_original(
    write: Callable[[Path], Callable[[str], list[int]]], tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    reference = write(old)
    settings = json.loads((old / "config.json").read_bytes())
    config = ModelConfig(
        architecture="decoder", vocab_size=400, d_model=8, encoder_layers=0, decoder_layers=1, num_heads=1, d_ff=8,
        bos_id=2,
    )  # fmt: skip
    family = family_of(settings)
    with pytest.raises(NoTokenizersFile, match=r"tokenizer\.json"):
        family.text(old, settings, config)
    write_tokenizer(open_original_tokenizer(old), new, 400, [])
    tokenizer = open_tokenizer(new, family.text(new, settings, config))
    for text in [*AWKWARD, *TEXTS[:8]]:
        assert tokenizer.encode(text) == reference(text)


def test_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    describe(tmp_path, "bert")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        open_original_tokenizer(tmp_path)


def test_dropout_of_a_bundle_is_off(tmp_path: Path) -> None:
    """A text had 20 tokenisations in 20 calls."""
    KINDS["GPT-2"].build(tmp_path).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["dropout"] = 0.9
    path.write_text(json.dumps(described))
    tokenizer = open_tokenizer(tmp_path, tokenizers_format(tmp_path))
    assert len({tuple(tokenizer.encode(TEXTS[0])) for _ in range(20)}) == 1


def test_sampled_segmentation_of_the_original_is_off(tmp_path: Path) -> None:
    KINDS["Marian"].build(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian"}))
    path = tmp_path / "tokenizer_config.json"
    sampled = {"sp_model_kwargs": {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **sampled}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len({tuple(theirs(TEXTS[0]).input_ids) for _ in range(20)}) > 1
    calm = open_original_tokenizer(tmp_path)
    assert len({tuple(calm(TEXTS[0]).input_ids) for _ in range(20)}) == 1
