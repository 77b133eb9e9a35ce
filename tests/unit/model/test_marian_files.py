"""Marian's files: tensors of .npz and .bin, options, decoder files, vocabularies, and how damaged ones are refused."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import yaml

from antiphon.checkpoints.families.family import family_in
from antiphon.checkpoints.families.marian_files import MARIAN_FILES
from antiphon.checkpoints.marian_files import MarianFile, is_model_file
from antiphon.checkpoints.marian_folder import decoder_settings, open_model, read_tokens, vocabularies
from antiphon.errors import SourceError
from antiphon.importer.importer import ImportOptions, _inspect
from antiphon.text.tokenizer import open_tokenizer
from tests.marian_models import (
    AVERAGE,
    FLOAT32,
    INT8,
    PRE_NORM,
    SSRU,
    options,
    packed,
    random_tensors,
    write_bin,
    write_folder,
    write_npz,
    write_vocabulary,
)

OPTIONS_TEXT = b"type: transformer\n\0"
SPECIAL = ("special:model.yml", INT8, (len(OPTIONS_TEXT),), OPTIONS_TEXT)


@pytest.mark.parametrize("name", ["npz", "float32", "int8", "int8 with alphas", "gzip"])
def test_tensors_and_options_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    described = options({**SSRU, "tied-embeddings-all": False})
    tensors = random_tensors(described)
    path = tmp_path / ("model.npz" if name == "npz" else "model.bin")
    if name == "npz":
        write_npz(path, described, tensors)
        meant = tensors
    else:
        meant = write_bin(path, described, tensors, is_int8=name != "float32", alphas=name.endswith("alphas"))
    if name == "gzip":
        path = Path(shutil.move(path, tmp_path / "plain"))
        (tmp_path / "model.bin.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / "model.bin.gz"
    assert is_model_file(path)
    file = MarianFile(path)
    assert file.options == described
    assert set(file) == tensors.keys()
    for tensor, values in meant.items():
        assert file.shape(tensor) == values.shape
        np.testing.assert_array_equal(file.floats(tensor), values)


def test_half_precision_is_read(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.25], [0.125, 3]], np.float16)
    (tmp_path / "m.bin").write_bytes(packed([("a", 0x402, (2, 2), values.tobytes()), SPECIAL]))
    np.testing.assert_array_equal(MarianFile(tmp_path / "m.bin").floats("a"), values)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "another version": (struct.pack("<2Q", 2, 0), "version is 2, supported is 1"),
    "huge count": (struct.pack("<2Q", 1, 1 << 60), "number of tensors is .*; at most 100000"),
    "huge name": (struct.pack("<6Q", 1, 1, 1 << 50, FLOAT32, 1, 4), "number of bytes of a name"),
    "huge rank": (struct.pack("<6Q", 1, 1, 2, FLOAT32, 1 << 40, 4) + b"a\0", "number of dimensions of a"),
    "below 0": (packed([("a", FLOAT32, (-4, 2), b"")]), "a has the dimensions"),
    "overflow": (packed([("a", FLOAT32, (1 << 30,) * 8, bytes(64))]), "a .* has 64 bytes, expected"),
    "huge data": (struct.pack("<6Q", 1, 1, 2, FLOAT32, 0, 1 << 63) + b"a\0" + bytes(8), "is truncated"),
    "unknown type": (packed([("a", 0x4102, (1,), bytes(8))]), "a has the type 0x4102; supported are float32"),
    "no options": (packed([("a", FLOAT32, (1,), bytes(4))]), "has no special:model.yml"),
    "options that are a list": (packed([("special:model.yml", INT8, (6,), b"[a, b]")]), "special:model.yml cannot be"),
    "options with an object": (
        packed([("special:model.yml", INT8, (33,), b"!!python/object/apply:os.getcwd []"[:33])]),
        "special:model.yml cannot be read",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bin_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"{path}.*{message}"):
        MarianFile(path)


def test_multiplier_must_be_above_0(tmp_path: Path) -> None:
    data = bytes(4) + struct.pack("<f", float("nan")) + bytes(248)
    (tmp_path / "m.bin").write_bytes(packed([("a_W", 0x4101, (2, 2), data), SPECIAL]))
    with pytest.raises(SourceError, match="the multiplier of a_W is nan; it must be above 0"):
        MarianFile(tmp_path / "m.bin").floats("a_W")


@pytest.mark.parametrize("kind", ["npz", "bin", "bin.gz"])
def test_file_with_changed_or_missing_bytes_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """No damage leads to another error than SourceError."""
    described = options({})
    path = tmp_path / f"model.{kind}"
    plain = tmp_path / "plain.bin"
    if kind == "npz":
        write_npz(path, described, random_tensors(described))
    else:
        write_bin(plain, described, random_tensors(described), is_int8=True, alphas=True)
        path.write_bytes(gzip.compress(plain.read_bytes()) if kind.endswith("gz") else plain.read_bytes())
    whole, dice, refused = path.read_bytes(), random.Random(3), 0
    for _ in range(60):
        damaged = bytearray(whole[: dice.choice([len(whole), dice.randrange(len(whole))])])
        for _ in range(4):
            if damaged:
                damaged[dice.choice([dice.randrange(len(damaged)), dice.randrange(min(len(damaged), 4096))])] ^= 255
        path.write_bytes(damaged)
        is_model_file(path)
        try:
            file = MarianFile(path)
            for name in file:
                file.floats(name)
        except SourceError as error:
            refused += str(path) in str(error)
    assert refused > 20


def test_array_of_objects_in_a_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", a=np.array([{}], dtype=object))
    with pytest.raises(SourceError, match=r"a\.npy has the type object; it must be an array of numbers"):
        MarianFile(tmp_path / "m.npz")


def test_array_that_claims_more_than_its_file_has_is_refused(tmp_path: Path) -> None:
    header = np.lib.format.magic(1, 0)
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 9)}"
    text += b" " * (118 - len(text) - 1) + b"\n"
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("a.npy", header + struct.pack("<H", len(text)) + text)
    with pytest.raises(SourceError, match=r"a\.npy has 128 bytes, expected 36000000000128"):
        MarianFile(tmp_path / "m.npz")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"type": "s2s"}, "type is 's2s'; supported: 'transformer'"),
    "activation": (
        {"transformer-ffn-activation": "tanh"},
        "transformer-ffn-activation is 'tanh'; supported: 'swish' or",
    ),
    "depth": ({"transformer-ffn-depth": 3}, "transformer-ffn-depth is 3; supported: 2"),
    "cell": ({"transformer-decoder-autoreg": "rnn"}, "dec-cell is 'gru'; supported with .* rnn: ssru"),
    "projection": ({"transformer-no-projection": True}, "transformer-no-projection is True"),
    "rnn projection": ({**SSRU, "transformer-rnn-projection": True}, "transformer-rnn-projection is True"),
    "tied layers": ({"transformer-tied-layers": [1, 1]}, r"transformer-tied-layers is \[1, 1\]"),
    "norms": (
        {"transformer-preprocess": "n"},
        "transformer-preprocess is 'n', transformer-postprocess is 'dan', .*; supp",
    ),
    "highway": ({"transformer-postprocess": "dhn"}, "transformer-postprocess is 'dhn'"),
    "RMS norms": ({"transformer-postprocess": "dar"}, "transformer-postprocess is 'dar'"),
    "average before norms": ({**AVERAGE, **PRE_NORM}, "supported with average-attention are '', 'an', ''"),
    "average of the model's width": (
        {**AVERAGE, "transformer-dim-aan": 32},
        "transformer-dim-aan is 32; it must differ",
    ),
    "factors": ({"lemma-dim-emb": 8}, "lemma-dim-emb is 8; supported: 0"),
    "learned positions": ({"transformer-train-positions": True}, "transformer-train-positions is True"),
    "width": ({"dim-emb": "wide"}, "dim-emb is 'wide'; it must be a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_option_without_support_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    changed, message = REFUSED[name]
    described = options(changed)
    write_npz(tmp_path / "model.npz", described, random_tensors(options({})))
    write_vocabulary(tmp_path / "vocab.yml", 60)
    with pytest.raises(SourceError, match=rf"model\.npz: .*{message}"):
        _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


YAML_LINES = r"""</s>: 0
<unk>: 1
~: 2
no: 3
"\"": 4
"\\": 5
'''': 6
"\x85": 7
"\u2028x": 8
1e3: 9
"a:b": 10
: 11
? "long key"
: 12
<<: 13
a: 14
a: 99
 : 15
"""


def test_tokens_of_a_yaml_vocabulary_are_texts_whatever_they_look_like(tmp_path: Path) -> None:
    content = YAML_LINES.replace("\n : 15\n", "\n'#': 15\n").replace("\n: 11\n", "\n\x7f: 11\n")
    (tmp_path / "vocab.yml").write_text(content, encoding="utf-8")
    expected = [
        "</s>", "<unk>", "~", "no", '"', "\\", "'", "\x85", "\u2028x", "1e3", "a:b", "\x7f", "long key", "<<", "a", "#",
    ]  # fmt: skip
    assert read_tokens(tmp_path / "vocab.yml") == {token: index for index, token in enumerate(expected)}


def test_json_list_and_nematus_vocabularies_are_read(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"eos": 0, "UNK": 1, "ä": 2}))
    assert read_tokens(tmp_path / "vocab.json") == {"</s>": 0, "<unk>": 1, "eos": 0, "UNK": 1, "ä": 2}
    (tmp_path / "vocab.txt").write_text("</s>\n<unk>\na b\n")
    assert read_tokens(tmp_path / "vocab.txt") == {"</s>": 0, "<unk>": 1, "a b": 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.yml", "a: b\n", "line 1 is 'a: b'; expected a token, a colon and its id"),
        ("vocab.yml", "a: 1\n", "has no </s>"),
        ("vocab.json", '{"a": [1]}', "cannot be read"),
        ("vocab.json", "[" * 100_000, "cannot be read"),
        ("vocab.json", '{"a": ' * 100_000, "cannot be read"),
        ("vocab.txt", "</s>\n\na\n", "line 2 is empty"),
        ("vocab.spm", "</s>\n", "cannot be read"),
    ],
)
def test_damaged_vocabulary_is_refused_with_its_name(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(SourceError, match=f"{path}.*{message}"):
        read_tokens(path)


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_vocabularies_are_those_of_the_decoders_file_or_found_by_their_names(tmp_path: Path) -> None:
    files(tmp_path, "trgvocab.zh.spm", "srcvocab.zh.spm", "tokenizer.json")
    assert [path.name for path in vocabularies(tmp_path, {})] == ["srcvocab.zh.spm", "trgvocab.zh.spm"]
    named = {"vocabs": ["/a/trgvocab.zh.spm", "/a/trgvocab.zh.spm"]}
    assert [path.name for path in vocabularies(tmp_path, named)] == ["trgvocab.zh.spm"]
    files(tmp_path, "opus.vocab.yml")
    assert [path.name for path in vocabularies(tmp_path, {})] == ["opus.vocab.yml"]


@pytest.mark.parametrize(
    ("names", "vocabs", "message"),
    [
        ((), [], "has 0 vocabularies"),
        (("one.spm", "two.spm"), [], "it must have one, or two with names like source.spm and target.spm"),
        (("a.vocab.fsv",), [], "factored vocabularies"),
        (("a.spm",), ["b.spm"], "has no b.spm, which its decoder's YAML file names"),
        (("a.spm", "b.yml"), ["a.spm", "b.yml"], "vocabularies of two kinds: a.spm, b.yml"),
    ],
)
def test_unclear_vocabularies_are_refused(
    tmp_path: Path, names: tuple[str, ...], vocabs: list[str], message: str
) -> None:
    files(tmp_path, *names)
    with pytest.raises(SourceError, match=message):
        vocabularies(tmp_path, {"vocabs": vocabs})


def test_several_models_or_decoders_files_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    shutil.copy(tmp_path / "model.npz", tmp_path / "other.npz")
    with pytest.raises(SourceError, match=r"several Marian models: model\.npz, other\.npz"):
        open_model(tmp_path)
    (tmp_path / "decoder.yml").write_text("models: [other.npz]\n")
    assert open_model(tmp_path).path.name == "other.npz"
    (tmp_path / "config.a.yml").write_text("models: [model.npz]\n")
    with pytest.raises(SourceError, match=r"several decoder configurations: config\.a\.yml, decoder\.yml"):
        decoder_settings(tmp_path)
    (tmp_path / "config.a.yml").write_text("models: [")
    with pytest.raises(SourceError, match=r"config\.a\.yml cannot be read"):
        open_model(tmp_path)


@pytest.fixture
def piece_model() -> Callable[[Path], None]:
    def write(path: Path) -> None:
        words = ("the", "cat", "sat", "on", "a", "mat")
        lines = [f"{word} word number {index}" for index, word in enumerate(words * 30)]
        with path.open("wb") as stream:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=stream, vocab_size=40, eos_id=0, unk_id=1, bos_id=-1,
                pad_id=-1, minloglevel=2,
            )  # fmt: skip

    return write


def test_folder_as_opus_mt_publishes_it(tmp_path: Path, piece_model: Callable[[Path], None]) -> None:
    """SentencePiece models for both sides, with the ids of one YAML vocabulary; target languages are codes in texts."""
    described = options({"dim-vocabs": [45, 45]})
    write_npz(tmp_path / "opus.npz", described, random_tensors(described))
    for side in ("source", "target"):
        piece_model(tmp_path / f"{side}.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    tokens = ["</s>", "<unk>", ">>fra<<", *reversed([pieces.id_to_piece(index) for index in range(2, 40)])]
    lines = (f"{json.dumps(token, ensure_ascii=False)}: {index}" for index, token in enumerate(tokens))
    (tmp_path / "opus.vocab.yml").write_text("\n".join(lines), encoding="utf-8")
    decoder = {"models": ["opus.npz"], "vocabs": ["opus.vocab.yml"] * 2, "beam-size": 6, "normalize": 1}
    (tmp_path / "decoder.yml").write_text(yaml.safe_dump(decoder))
    source = _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
    MARIAN_FILES.write_text(tmp_path, source.settings, tmp_path)
    text = MARIAN_FILES.text(tmp_path, source.settings, source.config)
    assert (text.languages, text.template) == ({"fra": 2}, ("$target_language", "$text", 0))
    assert (source.settings["num_beams"], source.settings["suppress_tokens"]) == (6, [1, 45])
    tokenizer = open_tokenizer(tmp_path, text)
    ids = tokenizer.encode(">>fra<< the cat")
    assert ids == [2, *(tokens.index(piece) for piece in pieces.encode("the cat", out_type=str))]
    assert tokenizer.decode(ids[1:]) == "the cat"


def test_compressed_firefox_folder_without_a_decoders_file(tmp_path: Path, piece_model: Callable[[Path], None]) -> None:
    described = options({**SSRU, "dim-vocabs": [40, 40]})
    write_bin(tmp_path / "plain", described, random_tensors(described), is_int8=True, alphas=True)
    piece_model(tmp_path / "pieces")
    for plain, name in (("plain", "model.enpt.intgemm.alphas.bin.gz"), ("pieces", "vocab.enpt.spm.gz")):
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / plain).read_bytes()))
    source = _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
    assert (source.config.decoder_self, source.config.vocab_size) == ("ssru", 41)
    (tmp_path / "text").mkdir()
    MARIAN_FILES.write_text(tmp_path, source.settings, tmp_path / "text")
    text = MARIAN_FILES.text(tmp_path, source.settings, source.config)
    tokenizer = open_tokenizer(tmp_path / "text", text)
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"


@pytest.mark.parametrize("sign", ["codes", "marks"])
def test_texts_of_other_segmenters_are_refused(tmp_path: Path, sign: str) -> None:
    write_folder(tmp_path, {})
    if sign == "codes":
        files(tmp_path, "source.bpe")
    else:
        path = tmp_path / "vocab.source.yml"
        path.write_text(path.read_text().replace("w5:", "w@@:"))
    source = _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
    with pytest.raises(SourceError, match="subword-nmt, often after Moses"):
        MARIAN_FILES.text(tmp_path, source.settings, source.config)


def test_larger_vocabulary_than_the_models_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    write_vocabulary(tmp_path / "vocab.target.yml", 61)
    with pytest.raises(SourceError, match=r"vocab\.target\.yml has the id 60; the model embeds 60 tokens"):
        _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


def test_decoders_file_of_a_damaged_model_still_names_it(tmp_path: Path) -> None:
    (tmp_path / "decoder.yml").write_text("models: [model.bin]\nvocabs: [vocab.yml]\n")
    (tmp_path / "model.bin").write_bytes(b"version")
    assert family_in(tmp_path) is MARIAN_FILES
    with pytest.raises(SourceError, match=r"model\.bin is truncated"):
        _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
