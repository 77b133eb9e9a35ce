"""Further training of imported checkpoints: a BERT of transformers with its tokenizer and heads, and a GPT-2."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.cli.main import main
from antiphon.export.export import export_bundle
from antiphon.text.format import fill
from tests.language_recipes import language_recipe, running_text
from tests.parity.decoder_checkpoints import write_decoder
from tests.parity.encoder_checkpoints import write_checkpoint
from tests.recipe_files import write_recipe as write_toml

TEXTS = ["the cat sat on the mat", "a big dog ran", "small red cats", "the dog", "blue mat a cat sat", "dogs ran on"]
CONFIG = dict(
    vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=24,
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Write a random BERT whose vocabulary is padded beyond its tokenizer's, and return the model."""
    folder = tmp_path_factory.mktemp("bert")
    return folder, write_checkpoint(folder, transformers.BertConfig(**CONFIG), "BertForPreTraining")  # type: ignore[arg-type]


def write_recipe(folder: Path, task: str) -> Path:
    """Write a recipe that classifies texts by animal, or that pre-trains on the same texts."""
    lines = "".join(f"{text}\t{'dog' if 'dog' in text else 'cat'}\n" for text in TEXTS * 40)
    (folder / "texts.tsv").write_text(lines)
    file = f'{{ path = "texts.tsv", format = "tsv", sha256 = "{hashlib.sha256(lines.encode()).hexdigest()}" }}'
    parts = f"train = [{file}]\nvalid = [{file}]\ntest = [{file}]" if task == "classify" else f"sentences = [{file}]"
    model = "" if task == "classify" else 'vocab_size = 300\nmodel = { architecture = "encoder", d_model = 8, '
    model += "" if task == "classify" else "encoder_layers = 1, decoder_layers = 0, num_heads = 1, d_ff = 8 }"
    train = 'batch_tokens = 128\nmax_steps = 30\nwarmup_steps = 5\npeak_lr = 1e-2\nbf16 = false\nschedule = "linear"'
    path = folder / f"{task}.toml"
    path.write_text(
        f'name = "{task}"\ntask = "{task}"\n{model}\n[data]\norigin = "made up"\nlicence = "CC0"\n'
        f'attribution = "nobody"\n{parts}\n[train]\n{train}\ncheckpoint_every_steps = 30\n'
    )
    return path


def train(folder: Path, init: Path, task: str, *flags: str) -> Path:
    arguments = [str(write_recipe(folder, task)), "--data", str(folder), "--output", str(folder / "run")]
    assert main(["train", *arguments, "--init", str(init), *flags]) == 0
    return folder / "run/averaged"


def test_fine_tuned_bert_has_the_encoder_states_of_the_original(original: tuple[Path, Any], tmp_path: Path) -> None:
    """The states of a frozen encoder after training, saving and loading are equal to those of transformers."""
    folder, model = original
    checkpoint = load_checkpoint(train(tmp_path, folder, "classify", "--freeze-encoder"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert checkpoint.text.kind == "tokenizers"
    for text in TEXTS:
        ids, _ = fill(checkpoint.text, checkpoint.tokenizer.encode(text))
        assert list(ids) == [2, *theirs(text, add_special_tokens=False)["input_ids"], 3]
        with torch.no_grad():
            expected = model.bert(torch.tensor([ids])).last_hidden_state
            found = checkpoint.model.encode(torch.tensor([ids]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_fine_tuned_bert_learns_and_is_exported(original: tuple[Path, Any], tmp_path: Path) -> None:
    averaged = train(tmp_path, original[0], "classify")
    assert json.loads((averaged / "scores.json").read_text())["accuracy"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's tolerance
        bundle = export_bundle(load_checkpoint(averaged), tmp_path / "bundle", precisions=("float32",))
    (head,) = bundle.manifest.model.heads
    assert head.labels == ("cat", "dog")
    assert bundle.manifest.text == load_checkpoint(averaged).text


def test_pretraining_of_bert_continues(original: tuple[Path, Any], tmp_path: Path) -> None:
    """The model keeps its vocabulary, mask token and fill_mask head instead of those of the recipe."""
    averaged = train(tmp_path, original[0], "pretrain")
    checkpoint = load_checkpoint(averaged)
    assert [head.task for head in checkpoint.config.heads] == ["fill_mask", "next_sentence"]
    assert checkpoint.config.vocab_size == CONFIG["vocab_size"]
    losses = [json.loads(line) for line in (averaged.parent / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["valid_loss"] < 3


def test_gpt2_is_trained_further_from_its_own_loss(tmp_path: Path) -> None:
    """Without a step's effect (a rate near 0) the loss is that of transformers in the same windows."""
    theirs = write_decoder(tmp_path / "gpt2", "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    losses = {}
    for rate, num_steps in ((1e-12, 1), (1e-2, 60)):
        recipe = language_recipe(
            tmp_path, peak_lr=rate, max_steps=num_steps, checkpoint_every_steps=num_steps, warmup_steps=1
        )
        path, run = write_toml(recipe, tmp_path / "recipe.toml"), tmp_path / f"run{num_steps}"
        arguments = ["--data", str(tmp_path), "--init", str(tmp_path / "gpt2"), "--output", str(run)]
        assert main(["train", path, *arguments]) == 0
        losses[num_steps] = json.loads((run / "metrics.jsonl").read_text())["valid_loss"]
    text = running_text()
    ids = tokenizer(text[int(0.8 * len(text)) : int(0.9 * len(text))])["input_ids"]
    total = 0.0
    for start in range(0, len(ids) - 1, 63):
        window = torch.tensor([ids[start : start + 64]])
        with torch.no_grad():
            total += theirs(window, labels=window).loss.item() * (window.shape[1] - 1)
    assert losses[1] == pytest.approx(total / (len(ids) - 1), rel=1e-4)
    assert losses[60] < losses[1] / 2
    assert load_checkpoint(tmp_path / "run60/averaged").text.kind == "tokenizers"
