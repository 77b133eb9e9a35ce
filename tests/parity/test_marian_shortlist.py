"""Candidates of a Marian shortlist, beside Marian that decodes with the same file, and with answers of real models."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.checkpoints.families.marian_files import original
from antiphon.checkpoints.marian_files import MarianFile
from antiphon.checkpoints.marian_original import MarianOriginal
from antiphon.checkpoints.marian_shortlist import read_shortlist
from antiphon.importer.importer import ImportOptions, _inspect, _Source
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import encode_sources, open_tokenizer
from tests.marian_models import VARIANTS, write_folder, write_npz, write_shortlist
from tests.parity.test_marian_import import LINES
from tests.real_weights import firefox_model, marian

END, UNKNOWN, NUM_FREQUENT = 0, 1, 4
SIZE = 60

pytestmark = pytest.mark.combinations


def inspected(folder: Path) -> tuple[_Source, Shortlist]:
    source = _inspect(ImportOptions(source=str(folder), target=folder / "bundle"))
    return source, read_shortlist(source.settings["shortlist"], source.settings["tokens"], source.config)


def greedy(formulas: MarianOriginal, source: list[int], candidates: list[int], limit: int) -> list[int]:
    """Return the greedy output of Marian's formulas among the candidates, without the end token."""
    memory, ids = formulas.encode(source), [SIZE]
    while len(ids) <= limit:
        logits = formulas.logits(memory, ids)[-1]
        ids.append(max((token for token in candidates if token != UNKNOWN), key=lambda token: float(logits[token])))
        if ids[-1] == END:
            break
    return [token for token in ids[1:] if token != END]


@pytest.mark.parametrize("form", ["binary", "text"])
@pytest.mark.parametrize("is_shared", [False, True])
@torch.no_grad()
def test_best_candidates_are_the_answer_of_marian_with_the_same_shortlist(
    tmp_path: Path, form: str, is_shared: bool
) -> None:
    """Marian adds frequent tokens until their number is a multiple of 8, so only such sources are compared."""
    write_folder(tmp_path, VARIANTS["ssru"])
    dice = random.Random(4)
    lists = {source: set(dice.sample(range(2, SIZE), dice.randrange(1, 6))) for source in range(2, SIZE)}
    if form == "binary":
        write_shortlist(tmp_path / "lex.bin", lists, num_frequent=NUM_FREQUENT, num_sources=SIZE)
        settings = ["lex.bin", "1"]
    else:
        pairs = [(source, target) for source, targets in lists.items() for target in targets]
        (tmp_path / "lex.s2t").write_text("".join(f"w{target} w{source} 0.2\n" for source, target in pairs))
        settings = ["lex.s2t", str(NUM_FREQUENT), "5", "0.1"]
    vocabs = [f"vocab.{side}.yml" for side in ("source", "source" if is_shared else "target")]
    described = {"models": ["model.npz"], "vocabs": vocabs, "shortlist": settings}
    (tmp_path / "decoder.yml").write_text(json.dumps(described))
    _, shortlist = inspected(tmp_path)
    drawn = [[*dice.sample(range(2, SIZE), dice.randrange(1, 7)), END] for _ in range(200)]
    sources = [ids for ids in drawn if len(shortlist.candidates(ids)) % 8 == 0]
    assert len(sources) > 10
    answers = marian(
        f"-m {tmp_path}/model.npz -v {tmp_path}/{vocabs[0]} {tmp_path}/{vocabs[1]} --beam-size 1 --mini-batch 1 "
        f"--max-length-factor 2 --shortlist {tmp_path}/{' '.join(settings)}",
        [" ".join(f"w{token}" for token in ids[:-1]) for ids in sources],
    )
    formulas, is_other = original(tmp_path), 0
    for ids, answer in zip(sources, answers, strict=True):
        candidates = shortlist.candidates(ids).tolist()
        tokens = [int(word[1:]) for word in answer.split()]
        assert tokens == greedy(formulas, ids, candidates, max(2 * len(ids), 1))
        is_other += tokens != greedy(formulas, ids, list(range(SIZE)), 2 * len(ids))
    assert is_other > 5


@pytest.mark.parametrize("pair", ["enpt", "pten"])
def test_candidates_of_a_firefox_model_cover_the_answers_over_the_full_vocabulary(tmp_path: Path, pair: str) -> None:
    folder = firefox_model(pair)
    source, shortlist = inspected(folder)
    file = MarianFile(Path(source.settings["path"]))
    write_npz(tmp_path / "model.npz", file.options, {name: file.floats(name) for name in file})
    vocabulary = source.settings["vocabularies"][0]
    answers = marian(f"-m {tmp_path}/model.npz -v {vocabulary} {vocabulary} --beam-size 1", LINES[pair])
    text = source.family.text(folder, source.settings, source.config)
    tokenizer = open_tokenizer(folder, text)
    candidates = [shortlist.candidates(ids) for ids in encode_sources(tokenizer, text, LINES[pair])]
    covered = [
        np.isin([*ids, source.config.eos_id], own)
        for ids, own in zip(tokenizer.encode_targets(answers), candidates, strict=True)
    ]
    assert np.concatenate(covered).mean() >= 0.98
    assert max(map(len, candidates)) < 0.05 * source.config.vocab_size
