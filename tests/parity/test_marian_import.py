"""Marian's own files: our model beside Marian's formulas, Marian itself, and through the import to served answers.

Marian runs where `make real-weights` has fetched pymarian. Outputs are compared token for token, in float32, with the
sum of their log-probabilities. Marian stops after max-length-factor times the tokens of the source.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints.families.marian_files import original
from antiphon.checkpoints.marian_files import MarianFile
from antiphon.checkpoints.marian_original import MarianOriginal
from antiphon.importer.importer import ImportOptions, _inspect, _Source, import_checkpoint, load_model
from antiphon.importer.original import compare_with_original, random_batches, run_formulas
from antiphon.text.tokenizer import encode_sources, open_tokenizer
from antiphon.tools.import_command import check_served
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Transformer
from tests.marian_models import PRE_NORM, VARIANTS, write_folder, write_npz
from tests.marks import marked
from tests.real_weights import firefox_model, marian

END, UNKNOWN = 0, 1
# Of a sum of log-probabilities that Marian prints with six digits.
SCORE_TOLERANCE = 2e-3


def inspected(folder: Path) -> _Source:
    return _inspect(ImportOptions(source=str(folder), target=folder / "bundle"))


def sources_of(size: int) -> list[list[int]]:
    dice = random.Random(2)
    return [[*(dice.randrange(2, size) for _ in range(dice.randrange(1, 12))), END] for _ in range(12)]


def without_unknown(model: Transformer) -> Transformer:
    """Return the model as Marian decodes with it."""
    with torch.no_grad():
        model.output.bias[UNKNOWN] = -1e9
    return model


def formulas_answer(formulas: MarianOriginal, source: list[int], begin: int, limit: int) -> tuple[list[int], float]:
    """Return the greedy output of Marian's formulas and the sum of its log-probabilities."""
    memory, ids, total = formulas.encode(source), [begin], 0.0
    while len(ids) <= limit:
        logits = formulas.logits(memory, ids)[-1]
        logprobs = logits.log_softmax(dim=-1)
        logits[UNKNOWN] = -torch.inf
        ids.append(int(logits.argmax()))
        total += float(logprobs[ids[-1]])
        if ids[-1] == END:
            break
    return [token for token in ids[1:] if token != END], total


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_model_equals_the_formulas_of_marian(tmp_path: Path, name: str) -> None:
    described, _ = write_folder(tmp_path, VARIANTS[name])
    source = inspected(tmp_path)
    model, formulas = load_model(source), original(tmp_path)
    batches = random_batches(source.config)
    errors = compare_with_original(model, batches, run_formulas(formulas, source.config, batches, (), {}).outputs)
    assert errors.keys() == {"encoder states", "logits"}
    sources = sources_of(described["dim-vocabs"][0])
    answers = greedy(without_unknown(model), sources, 14)
    assert answers == [formulas_answer(formulas, ids, source.config.bos_id, 14)[0] for ids in sources]
    assert len(set(map(tuple, answers))) > 3


@pytest.mark.combinations
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"pre-norm"}))
@torch.no_grad()
def test_outputs_and_scores_equal_those_of_marian(tmp_path: Path, name: str) -> None:
    described, _ = write_folder(tmp_path, VARIANTS[name])
    sources = sources_of(described["dim-vocabs"][0])
    expected = marian_answers(tmp_path, sources)
    source = inspected(tmp_path)
    model, formulas = without_unknown(load_model(source)), original(tmp_path)
    for ids, (tokens, score) in zip(sources, expected, strict=True):
        limit = max(len(tokens), 1) if len(tokens) >= 2 * len(ids) else 2 * len(ids)
        answer, total = formulas_answer(formulas, ids, source.config.bos_id, limit)
        assert answer == greedy(model, [ids], limit)[0] == tokens
        assert total == pytest.approx(score, abs=SCORE_TOLERANCE)
    assert len({tuple(tokens) for tokens, _ in expected}) > 3


def marian_answers(folder: Path, sources: list[list[int]]) -> list[tuple[list[int], float]]:
    """Return Marian's output and score for each source."""
    paths = f"-m {folder}/model.npz -v {folder}/vocab.source.yml {folder}/vocab.target.yml"
    lines = [" ".join(f"w{index}" for index in ids[:-1]) for ids in sources]
    printed = marian(f"{paths} --beam-size 1 --mini-batch 1 --max-length-factor 2 --n-best", lines)
    parts = [line.split(" ||| ") for line in printed]
    return [([int(word[1:]) for word in part[1].split()], float(part[-1])) for part in parts]


class _AsMarianDecodes(MarianOriginal):
    """Marian's decoder with self-attention and norms before it, one token after the other.

    From the second token on, keys and values are those of states before the norm, other than in training.
    """

    def _before_target(self, name: str, x: Tensor, causal: Tensor) -> Tensor:
        normed = self._norm(f"{name}_self_Wo", x, "_pre")
        first = self._attend(f"{name}_self", normed[:1], normed[:1])
        return x + torch.cat([first, self._attend(f"{name}_self", normed, x, causal)[1:]])


@pytest.mark.combinations
@torch.no_grad()
def test_marian_itself_decodes_self_attention_after_norms_with_other_formulas_than_it_trains(tmp_path: Path) -> None:
    """docs/IMPORT.md tells this difference, for which a model after its import has other answers."""
    described, _ = write_folder(tmp_path, PRE_NORM)
    sources = sources_of(described["dim-vocabs"][0])
    decoding, training = _AsMarianDecodes(MarianFile(tmp_path / "model.npz")), original(tmp_path)
    begin, differ = described["dim-vocabs"][1], 0
    for ids, (tokens, score) in zip(sources, marian_answers(tmp_path, sources), strict=True):
        limit = max(len(tokens), 1) if len(tokens) >= 2 * len(ids) else 2 * len(ids)
        answer, total = formulas_answer(decoding, ids, begin, limit)
        assert answer == tokens
        assert total == pytest.approx(score, abs=SCORE_TOLERANCE)
        differ += formulas_answer(training, ids, begin, limit)[0] != tokens
    assert differ > 0


IMPORTED = ("gelu, untied", "ssru", "average", "pre-norm")


@pytest.mark.parametrize("name", marked(IMPORTED, "combinations", but=["gelu, untied"]))
def test_imported_folder_is_served_with_the_answers_of_the_formulas(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "model", VARIANTS[name])
    decoder = {"models": ["/train/model.npz"], "vocabs": ["/v/vocab.source.yml", "/v/vocab.target.yml"]}
    settings = {**decoder, "beam-size": 4, "normalize": 0.6, "word-penalty": 0.5}
    (tmp_path / "model" / "decoder.yml").write_text(json.dumps(settings))
    options = ImportOptions(source=str(tmp_path / "model"), target=tmp_path / "bundle", explain=False)
    import_checkpoint(options, check_served)
    manifest = load_bundle(tmp_path / "bundle").manifest
    assert [graphs.precision for graphs in manifest.graphs] == ["float32", "int8"]
    assert (manifest.generation.beam_width, manifest.generation.length_penalty) == (4, 0.6)
    assert manifest.generation.suppressed_ids == (UNKNOWN, manifest.model.bos_id)
    printed = capsys.readouterr()
    assert "served: the answers to 3 texts are those of the original" in printed.out
    assert "word_penalty=0.5 of its generation settings is left out" in printed.err


@pytest.mark.combinations
@pytest.mark.parametrize("pair", ["enpt", "pten"])
def test_firefox_model_gives_the_answers_of_marian(tmp_path: Path, pair: str) -> None:
    """The int8 weights stand for the same numbers in both: Marian reads them as a .npz of float32."""
    folder = firefox_model(pair)
    source = inspected(folder)
    file = MarianFile(Path(source.settings["path"]))
    write_npz(tmp_path / "model.npz", file.options, {name: file.floats(name) for name in file})
    vocabulary = source.settings["vocabularies"][0]
    expected = marian(
        f"-m {tmp_path}/model.npz -v {vocabulary} {vocabulary} --beam-size 1 --mini-batch 16", LINES[pair]
    )
    text = source.family.text(folder, source.settings, source.config)
    tokenizer = open_tokenizer(folder, text)
    model = without_unknown(load_model(source))
    answers = greedy(model, [list(ids) for ids in encode_sources(tokenizer, text, LINES[pair])], 60)
    assert [tokenizer.decode(ids) for ids in answers] == expected


LINES: dict[str, list[str]] = {
    "enpt": [
        "Hello, how are you?", "The weather is nice today, so we walk to the river.", "I lost my keys.",
        "Where is the nearest station?", "She bought three books and a newspaper.", "Thank you very much!",
        "The meeting was moved to Thursday at 10:30.", "Please send me the invoice by e-mail.",
    ],
    "pten": [
        "Olá, como estás?", "O tempo está bom hoje.", "Perdi as minhas chaves.", "Onde fica a estação mais próxima?",
        "Ela comprou três livros.", "Muito obrigado pela sua ajuda!", "A reunião foi adiada para quinta-feira.",
        "Por favor, envie-me a fatura por e-mail.",
    ],
}  # fmt: skip
