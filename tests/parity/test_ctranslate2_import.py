"""Imported CTranslate2 directories that are served, compared with CTranslate2.

ANTIPHON_DATA has a trained model: Arabic names to Latin letters, letter by letter, with six layers in encoder and
decoder and a vocabulary without an unknown token. The other models are random, written by CTranslate2's specification.

CTranslate2's beam search is ours with early_stopping="first", or "heuristic" if its length penalty is 0. There is one
difference: with a minimal length it normalises the scores of the first step again, which changes all totals equally. So
length penalties other than 0 are compared without a minimal length.

int8: the weights are the same integers. CTranslate2 truncates activations in files before version 5; we round. Rows
without negative values have 255 levels here and 127 there. So outputs are equal in float32, where CTranslate2 computes
with these weights too, and almost equal in int8. Outputs equal to float32's, of 300 words: 286 of ours, 279 of
CTranslate2's with rounding and 268 with truncation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
from ctranslate2.specs import common_spec, model_spec, transformer_spec
from prometheus_client import CollectorRegistry

from antiphon.architecture.config import preset
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.checkpoints.ctranslate2_files import ModelFile
from antiphon.controls.table import EarlyStopping
from antiphon.domain.request import TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.errors import SourceError, TokenizerError
from antiphon.export.quantize import quantize_rows
from antiphon.importer.importer import ImportOptions, _inspect, _Source, import_checkpoint, load_model
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.runtime.lanes import open_runner
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.tools.bench.ctranslate2_conversion import ctranslate2_specification, save_ctranslate2_model, translate
from antiphon.transformer.greedy import greedy
from tests.fakes import limits_for, request_of
from tests.parity.test_ctranslate2 import random_checkpoint

NAMES = (
    "محمد احمد علي حسن فاطمة خديجة عمر عثمان يوسف ابراهيم سليمان داود مريم نور سمير كريم طارق زياد بغداد دمشق القاهرة "
    "بيروت عمان تونس الرباط طرابلس مراكش حلب البصرة الموصل اسكندرية فلسطين سوريا لبنان العراق مصر السودان الجزائر "
    "المغرب ليبيا"
)
LENGTH = 256  # CTranslate2's maximum output length
BEAMS = 4


@pytest.fixture(scope="module")
def folder() -> Path:
    data = os.environ.get("ANTIPHON_DATA")
    path = Path(data or "") / "ct2-aren-transliteration"
    if data is None or not path.is_dir():
        pytest.skip("ANTIPHON_DATA with ct2-aren-transliteration is not set")
    return path


@pytest.fixture(scope="module")
def words(folder: Path) -> list[list[str]]:
    """Return names, and random letters of the source vocabulary with one letter outside it."""
    letters = (folder / "source_vocabulary.txt").read_text(encoding="utf-8").split("\n")[3:39]
    dice = random.Random(1)
    drawn = [[dice.choice([*letters, "Q"]) for _ in range(dice.randint(1, 14))] for _ in range(260)]
    return [*drawn, *map(list, NAMES.split())]


@pytest.fixture(scope="module")
def integer_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with the int8 weights as model.bin."""
    copy = tmp_path_factory.mktemp("integers")
    for name in ("source_vocabulary.txt", "target_vocabulary.txt"):
        shutil.copy(folder / name, copy)
    shutil.copy(folder / "model.i8.bin", copy / "model.bin")
    return copy


@pytest.fixture(scope="module")
def floats(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return imported(folder, tmp_path_factory.mktemp("floats") / "aren", "float32")


@pytest.fixture(scope="module")
def integers(integer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return imported(integer_folder, tmp_path_factory.mktemp("int8") / "aren", "float32", "int8")


def imported(source: Path, target: Path, *precisions: Precision) -> Bundle:
    return import_checkpoint(ImportOptions(source=str(source), target=target, precisions=precisions, explain=False))


def theirs(folder: Path, words: Sequence[Sequence[str]], compute_type: str, **options: object) -> list[str]:
    translator = ctranslate2.Translator(str(folder), compute_type=compute_type, intra_threads=1)
    results = translator.translate_batch(list(map(list, words)), max_batch_size=32, **options)
    return [" ".join(result.hypotheses[0]) for result in results]


def ours(
    bundle: Bundle, words: Sequence[Sequence[str]], precision: Precision, **params: object
) -> list[list[tuple[str, float | None, int]]]:
    """Return text, score and number of tokens of each word's outputs."""
    tokenizer = open_tokenizer(bundle.path, bundle.manifest.text)
    least = bundle.manifest.generation.min_new_tokens
    settings = SamplingParams(**{"max_new_tokens": LENGTH, "min_new_tokens": least or 0, **params})  # type: ignore[arg-type]
    runner = open_runner(bundle, max_rows=32, threads=1, precision=precision)
    sources = [tokenizer.encode(" ".join(word)) for word in words]
    events = asyncio.run(answers(Engine(runner, limits_for(runner), new_metrics()), sources, settings))
    return [[(tokenizer.decode(e.token_ids), e.score, len(e.token_ids)) for e in outputs] for outputs in events]


def new_metrics() -> Metrics:
    return Metrics(MetricFamilies(CollectorRegistry()), "offline")


async def answers(
    engine: Engine, sources: Sequence[Sequence[int]], params: SamplingParams
) -> list[Sequence[TokenEvent]]:
    engine.start()
    try:
        streams = []
        for index, source in enumerate(sources):
            streams.append(OutputStream(str(index)))
            request = request_of(str(index), tuple(source), params=params, arrival_s=engine.clock())
            engine.submit(dataclasses.replace(request, is_streamed=False), streams[-1])
        return [await stream.collect() for stream in streams]
    finally:
        await asyncio.to_thread(engine.stop)


def first(outputs: list[list[tuple[str, float | None, int]]]) -> list[str]:
    return [of_word[0][0] for of_word in outputs]


def test_known_answer(floats: Bundle) -> None:
    assert first(ours(floats, [list("آتزمون")], "float32")) == ["a t z m o n"]


def test_greedy_outputs_equal_those_of_ctranslate2(floats: Bundle, folder: Path, words: list[list[str]]) -> None:
    expected = theirs(folder, words, "float32", beam_size=1)
    assert first(ours(floats, words, "float32")) == expected
    assert len(set(expected)) > 250


def test_beams_equal_those_of_ctranslate2_without_length_penalty(
    floats: Bundle, folder: Path, words: list[list[str]]
) -> None:
    expected = theirs(folder, words, "float32", beam_size=BEAMS, length_penalty=0)
    found = first(ours(floats, words, "float32", beam_width=BEAMS, length_penalty=0.0))
    assert found == expected
    assert expected != theirs(folder, words, "float32", beam_size=1)


@pytest.mark.parametrize("penalty", [1.0, 0.6])
def test_beams_equal_those_of_ctranslate2(floats: Bundle, folder: Path, words: list[list[str]], penalty: float) -> None:
    expected = theirs(folder, words, "float32", beam_size=BEAMS, length_penalty=penalty, min_decoding_length=0)
    search = dict(beam_width=BEAMS, length_penalty=penalty, early_stopping=EarlyStopping.FIRST, min_new_tokens=0)
    assert first(ours(floats, words, "float32", **search)) == expected


@pytest.mark.parametrize("beam_width", [1, BEAMS])
def test_int8_weights_give_the_outputs_of_ctranslate2(
    integers: Bundle, integer_folder: Path, words: list[list[str]], beam_width: int
) -> None:
    expected = theirs(integer_folder, words, "float32", beam_size=beam_width, length_penalty=0)
    penalty = {"length_penalty": 0.0} if beam_width > 1 else {}
    assert first(ours(integers, words, "float32", beam_width=beam_width, **penalty)) == expected


@pytest.mark.combinations
def test_int8_products_lose_no_more_than_those_of_ctranslate2(
    integers: Bundle, integer_folder: Path, words: list[list[str]], tmp_path: Path
) -> None:
    exact = theirs(integer_folder, words, "float32", beam_size=1)
    rewrite_as_newest(integer_folder, tmp_path)
    rounding = theirs(tmp_path, words, "int8", beam_size=1)
    found = first(ours(integers, words, "int8"))
    assert equal(found, exact) >= equal(rounding, exact) - 5
    assert equal(found, exact) > 0.9 * len(words)
    assert equal(found, rounding) > 0.85 * len(words)


def equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(a == b for a, b in zip(left, right, strict=True))


def rewrite_as_newest(folder: Path, to: Path) -> None:
    """Write the variables as a file of version 6, so that CTranslate2 rounds activations."""
    file = ModelFile(folder / "model.bin")
    names = list(file)
    held = struct.pack("<I", 6) + string(file.specification) + struct.pack("<II", file.revision, len(names))
    for name in names:
        array = file.array(name)
        held += string(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        held += struct.pack("<BI", ("float32", "int8").index(file.dtype(name)), array.nbytes) + array.tobytes()
    (to / "model.bin").write_bytes(held + struct.pack("<I", 0))
    tokens = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", decoder_start_token="<s>")
    (to / "config.json").write_text(json.dumps({**tokens, "add_source_bos": False, "add_source_eos": False}))
    for path in folder.glob("*.txt"):
        shutil.copy(path, to)


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def test_int8_weights_are_the_same_integers_when_quantised_again(integer_folder: Path) -> None:
    file = ModelFile(integer_folder / "model.bin")
    largest = set()
    for name in file:
        if file.dtype(name) == "int8":
            integers, scales = quantize_rows(file.floats(name))
            assert (integers == file.array(name)).all(), name
            assert abs(scales * file.array(f"{name}_scale") - 1).max() < 1e-6
            largest |= set(abs(integers.astype(int)).max(axis=1).tolist())
    assert largest == {126, 127}, "rows that were cut off are the hard ones"


RANDOM: dict[str, dict[str, object]] = {
    "post_norm": {},
    "m2m_100": dict(sinusoids="fairseq", positions_offset=2, norm_placement="pre", activation="gelu"),
    "bart": dict(positions="learned", positions_offset=2, embedding_norm=True, activation="gelu_tanh"),
    "untied": dict(tie_source_target=False, tie_output=False, source_vocab_size=280, scale_embeddings=False),
    "t5": dict(
        norm="rmsnorm", norm_placement="pre", activation="silu", gated=True, positions="t5_relative", bias=False,
        tie_output=False, scale_embeddings=False, attention_scale=1.0, head_dim=24,
    ),
}  # fmt: skip


# Largest error of a weight, relative to the largest weight: half a quantisation step.
ROUNDING = {None: 0.0, "int8": 0.51 / 127, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.combinations
@pytest.mark.parametrize("quantization", ROUNDING)
@pytest.mark.parametrize("name", RANDOM)
def test_random_model_is_equal_after_export_and_import(tmp_path: Path, name: str, quantization: str | None) -> None:
    """A model written by CTranslate2 and imported has the same shape, and the same weights except for rounding."""
    checkpoint = random_checkpoint(preset("tiny", vocab_size=300, **RANDOM[name]), seed=3)
    save_ctranslate2_model(checkpoint, tmp_path, quantization=quantization)
    source = _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
    # The converted model has its positions as a table, and relative positions have no maximum. It has no padding token.
    changed = {"positions", "positions_offset", "sinusoids", "pad_id", "head_dim", "attention_scale"}
    changed |= {"max_source_len", "max_target_len"} if name == "t5" else set()
    assert source.config.model_dump(exclude=changed) == checkpoint.config.model_dump(exclude=changed)
    assert source.config.resolved_head_dim == checkpoint.config.resolved_head_dim
    assert source.config.resolved_attention_scale == pytest.approx(checkpoint.config.resolved_attention_scale)
    weights, expected = load_model(source).state_dict(), checkpoint.model.state_dict()
    offset = checkpoint.config.positions_offset
    for key, tensor in expected.items():
        wanted = tensor[offset:] if key.endswith("positions.table") else tensor
        assert (weights[key] - wanted).abs().max() <= ROUNDING[quantization] * wanted.abs().max(), key


@pytest.mark.combinations
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_random_model_gives_the_outputs_of_ctranslate2(tmp_path: Path, quantization: str | None) -> None:
    checkpoint = random_checkpoint(preset("tiny", vocab_size=300, **RANDOM["untied"]), seed=5)
    save_ctranslate2_model(checkpoint, tmp_path, quantization=quantization)
    model = load_model(_inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle")))
    dice = random.Random(5)
    sources = [[*(dice.randrange(4, 280) for _ in range(dice.randrange(1, 20))), 2] for _ in range(12)]
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    expected = translate(translator, sources, max_decoding_length=24, min_decoding_length=0)
    assert greedy(model, sources, 24) == expected
    assert len(set(map(tuple, expected))) > 1


def test_model_whose_first_decoder_input_is_zeros_gets_a_begin_token(tmp_path: Path) -> None:
    """CTranslate2 writes Marian like this: the first decoder input is not a token and cannot be generated."""
    checkpoint = random_checkpoint(preset("tiny", vocab_size=300, activation="silu"), seed=9)
    spec = ctranslate2_specification(checkpoint)
    spec.decoder.start_from_zero_embedding = True
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(tmp_path))
    source = _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
    assert (source.config.vocab_size, source.config.bos_id) == (301, 300)
    assert source.settings["suppress_tokens"] == [300]
    dice = random.Random(5)
    sources = [[dice.randrange(4, 300) for _ in range(dice.randrange(1, 20))] for _ in range(12)]
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    expected = translate(translator, sources, max_decoding_length=24, min_decoding_length=0)
    assert greedy(load_model(source), sources, 24) == expected
    assert len(set(map(tuple, expected))) > 1


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "Shaw's positions": (dict(relative_position=True), "relative_position_keys belongs to a part that is not supp"),
    "fewer key heads": (dict(num_heads_kv=2), "num_heads_kv is 2; only num_heads, 4, is supported"),
    "another activation": (dict(activation=common_spec.Activation.Tanh), "activation is 5; supported are"),
    "norms of queries": (dict(qk_norm=True), "k_norm/gamma belongs to a part that is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_part_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changed, message = REFUSED[name]
    sides = (transformer_spec.TransformerEncoderSpec, transformer_spec.TransformerDecoderSpec)
    spec = transformer_spec.TransformerSpec(*(side(1, 4, **changed) for side in sides))
    fill(spec, width=16)
    for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
        register(["<unk>", "<s>", "</s>", "a"])
    spec.validate()
    spec.save(str(tmp_path))
    with pytest.raises(SourceError, match=message):
        _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


def fill(spec: transformer_spec.TransformerSpec, width: int) -> None:
    """Give every tensor some values; the test depends only on names and scalars."""

    def set_zeros(part: object, name: str, value: object) -> None:
        if value is None or name.endswith("/bias"):
            shape = (4, width) if "embeddings" in name else (3 * width, width)
            setattr(part, name.rsplit("/", 1)[-1], np.zeros(shape, np.float32))

    model_spec.visit_spec(spec, set_zeros)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held[:200], "is truncated: "),
        (lambda held: struct.pack("<I", 7) + held[4:], "version is 7, supported are 2 to 6"),
        (
            lambda held: held.replace(b"TransformerSpec\0", b"ConformerSpec\0\0\0"),
            "its specification is 'ConformerSpec'",
        ),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    save_ctranslate2_model(random_checkpoint(preset("tiny", vocab_size=300), seed=1), tmp_path)
    file = tmp_path / "model.bin"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(SourceError, match=rf"model\.bin.*{message}"):
        _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


def test_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    save_ctranslate2_model(random_checkpoint(preset("tiny", vocab_size=300), seed=1), tmp_path)
    (tmp_path / "shared_vocabulary.json").write_text(json.dumps([str(index) for index in range(299)]))
    with pytest.raises(SourceError, match="embeds 300 tokens; its vocabulary has 299"):
        _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))


def test_words_are_looked_up_as_by_ctranslate2(tmp_path: Path) -> None:
    """The first of equal tokens is used, a token can end with a carriage return, and other words are unknown."""
    checkpoint = random_checkpoint(preset("tiny", vocab_size=300), seed=1)
    save_ctranslate2_model(checkpoint, tmp_path)
    tokens = [str(index) for index in range(300)]
    tokens[9], tokens[11] = "7", "x\r"
    (tmp_path / "shared_vocabulary.json").write_text(json.dumps(tokens))
    source = _inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle"))
    folder = tmp_path / "text"
    folder.mkdir()
    with pytest.raises(TokenizerError, match="the vocabulary has no <unk>"):
        written(source, folder)
    tokens[3] = "<unk>"
    (tmp_path / "shared_vocabulary.json").write_text(json.dumps(tokens))
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "unk_token": "<unk>"}))
    tokenizer = written(_inspect(ImportOptions(source=str(tmp_path), target=tmp_path / "bundle")), folder)
    assert tokenizer.encode("7 8 nothing") == [7, 8, 3]
    assert tokenizer.decode([9, 11, 12]) == "7 x\r 12"
    found = greedy(checkpoint.model, [[7, 8, 3]], 24)
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    (result,) = translator.translate_batch(
        [["7", "8", "nothing"]], beam_size=1, max_decoding_length=24, min_decoding_length=0
    )
    assert [tokens[index] for index in found[0]] == result.hypotheses[0]


def written(source: _Source, folder: Path) -> Tokenizer:
    source.family.write_text(source.folder, source.settings, folder)
    return open_tokenizer(folder, source.family.text(source.folder, source.settings, source.config))
