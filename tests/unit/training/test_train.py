"""Training on an artificial language of a few dozen words, which a model learns in seconds."""

import hashlib
import json
import os
import platform
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.bundle.manifest import Precision
from antiphon.checkpoints.checkpoint import average_weights, load_checkpoint, read_tensors
from antiphon.cli.main import main
from antiphon.errors import CheckpointError, RecipeError
from antiphon.export.export import export_bundle
from antiphon.training.pruning import Choice, HeadsPerModule, Share, prune
from antiphon.training.recipe import Recipe, TrainConfig
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer, learning_rate
from antiphon.training.translation import TranslationTask
from antiphon.transformer.greedy import greedy
from tests.recipe_files import write_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads

WORDS = {"red": "rot", "green": "grün", "blue": "blau", "house": "Haus", "tree": "Baum", "old": "alt", "new": "neu"}


WORKER = """
import sys
from dataclasses import replace
from pathlib import Path
from safetensors.torch import save_file
from antiphon.checkpoints.checkpoint import weights_of
from antiphon.training.recipe import Recipe
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer

folder = Path(sys.argv[1])
recipe = Recipe.model_validate_json((folder / "recipe.json").read_text())
group = Group.join()
trainer = Trainer(recipe, folder, folder / "run", group)
trainer.run()
save_file(weights_of(trainer.model), folder / f"rank{group.rank}.safetensors")
"""


def write_pairs(path: Path) -> None:
    chance = random.Random(3)
    lines = []
    for _ in range(2500):
        words = chance.choices(list(WORDS), k=chance.randint(2, 4))
        lines.append(" ".join(words) + "\t" + " ".join(WORDS[word] for word in words))
    path.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)), encoding="utf-8")


def make_recipe(folder: Path, **train: object) -> Recipe:
    path = folder / "pairs.tsv"
    if not path.exists():
        write_pairs(path)
    settings = dict(
        batch_tokens=512, max_steps=40, warmup_steps=20, peak_lr=5e-3, bf16=False, checkpoint_every_steps=10,
        average_last=2, label_smoothing=0.0,
    )  # fmt: skip
    return Recipe.model_validate(
        dict(
            name="words",
            vocab_size=300,
            data=dict(
                origin="made up",
                licence="CC0",
                attribution="nobody",
                source_language="en",
                target_language="de",
                pairs=dict(path=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest()),
            ),
            model=dict(
                d_model=32, encoder_layers=1, decoder_layers=1, num_heads=4, d_ff=64, norm_placement="pre", dropout=0.1
            ),
            train={**settings, **train},
        )
    )


def make_trainer(folder: Path, run: str, **train: object) -> Trainer:
    group = Group(rank=0, size=1, device=torch.device("cpu"))
    return Trainer(make_recipe(folder, **train), folder, folder / run, group)


def train(folder: Path, run: str, **settings: object) -> Path:
    averaged = make_trainer(folder, run, **settings).run()
    assert averaged is not None
    return averaged


class Killed(Exception):
    """Simulation of SIGKILL: training stops between two statements without any clean-up."""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """A run killed at step 27 resumes from step 20 and ends with bit-identical weights, also with dropout."""
    whole = train(tmp_path, "whole", optimizer=optimizer)
    step = Trainer.train_step

    def killed_at_27(trainer: Trainer, batch: object) -> float:
        if trainer.progress.step == 27:
            raise Killed
        return step(trainer, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", killed_at_27)
    with pytest.raises(Killed):
        train(tmp_path, "killed", optimizer=optimizer)
    monkeypatch.undo()
    resumed = make_trainer(tmp_path, "killed", optimizer=optimizer)
    resumed.resume()
    assert resumed.progress.step == 20
    again = train(tmp_path, "killed", optimizer=optimizer)
    expected, found = (read_tensors(path / "model.safetensors") for path in (whole, again))
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_two_processes_train_equal_weights(tmp_path: Path) -> None:
    """With torchrun two processes train on different batches, validate together and end with equal weights."""
    recipe = make_recipe(tmp_path, max_steps=60, checkpoint_every_steps=30)
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script), str(tmp_path)], check=True, env=environment)
    first, second = (read_tensors(tmp_path / f"rank{rank}.safetensors") for rank in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["valid_loss"] for line in lines]
    assert len(losses) == 2, "only one of the two processes writes"
    assert losses[1] < losses[0]
    assert load_checkpoint(tmp_path / "run/averaged").config.d_model == 32


def test_training_learns_the_language(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(train(tmp_path, "run", max_steps=600, peak_lr=1e-2, checkpoint_every_steps=200))
    tokenizer = checkpoint.tokenizer
    texts = ["red house", "old green tree blue", "new new red"]
    sources = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    answers = [tokenizer.decode(ids) for ids in greedy(checkpoint.model, sources, 40)]
    assert answers == [" ".join(WORDS[word] for word in text.split()) for text in texts]
    assert checkpoint.provenance is not None
    assert checkpoint.provenance.licence == "CC0"
    losses = [json.loads(line)["valid_loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.05
    assert (tmp_path / "run/loss.png").stat().st_size > 0


def test_training_saves_its_last_step_when_it_ends_with_its_epochs(tmp_path: Path) -> None:
    """Regression: the run ended without a checkpoint, and the steps since the last interval (here all) were lost."""
    averaged = train(tmp_path, "run", max_epochs=2, max_steps=1000, checkpoint_every_steps=500, batch_tokens=2048)
    (kept,) = (tmp_path / "run/checkpoints").iterdir()
    assert json.loads((kept / "state.json").read_text())["step"] == int(kept.name.removeprefix("step-"))
    assert load_checkpoint(averaged).config.d_model == 32


def test_training_without_a_full_batch_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    recipe = recipe.model_copy(update=dict(model={**recipe.model, "max_source_len": 1}))
    with pytest.raises(RecipeError, match="has too few texts"):
        Trainer(recipe, tmp_path, tmp_path / "run", Group(rank=0, size=1, device=torch.device("cpu")))


def test_training_respects_lengths_that_are_not_multiples_of_the_padding(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, max_steps=5)
    limits = dict(max_source_len=5, max_target_len=5)
    recipe = recipe.model_copy(update=dict(model={**recipe.model, **limits}))
    trainer = Trainer(recipe, tmp_path, tmp_path / "run", Group(rank=0, size=1, device=torch.device("cpu")))
    assert isinstance(trainer.task, TranslationTask)
    assert max(len(example.source) for example in trainer.task.examples["train"]) == 5
    assert trainer.run() is not None


def test_early_stopping_ends_a_run_that_no_longer_improves(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, "run", peak_lr=1e-12, max_steps=10_000, checkpoint_every_steps=1, patience=2, bf16=True
    )
    trainer.validate = iter([1.0, 0.9, 0.95, 0.9]).__next__  # type: ignore[method-assign]
    trainer.run()
    assert trainer.progress.step == 4
    assert trainer.progress.best_loss == 0.9


def test_bf16_is_used_only_where_the_processor_has_it(tmp_path: Path) -> None:
    flags = set(re.findall(r"avx512_bf16|amx_bf16", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
    if platform.machine() != "x86_64":
        pytest.skip("instruction sets have other names on this processor")
    wanted, plain = (make_trainer(tmp_path, f"run-{bf16}", bf16=bf16) for bf16 in (True, False))
    assert (wanted.uses_bf16, plain.uses_bf16) == (bool(flags), False)
    batch = plain.task.batches("valid", 0)[0]
    wanted.batch_loss.eval()
    plain.batch_loss.eval()
    with torch.no_grad():
        found, expected = wanted.loss(batch)[0], plain.loss(batch)[0]
    assert torch.equal(found, expected) == (not flags)


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", max_steps=10, average_last=1)
    thrifty = train(tmp_path, "thrifty", max_steps=10, average_last=1, gradient_checkpointing=True)
    expected, found = (read_tensors(path / "model.safetensors") for path in (plain, thrifty))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_average_is_the_mean_of_the_last_checkpoints(tmp_path: Path) -> None:
    averaged = read_tensors(train(tmp_path, "run") / "model.safetensors")
    kept = sorted((tmp_path / "run/checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-0000030", "step-0000040"]
    first, second = (read_tensors(path / "model.safetensors") for path in kept)
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    assert (kept[1] / "optimizer.safetensors").is_file()
    assert not (kept[0] / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        average_weights([])


def test_learning_rate_follows_the_schedule_of_the_paper() -> None:
    config = TrainConfig(warmup_steps=4000)
    for step in (1, 100, 4000, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(step, config, 512) == pytest.approx(expected)
    assert learning_rate(50, TrainConfig(warmup_steps=50, peak_lr=0.005), 512) == pytest.approx(0.005)


def test_cool_down_ends_with_a_learning_rate_near_zero() -> None:
    plain = TrainConfig(warmup_steps=10, max_steps=1000)
    cooled = TrainConfig(warmup_steps=10, max_steps=1000, cooldown_steps=100)
    ratios = [learning_rate(step, cooled, 512) / learning_rate(step, plain, 512) for step in (1, 900, 901, 951, 1000)]
    assert ratios == pytest.approx([1, 1, 1, 0.5, 0.01])


def test_training_writes_no_pickle(tmp_path: Path) -> None:
    train(tmp_path, "run", max_steps=10)
    suffixes = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jsonl", ".png", ".safetensors"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-recipe", "--data", "."], "recipe 'no-such-recipe' not found"),
        (["tatoeba-en-de", "--data", "/nowhere"], "/nowhere/tatoeba-en-de/pairs.en-de.tsv.gz is missing"),
        (["tatoeba-en-de", "--data", ".", "--threads", "0"], "--threads is 0; it must be at least 1"),
    ],
)
def test_wrong_argument_ends_with_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--output", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("choice", [HeadsPerModule(2), Share(0.5)], ids=["each", "share"])
def test_training_continues_from_a_pruned_checkpoint(tmp_path: Path, choice: Choice) -> None:
    """--init gives shape, tokenizer and weights instead of the recipe; training recovers the loss of pruning."""
    recipe = make_recipe(tmp_path, max_steps=200, peak_lr=1e-2, checkpoint_every_steps=100)
    group = Group(rank=0, size=1, device=torch.device("cpu"))
    averaged = Trainer(recipe, tmp_path, tmp_path / "run", group).run()
    assert averaged is not None
    whole = load_checkpoint(averaged)
    pruning = prune(whole, [("red house", "rot Haus"), ("old tree", "alt Baum")], choice)
    init = replace(whole, config=pruning.model.config, model=pruning.model)
    trainer = Trainer(recipe, tmp_path, tmp_path / "again", group, init=init)
    assert trainer.model_config == pruning.model.config
    assert trainer.model.num_parameters < whole.model.num_parameters
    for name, tensor in pruning.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], tensor), name
    before = trainer.validate()
    trainer.run()
    assert trainer.validate() < before
    assert load_checkpoint(tmp_path / "again/averaged").provenance == whole.provenance


def test_training_from_an_encoder_only_checkpoint_is_refused(tmp_path: Path) -> None:
    init = load_checkpoint(train(tmp_path, "run", max_steps=1, checkpoint_every_steps=1))
    config = init.config.model_copy(update={"architecture": "encoder", "decoder_layers": 0})
    group = Group(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"architecture='encoder'.* only encoder-decoder models"):
        Trainer(make_recipe(tmp_path), tmp_path, tmp_path / "again", group, init=replace(init, config=config))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_training_continues_from_a_bundle(tmp_path: Path, precision: Precision) -> None:
    """With a rate near zero the model of the bundle stays as it is; int8 weights differ by half a step at most."""
    averaged = train(tmp_path, "run")
    bundle = export_bundle(load_checkpoint(averaged), tmp_path / "bundle", precisions=(precision,), explain=False)
    recipe = write_recipe(make_recipe(tmp_path, max_steps=1, peak_lr=1e-12), tmp_path / "recipe.toml")
    flags = ["--data", str(tmp_path), "--init", str(bundle.path), "--output", str(tmp_path / "again")]
    assert main(["train", recipe, *flags]) == 0
    expected, found = (read_tensors(path / "model.safetensors") for path in (averaged, tmp_path / "again/averaged"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        rounding = 0.0 if precision == "float32" or tensor.dim() < 2 else tensor.abs().amax(dim=1, keepdim=True) / 254
        assert ((found[name] - tensor).abs() <= rounding + 1e-6).all(), name
    assert load_checkpoint(tmp_path / "again/averaged").provenance == load_checkpoint(averaged).provenance


def test_training_from_a_damaged_bundle_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load_checkpoint(train(tmp_path, "run", max_steps=1, checkpoint_every_steps=1))
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precisions=("float32",), explain=False)
    bundle.file("weights.native.float32.bin").write_bytes(b"short")
    recipe = write_recipe(make_recipe(tmp_path), tmp_path / "recipe.toml")
    flags = ["--data", str(tmp_path), "--init", str(bundle.path), "--output", str(tmp_path / "again")]
    assert main(["train", recipe, *flags]) == 2
    assert "weights.native.float32.bin" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
