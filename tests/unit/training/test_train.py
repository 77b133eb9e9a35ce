"""Training on an artificial language of a few dozen words, which a model learns in seconds."""

import hashlib
import json
import math
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

from antiphon.architecture.config import DecoderSelf, preset
from antiphon.bundle.manifest import Precision
from antiphon.checkpoints.checkpoint import average_weights, load_checkpoint, read_tensors
from antiphon.cli.main import main
from antiphon.errors import CheckpointError, RecipeError, TrainingDiverged
from antiphon.export.export import export_bundle
from antiphon.ops.attention import attention_weights
from antiphon.training.attention_entropy import recorded_entropies
from antiphon.training.pruning import Choice, HeadsPerModule, Share, prune
from antiphon.training.recipe import Recipe, TrainConfig
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer, learning_rate
from antiphon.training.translation import TranslationTask
from antiphon.transformer.greedy import greedy
from antiphon.transformer.layers import SelfAttention
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.recipe_files import check_equal_weights, killed_at, write_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads
GROUP = Group(rank=0, size=1, device=torch.device("cpu"))
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
    return Trainer(make_recipe(folder, **train), folder, folder / run, GROUP)


def train(folder: Path, run: str, **settings: object) -> Path:
    averaged = make_trainer(folder, run, **settings).run()
    assert averaged is not None
    return averaged


@pytest.mark.training
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, optimizer: str) -> None:
    """A run killed at step 27 resumes from step 20 and ends with bit-identical weights, also with dropout."""
    whole = train(tmp_path, "whole", optimizer=optimizer)
    with killed_at(27):
        train(tmp_path, "killed", optimizer=optimizer)
    resumed = make_trainer(tmp_path, "killed", optimizer=optimizer)
    resumed.resume()
    assert resumed.progress.step == 20
    check_equal_weights(whole, train(tmp_path, "killed", optimizer=optimizer))


@pytest.mark.training
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


@pytest.mark.training
@pytest.mark.parametrize("decoder_self", ["attention", "ssru", "average"])
def test_training_learns_the_language(tmp_path: Path, decoder_self: DecoderSelf) -> None:
    recipe = make_recipe(tmp_path, max_steps=600, peak_lr=1e-2, checkpoint_every_steps=200)
    recipe = recipe.model_copy(update={"model": {**recipe.model, "decoder_self": decoder_self}})
    averaged = Trainer(recipe, tmp_path, tmp_path / "run", GROUP).run()
    assert averaged is not None
    checkpoint = load_checkpoint(averaged)
    assert checkpoint.config.decoder_self == decoder_self
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


@pytest.mark.training
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
        Trainer(recipe, tmp_path, tmp_path / "run", GROUP)


def test_training_respects_lengths_that_are_not_multiples_of_the_padding(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, max_steps=5)
    limits = dict(max_source_len=5, max_target_len=5)
    recipe = recipe.model_copy(update=dict(model={**recipe.model, **limits}))
    trainer = Trainer(recipe, tmp_path, tmp_path / "run", GROUP)
    assert isinstance(trainer.task, TranslationTask)
    assert max(len(example.source) for example in trainer.task.examples["train"]) == 5
    assert trainer.run() is not None


@pytest.mark.training
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


@pytest.mark.training
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
        (["snips", "--data", "."], "--init must name the encoder"),
        (["snips", "--data", ".", "--random-weights"], "--random-weights needs --init"),
        (["snips", "--data", ".", "--init", "nowhere"], "nowhere is not a checkpoint"),
        (["snips", "--data", ".", "--max-train-examples", "0"], "--max-train-examples is 0; it must be at least 1"),
        (["mlm-small", "--data", ".", "--freeze-encoder"], "classify or tag; the task of 'mlm-small' is 'pretrain'"),
        (["mlm-small", "--data", ".", "--max-train-examples", "5"], "needs a recipe with task classify or tag"),
        (["mlm-small", "--data", ".", "--teacher", "."], "a distillation section; 'mlm-small' has none"),
    ],
)
def test_wrong_argument_ends_with_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--output", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.training
@pytest.mark.parametrize("choice", [HeadsPerModule(2), Share(0.5)], ids=["each", "share"])
def test_training_continues_from_a_pruned_checkpoint(tmp_path: Path, choice: Choice) -> None:
    """--init gives shape, tokenizer and weights instead of the recipe; training recovers the loss of pruning."""
    recipe = make_recipe(tmp_path, max_steps=200, peak_lr=1e-2, checkpoint_every_steps=100)
    averaged = Trainer(recipe, tmp_path, tmp_path / "run", GROUP).run()
    assert averaged is not None
    whole = load_checkpoint(averaged)
    pruning = prune(whole, [("red house", "rot Haus"), ("old tree", "alt Baum")], choice)
    init = replace(whole, config=pruning.model.config, model=pruning.model)
    trainer = Trainer(recipe, tmp_path, tmp_path / "again", GROUP, init=init)
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
    with pytest.raises(CheckpointError, match=r"architecture='encoder'.* only encoder-decoder models"):
        Trainer(make_recipe(tmp_path), tmp_path, tmp_path / "again", GROUP, init=replace(init, config=config))


@pytest.mark.training
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


@pytest.mark.training
def test_training_from_a_damaged_bundle_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = load_checkpoint(train(tmp_path, "run", max_steps=1, checkpoint_every_steps=1))
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precisions=("float32",), explain=False)
    bundle.file("weights.native.float32.bin").write_bytes(b"short")
    recipe = write_recipe(make_recipe(tmp_path), tmp_path / "recipe.toml")
    flags = ["--data", str(tmp_path), "--init", str(bundle.path), "--output", str(tmp_path / "again")]
    assert main(["train", recipe, *flags]) == 2
    assert "weights.native.float32.bin" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def first_attention() -> tuple[Transformer, SelfAttention]:
    model = random_transformer(preset("tiny"))
    attention = model.get_submodule("encoder.layers.0.self_attention")
    assert isinstance(attention, SelfAttention)
    return model, attention


def test_entropy_of_attention_that_sees_equal_keys_is_the_logarithm_of_their_number() -> None:
    model, attention = first_attention()
    hidden = torch.randn(1, 1, 32).expand(3, 7, 32)
    with recorded_entropies(model) as entropies:
        attention(hidden, torch.arange(7)[None], torch.tensor([7, 7, 7]), None)
    assert entropies.mean()["encoder_self"] == pytest.approx(math.log(7), abs=1e-5)


def test_recording_changes_no_output_and_ends_with_its_context() -> None:
    model = random_transformer(preset("tiny"))
    source, target = torch.randint(4, 96, (2, 9)), torch.randint(4, 96, (2, 5))
    lens = torch.tensor([9, 4], dtype=torch.int32)
    before = model(source, target, lens)
    with recorded_entropies(model) as entropies:
        assert torch.equal(model(source, target, lens), before)
    assert set(entropies.mean()) == {"encoder_self", "decoder_self", "decoder_cross"}
    assert [len(values) for values in entropies.values.values()] == [2, 2, 2]
    recorded = {kind: list(values) for kind, values in entropies.values.items()}
    model(source, target, lens)
    assert entropies.values == recorded


def test_entropy_equals_that_of_the_distribution_of_torch() -> None:
    model, attention = first_attention()
    hidden, lens = torch.randn(2, 6, 32), torch.tensor([6, 3])
    query, key, _ = (part.unflatten(-1, attention.heads) for part in attention.qkv(hidden).chunk(3, dim=-1))
    weights = attention_weights(query, key, lens, None, causal=False, scale=attention.scale)
    entropies_of_rows = torch.distributions.Categorical(probs=weights.detach()).entropy()  # type: ignore[no-untyped-call]
    with recorded_entropies(model) as entropies:
        attention(hidden, torch.arange(6)[None], lens, None)
    assert entropies.mean()["encoder_self"] == pytest.approx(float(entropies_of_rows.mean()), abs=1e-5)


def test_log_has_the_norm_of_the_gradient_before_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "run", max_steps=4, checkpoint_every_steps=2, clip_norm=1e-3)
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(parameters: list[torch.nn.Parameter], limit: float) -> torch.Tensor:
        held = list(parameters)
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in held if p.grad is not None)))
        return clip(held, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["gradient_norm"] for record in records] == pytest.approx(
        [sum(norms[:2]) / 2, sum(norms[2:]) / 2], rel=1e-4
    )
    assert [record["max_gradient_norm"] for record in records] == pytest.approx(
        [max(norms[:2]), max(norms[2:])], rel=1e-4
    )
    assert all(record["entropy_decoder_cross"] > 0 for record in records)


def test_run_whose_loss_is_not_finite_ends_with_the_number_of_the_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "run", peak_lr=1e30, warmup_steps=1)
    with pytest.raises(TrainingDiverged, match=r"loss is (nan|inf) in step [1-9][0-9]*; lower train.peak_lr"):
        trainer.run()
