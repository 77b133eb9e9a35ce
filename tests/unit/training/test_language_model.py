"""Training of language models on a text that a model learns in seconds."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from antiphon.architecture.config import preset
from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.errors import CheckpointError, RecipeError
from antiphon.text.subwords import EXACT_END_ID
from antiphon.text.tokenizer import Tokenizer, exact_bpe_format, open_tokenizer
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.corpus import read_running_text
from antiphon.training.language_model import LanguageModelTask, Windows, adjacent_starts, language_loss, shuffled_starts
from antiphon.training.recipe import LanguageModelRecipe, load_any_recipe
from antiphon.training.scores import text_loss
from antiphon.training.task import RunFolders
from antiphon.training.trainer import Trainer
from antiphon.transformer.random_model import random_transformer
from tests.language_recipes import GROUP, MODEL, language_recipe, running_text, trained_language_model
from tests.recipe_files import check_equal_weights, killed_at

pytestmark = pytest.mark.training

torch.set_num_threads(1)  # arrays this small are slower with several threads

DATA = os.environ.get("ANTIPHON_DATA")


def exact_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer as training opens it, from its file."""
    Tokenizer.train_exact_bpe([running_text()], vocab_size).save(folder / "tokenizer.json")
    return open_tokenizer(folder, exact_bpe_format())


def test_smallest_vocabulary_has_a_token_for_each_byte(tmp_path: Path) -> None:
    tokenizer = exact_tokenizer(tmp_path, 257)
    text = " \n\n\tZOË  — 早\r\n </s> \u00a0"
    ids = tokenizer.encode(text)
    assert [tokenizer.bytes_of([index]) for index in ids] == [bytes([byte]) for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert EXACT_END_ID not in ids


def test_merges_shorten_a_text_and_keep_it_exact(tmp_path: Path) -> None:
    tokenizer = exact_tokenizer(tmp_path, 300)
    text = running_text(seed=6)
    assert 257 < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode(text)) < 0.6 * len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_parts_are_cut_by_characters_in_the_order_of_the_files(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path)
    text = running_text()
    parts = read_running_text(recipe.data, tmp_path)
    assert parts["train"] + parts["valid"] + parts["test"] == text
    assert [len(parts["train"]), len(parts["test"])] == pytest.approx([0.8 * len(text), 0.1 * len(text)], abs=2)
    halves = recipe.data.model_copy(update={"split": (0.5, 0.5)})
    parts = read_running_text(halves, tmp_path)
    assert parts["valid"] == parts["test"] == text[len(parts["train"]) :]


def test_changed_text_is_refused(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path)
    (tmp_path / "second.txt").write_text("another text", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"second\.txt has sha256"):
        read_running_text(recipe.data, tmp_path)


@pytest.mark.parametrize("num_tokens", [23, 24, 25, 101])
def test_adjacent_windows_predict_every_token_but_the_first_once(num_tokens: int) -> None:
    tokens = torch.arange(num_tokens) + 1000
    plan = adjacent_starts(num_tokens, 8).split(2)  # type: ignore[no-untyped-call]
    windows = Windows(tokens=tokens, plan=plan, num_predicted=8)
    batches = [windows[index] for index in range(len(windows))]
    labels = torch.cat([batch.labels[batch.labels != IGNORED_LABEL] for batch in batches])
    assert labels.tolist() == tokens[1:].tolist()
    assert sum(int(batch.counts) for batch in batches) == num_tokens - 1
    for batch in batches:
        assert torch.equal(batch.inputs[batch.labels != IGNORED_LABEL] + 1, batch.labels[batch.labels != IGNORED_LABEL])


def test_windows_of_an_epoch_are_full_and_disjoint_and_depend_on_the_seed() -> None:
    tokens = torch.arange(1003)
    firsts = []
    for seed in range(40):
        starts = shuffled_starts(len(tokens), 8, seed)
        assert torch.equal(starts, shuffled_starts(len(tokens), 8, seed))
        batch = Windows(tokens=tokens, plan=[starts], num_predicted=8)[0]
        assert torch.equal(batch.labels, batch.inputs + 1)
        predicted = batch.labels.flatten().tolist()
        assert len(predicted) == len(set(predicted)) >= len(tokens) - 2 * 8
        assert starts.tolist() != sorted(starts.tolist())
        firsts.append(int(starts.min()))
    assert set(firsts) == set(range(8))


@pytest.mark.parametrize("num_tokens", [2, 8, 15])
def test_text_shorter_than_two_windows_has_no_training_windows(num_tokens: int) -> None:
    assert len(shuffled_starts(num_tokens, 8, 1)) == 0


@pytest.mark.parametrize("num_together", [4, 24, 4096])
def test_loss_is_the_cross_entropy_of_every_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_together: int
) -> None:
    """Reference: each window alone, with all logits and PyTorch's loss. The text has 40 windows and a shorter one.

    num_together: tokens that are scored together, of a part of a window, of three windows, and of all windows.
    """
    monkeypatch.setattr("antiphon.training.language_model.SCORED_TOKENS", num_together)
    tokenizer = exact_tokenizer(tmp_path, 257)
    model = random_transformer(
        preset("tiny", vocab_size=257, max_target_len=9, architecture="decoder", encoder_layers=0)
    )
    ids = tokenizer.encode(running_text())[: 40 * 8 + 4]
    expected = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 8):
            window = torch.tensor([ids[start : start + 9]])
            logits = model.logits(model.decode(window[:, :-1], None))[0]
            expected += functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    loss = language_loss(model, tokenizer, ids)
    assert loss.nats == pytest.approx(expected, rel=1e-5)
    assert (loss.num_bytes, loss.num_characters) == (len(ids) - 1, len(tokenizer.decode(ids[1:])))


def test_loss_per_character_and_per_byte_count_the_text() -> None:
    loss = text_loss(7.0, "Zoë — ".encode())
    assert (loss.num_characters, loss.num_bytes) == (6, 9)
    assert loss.nats_per_character == pytest.approx(7 / 6)
    assert loss.bits_per_byte == pytest.approx(7 / 9 / math.log(2))


@pytest.mark.parametrize("vocab_size", [257, 300])
def test_training_learns_the_text(tmp_path: Path, vocab_size: int) -> None:
    """A speech is one choice of three speakers and one of four answers in about 24 characters: 0.1 nats each."""
    averaged = trained_language_model(
        tmp_path, "run", vocab_size=vocab_size, max_steps=250, max_epochs=100, checkpoint_every_steps=125
    )
    entropy = math.log(12) / (len(running_text()) / 400)
    scores = json.loads((averaged / "scores.json").read_text())
    assert entropy * 0.8 < scores["nats_per_character"] < entropy * 2.5
    checkpoint = load_checkpoint(averaged)
    parts = read_running_text(language_recipe(tmp_path, vocab_size=vocab_size).data, tmp_path)
    assert scores["characters"] == pytest.approx(len(parts["test"]), abs=12)
    assert checkpoint.provenance is not None
    assert checkpoint.provenance.licence == "CC0"
    assert checkpoint.tokenizer.decode([checkpoint.config.bos_id]) == "\n"
    losses = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[1]["nats_per_character"] < losses[0]["nats_per_character"]
    if vocab_size == 257:  # the only characters with several bytes are rare
        assert losses[1]["valid_loss"] == pytest.approx(losses[1]["nats_per_character"], rel=0.05)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """A run killed at step 27 resumes from step 20 and ends with bit-identical weights, also with dropout."""
    whole = trained_language_model(tmp_path, "whole")
    with killed_at(27):
        trained_language_model(tmp_path, "killed")
    again = trained_language_model(tmp_path, "killed")
    assert len((tmp_path / "killed/metrics.jsonl").read_text().splitlines()) == 3
    check_equal_weights(whole, again)


def test_training_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """--init gives shape, tokenizer and weights instead of the recipe."""
    init = load_checkpoint(trained_language_model(tmp_path, "run", vocab_size=280))
    trainer = Trainer(language_recipe(tmp_path), tmp_path, tmp_path / "again", GROUP, init=init)
    assert trainer.model_config == init.config
    assert trainer.task.tokenizer.vocab_size == init.tokenizer.vocab_size > 257
    before = trainer.validate()
    trainer.run()
    assert trainer.validate() < before


def test_encoder_is_refused_as_a_start(tmp_path: Path) -> None:
    init = load_checkpoint(trained_language_model(tmp_path, "run", max_steps=1, checkpoint_every_steps=1))
    config = init.config.model_copy(update={"architecture": "encoder", "decoder_layers": 0, "encoder_layers": 1})
    folders = RunFolders(data=tmp_path, run=tmp_path / "again", group=GROUP, init=replace(init, config=config))
    with pytest.raises(CheckpointError, match=r"--init: architecture='encoder'; it must be 'decoder'"):
        LanguageModelTask(language_recipe(tmp_path), folders)


def test_text_without_a_window_is_refused(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path)
    recipe = recipe.model_copy(update=dict(model={**MODEL, "max_target_len": 10_000}))
    with pytest.raises(RecipeError, match="data: the training part has too few texts"):
        Trainer(recipe, tmp_path, tmp_path / "run", GROUP)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 256, r"vocab_size\n.*greater than or equal to 257"),
        ("model", {**MODEL, "architecture": "encoder", "encoder_layers": 2, "decoder_layers": 0}, "trains 'decoder'"),
        ("model", {**MODEL, "max_target_len": 1}, r"model\.max_target_len=1 must be at least 2"),
        ("split", [0.9, 0.2], r"split=\[0\.9, 0\.2\]; its shares must be above 0, and their sum 1"),
        ("split", [1.1, -0.1], "its shares must be above 0"),
        ("split", [1.0], r"data\.split"),
        ("text", [], r"data\.text"),
    ],
)
def test_wrong_field_of_a_recipe_is_named(tmp_path: Path, field: str, value: object, message: str) -> None:
    raw = language_recipe(tmp_path).model_dump()
    (raw["data"] if field in raw["data"] else raw)[field] = value
    with pytest.raises(ValidationError, match=message):
        LanguageModelRecipe.model_validate(raw)


@pytest.mark.parametrize("name", ["shakespeare-gpt", "shakespeare-gpt-large", "austen-gpt"])
def test_shipped_recipe_is_valid(name: str) -> None:
    recipe = load_any_recipe(name)
    assert isinstance(recipe, LanguageModelRecipe)
    assert recipe.name == name
    assert recipe.train.label_smoothing == 0


@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")
def test_shakespeare_is_split_as_published(tmp_path: Path) -> None:
    """nanoGPT prints these numbers of tokens, which are characters: data/shakespeare_char/prepare.py."""
    recipe = load_any_recipe("shakespeare-gpt")
    assert isinstance(recipe, LanguageModelRecipe)
    task = LanguageModelTask(recipe, RunFolders(data=Path(str(DATA)), run=tmp_path, group=GROUP))
    assert {part: len(tokens) for part, tokens in task.tokens.items()} == dict(
        train=1_003_854, valid=111_540, test=111_540
    )
    assert len(set(torch.cat([task.tokens["train"], task.tokens["valid"]]).tolist())) == 65
