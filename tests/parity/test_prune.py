"""Pruned models equal unpruned ones whose removed heads have gates of 0; importance is compared with brute force."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.architecture.config import ModelConfig, preset
from antiphon.checkpoints.checkpoint import TEXT_NAME, Checkpoint, load_checkpoint
from antiphon.errors import PruneError
from antiphon.export.export import export_bundle
from antiphon.training import pruning
from antiphon.training.pruning import (
    Choice,
    HeadsPerModule,
    Share,
    attentions,
    head_gates,
    head_importance,
    sentence_losses,
    without_heads,
)
from antiphon.training.translation import Batch, Example, collate
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.parity.conftest import VARIANTS
from tests.parity.exports import small_config

PAIRS = [("the small word", "a word here"), ("number 3 is here again", "again"), ("small", "the number is small")]
PRUNABLE = {
    "paper": {},
    **{name: given for name, given in VARIANTS.items() if name not in ("alibi", "ssru", "average")},
}
UNEVEN = {name: given for name, given in PRUNABLE.items() if name != "t5"}


def random_kept(model: Transformer, choice: Choice, seed: int = 0) -> dict[str, list[int]]:
    """Return the heads that remain for random importances."""
    generator = torch.Generator().manual_seed(seed)
    importance = {
        name: torch.rand(model.config.num_heads, generator=generator).to(torch.float32) for name in attentions(model)
    }
    return choice.heads_to_keep(model.config, importance)


def as_gates(model: Transformer, kept: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return gates that are 1 for kept heads and 0 for the others."""
    gates = {name: torch.zeros(model.config.num_heads) for name in kept}
    for name, heads in kept.items():
        gates[name][heads] = 1
    return gates


def sample_batch(checkpoint: Checkpoint) -> Batch:
    tokenizer = checkpoint.tokenizer
    sources, targets = (tokenizer.encode_batch([pair[side] for pair in PAIRS]) for side in (0, 1))
    examples = [
        Example(source=[*source, tokenizer.eos_id], target=target)
        for source, target in zip(sources, targets, strict=True)
    ]
    return collate(examples, tokenizer)


def drawn(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, config.vocab_size, (3, 9), generator=generator)
    target = torch.randint(0, config.vocab_size, (3, 7), generator=generator)
    return source, target, torch.tensor([9, 4, 1], dtype=torch.int32)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("overrides", PRUNABLE.values(), ids=PRUNABLE)
def test_pruned_model_equals_the_model_with_gates_of_removed_heads_at_zero(
    overrides: dict[str, object], num_heads: int
) -> None:
    model = random_transformer(small_config(**overrides))
    kept = random_kept(model, HeadsPerModule(num_heads))
    pruned = without_heads(model, kept)
    source, target, lens = drawn(model.config)
    with torch.no_grad(), head_gates(model, as_gates(model, kept)):
        expected = model(source, target, lens)
    with torch.no_grad():
        torch.testing.assert_close(pruned(source, target, lens), expected, atol=1e-5, rtol=1e-5)
    assert (pruned.config.num_heads, pruned.config.head_dim) == (num_heads, model.config.resolved_head_dim)
    assert pruned.num_parameters < model.num_parameters


def test_pruning_does_not_change_the_model_and_its_ties() -> None:
    model = random_transformer(small_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pruned = without_heads(model, random_kept(model, HeadsPerModule(2)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert pruned.decoder is not None
    assert pruned.output.weight is pruned.decoder.embedding.weight


def test_heads_to_keep_are_the_most_important_ones_in_order() -> None:
    importance = {"encoder.layers.0.self_attention": torch.tensor([0.1, 0.4, 0.2, 0.4])}
    assert HeadsPerModule(3).heads_to_keep(small_config(), importance) == {"encoder.layers.0.self_attention": [1, 2, 3]}
    assert HeadsPerModule(1).heads_to_keep(small_config(), importance) == {"encoder.layers.0.self_attention": [1]}


def test_heads_with_a_shared_relative_bias_are_the_same_in_every_layer() -> None:
    importance = {
        "encoder.layers.0.self_attention": torch.tensor([5.0, 1.0, 0.0, 0.0]),
        "encoder.layers.1.self_attention": torch.tensor([0.0, 1.0, 3.0, 0.0]),
        "decoder.layers.0.self_attention": torch.tensor([0.0, 0.0, 1.0, 2.0]),
        "decoder.layers.0.cross_attention": torch.tensor([1.0, 2.0, 0.0, 0.0]),
    }
    assert HeadsPerModule(2).heads_to_keep(small_config(**VARIANTS["t5"]), importance) == {
        "encoder.layers.0.self_attention": [0, 2],
        "encoder.layers.1.self_attention": [0, 2],
        "decoder.layers.0.self_attention": [2, 3],
        "decoder.layers.0.cross_attention": [0, 1],
    }


@pytest.mark.parametrize("overrides", UNEVEN.values(), ids=UNEVEN)
def test_unevenly_pruned_model_equals_the_model_with_gates_of_removed_heads_at_zero(
    overrides: dict[str, object],
) -> None:
    model = random_transformer(small_config(**overrides))
    kept = random_kept(model, Share(0.4))
    assert len({len(heads) for heads in kept.values()}) > 1
    pruned = without_heads(model, kept)
    source, target, lens = drawn(model.config)
    with torch.no_grad(), head_gates(model, as_gates(model, kept)):
        expected = model(source, target, lens)
    with torch.no_grad():
        torch.testing.assert_close(pruned(source, target, lens), expected, atol=1e-5, rtol=1e-5)
    assert {name: attention.heads[0] for name, attention in attentions(pruned).items()} == {
        name: len(heads) for name, heads in kept.items()
    }
    assert pruned.config.num_heads == max(map(len, kept.values()))


def test_share_removes_the_least_important_heads_of_all_modules_together() -> None:
    """The scales of the modules differ; the importance relative to the module's norm decides."""
    importance = {
        "encoder.layers.0.self_attention": torch.tensor([6.0, 8.0, 0.0]),  # 0.6, 0.8, 0
        "decoder.layers.0.self_attention": torch.tensor([0.003, 0.004, 0.012]),  # 3, 4 and 12 of 13
        "decoder.layers.0.cross_attention": torch.tensor([0.0, 0.0, 0.0]),
    }
    found = [Share(count / 9).heads_to_keep(small_config(), importance) for count in range(1, 7)]
    assert [list(kept.values()) for kept in found] == [
        [[0, 1, 2], [0, 1, 2], [0, 1]],
        [[0, 1, 2], [0, 1, 2], [0]],
        [[0, 1], [0, 1, 2], [0]],
        [[0, 1], [1, 2], [0]],
        [[0, 1], [2], [0]],
        [[1], [2], [0]],
    ]


def test_removing_as_many_heads_of_each_module_needs_no_module_heads() -> None:
    model = random_transformer(small_config())
    kept = {name: [number % 2, 3] for number, name in enumerate(attentions(model))}
    assert without_heads(model, kept).config == small_config(num_heads=2, head_dim=16)


def test_a_pruned_model_can_be_pruned_again(checkpoint: Checkpoint) -> None:
    once = pruning.prune(checkpoint, PAIRS, Share(0.25))
    twice = pruning.prune(replace(checkpoint, config=once.model.config, model=once.model), PAIRS, Share(0.5))
    evenly = pruning.prune(replace(checkpoint, config=twice.model.config, model=twice.model), PAIRS, HeadsPerModule(1))
    counts = [sum(map(len, pruned.kept.values())) for pruned in (once, twice, evenly)]
    assert counts == [18, 9, 6]
    assert (twice.loss_before, evenly.model.config.module_heads) == (once.loss_after, None)


def test_share_refuses_a_bias_that_layers_share() -> None:
    with pytest.raises(PruneError, match=r"cannot be pruned by --share.* give --heads"):
        Share(0.3).check(small_config(**VARIANTS["t5"]))


def test_importance_ranks_heads_as_by_setting_each_gate_to_zero(checkpoint: Checkpoint) -> None:
    """The effects of the heads differ by orders of magnitude, so that a first-order estimate ranks them correctly."""
    model = random_transformer(checkpoint.config).double()
    scales = torch.tensor([1e-2, 1.0, 1e-6, 1e-4], dtype=torch.float64)
    for number, attention in enumerate(attentions(model).values()):
        attention.out.weight.data *= scales.roll(number).repeat_interleave(checkpoint.config.resolved_head_dim)
    batch = sample_batch(checkpoint)
    importance = head_importance(model, [batch])
    with torch.no_grad():
        base = sentence_losses(model, batch)
        for number, (name, found) in enumerate(importance.items()):
            costs = []
            for head in range(checkpoint.config.num_heads):
                gate = torch.ones(checkpoint.config.num_heads, dtype=torch.float64)
                gate[head] = 0
                with head_gates(model, {name: gate}):
                    costs.append(float((sentence_losses(model, batch) - base).abs().mean()))
            assert found.argsort().tolist() == torch.tensor(costs).argsort().tolist(), name
            assert found.argsort().tolist() == scales.roll(number).argsort().tolist(), name


def test_importance_is_the_mean_gradient_of_the_gates_over_pairs(checkpoint: Checkpoint) -> None:
    """The reference is central differences of each pair's loss, one pair at a time."""
    model = random_transformer(checkpoint.config).double()
    name, step = "decoder.layers.1.cross_attention", 1e-4
    batch = sample_batch(checkpoint)
    expected = torch.zeros(checkpoint.config.num_heads, dtype=torch.float64)
    for head in range(checkpoint.config.num_heads):
        losses = []
        for shift in (step, -step):
            gate = torch.ones(checkpoint.config.num_heads, dtype=torch.float64)
            gate[head] += shift
            with torch.no_grad(), head_gates(model, {name: gate}):
                losses.append(sentence_losses(model, batch))
        expected[head] = ((losses[0] - losses[1]) / (2 * step)).abs().mean()
    found = head_importance(model, [batch])[name]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_importance_does_not_depend_on_how_pairs_are_batched(checkpoint: Checkpoint) -> None:
    batch = sample_batch(checkpoint)
    single = [
        Batch(
            source=batch.source[row : row + 1],
            source_lens=batch.source_lens[row : row + 1],
            inputs=batch.inputs[row : row + 1],
            labels=batch.labels[row : row + 1],
        )
        for row in range(len(PAIRS))
    ]
    together, alone = head_importance(checkpoint.model, [batch]), head_importance(checkpoint.model, single)
    for name, values in together.items():
        torch.testing.assert_close(alone[name], values, rtol=1e-4, atol=1e-7)


def parse(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pruning.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """Write the pairs to two files."""
    paths = tmp_path / "source.txt", tmp_path / "reference.txt"
    for side, path in enumerate(paths):
        path.write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    return paths


@pytest.mark.training
def test_prune_command_writes_a_checkpoint_that_exports(
    checkpoint: Checkpoint, texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export verifies all graphs against the pruned model."""
    folder = checkpoint.text_folder
    code = pruning.run(parse(folder, tmp_path / "pruned", "--heads", 3, "--source", texts[0], "--reference", texts[1]))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert len([line for line in printed.out.splitlines() if line.count("-") == 1 and "_attention" in line]) == 6
    pruned = load_checkpoint(tmp_path / "pruned")
    with torch.no_grad():
        losses = [sentence_losses(each.model, sample_batch(checkpoint)).mean().item() for each in (checkpoint, pruned)]
    assert "24 heads to 18 in 6 attention modules (dropped: -)" in printed.out
    assert printed.out.endswith(f"loss {losses[0]:.3f} to {losses[1]:.3f} nats a token\n")
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["model"]["head_dim"] == 16
    bundle = export_bundle(pruned, tmp_path / "bundle", precisions=("int8",))
    assert bundle.manifest.model.num_heads == 3


def test_prune_command_keeps_the_text_format_and_its_files(
    checkpoint: Checkpoint, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, text = tmp_path / "copy", checkpoint.text.model_copy(update={"shortlist": "shortlist.bin"})
    shutil.copytree(checkpoint.text_folder, folder)
    (folder / TEXT_NAME).write_text(text.model_dump_json(), encoding="utf-8")
    (folder / "shortlist.bin").write_bytes(b"of this model")
    files = ("--source", texts[0], "--reference", texts[1])
    assert pruning.run(parse(folder, tmp_path / "pruned", "--heads", 2, *files)) == 0
    assert load_checkpoint(tmp_path / "pruned").text == text
    assert (tmp_path / "pruned" / "shortlist.bin").read_bytes() == b"of this model"


@pytest.mark.training
def test_prune_command_removes_a_share_of_all_heads(
    checkpoint: Checkpoint, texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, files = checkpoint.text_folder, ("--source", texts[0], "--reference", texts[1])
    assert pruning.run(parse(folder, tmp_path / "pruned", "--share", 0.3, *files)) == 0
    assert "24 heads to 17 in 6 attention modules (dropped: -)" in capsys.readouterr().out
    written = load_checkpoint(tmp_path / "pruned").config
    assert written.module_heads is not None
    assert written == pruning.prune(checkpoint, PAIRS, Share(0.3)).model.config


@pytest.mark.parametrize("amounts", [[], ["--heads", 2, "--share", 0.3]])
def test_prune_command_needs_one_of_heads_and_share(amounts: list[object]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("checkpoint", "pruned", *amounts)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", 4], "--heads is 4; it must be from 1 to 3"),
        (["--heads", 0], "--heads is 0; it must be from 1 to 3"),
        (
            ["--share", 0],
            "--share is 0; it must be from 1/24 to 18/24 of the 24 heads: each of the 6 attention modules",
        ),
        (["--share", 0.02], "--share is 0.02; it must be from 1/24 to 18/24"),
        (["--share", 0.78], "--share is 0.78; it must be from 1/24 to 18/24"),
        (["--share", 1.5], "--share is 1.5; it must be from 1/24 to 18/24"),
        (["--share", -1], "--share is -1; it must be from 1/24 to 18/24"),
        (["--share", "nan"], "--share is nan; it must be from 1/24 to 18/24"),
        (["--heads", 2], "give --data (with --recipe if the checkpoint names none), or --source with --reference"),
        (["--heads", 2, "--pairs", 0], "--pairs is 0; it must be at least 1"),
        (["--heads", 2, "--data", "nowhere", "--recipe", "no-such"], "recipe 'no-such' not found"),
    ],
)
def test_prune_command_refuses_with_one_line(
    checkpoint: Checkpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    assert pruning.run(parse(checkpoint.text_folder, tmp_path / "pruned", *arguments)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("antiphon prune: ")
    assert printed.count("\n") == 1
    assert message in printed
    assert not (tmp_path / "pruned").exists()


def test_prune_command_refuses_an_existing_output(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert pruning.run(parse(checkpoint.text_folder, tmp_path, "--heads", 2)) == 2
    assert "exists; give a new directory" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("choice", [HeadsPerModule(2), Share(0.3)], ids=["each", "share"])
def test_prune_refuses_a_decoder_without_heads(choice: Choice) -> None:
    with pytest.raises(PruneError, match="decoder_self='ssru' cannot be pruned: it has no heads"):
        choice.check(small_config(**VARIANTS["ssru"]))


@pytest.mark.parametrize("choice", [HeadsPerModule(2), Share(0.3)], ids=["each", "share"])
def test_prune_refuses_alibi_slopes(choice: Choice) -> None:
    with pytest.raises(PruneError, match="positions='alibi' cannot be pruned: the slopes of the kept heads"):
        choice.check(small_config(**VARIANTS["alibi"]))


def test_share_compares_modules_of_different_scale_by_their_normalised_importance() -> None:
    importance = {"small": torch.tensor([4e-3, 1e-3, 3e-3, 2e-3]), "large": torch.tensor([1.0, 4.0, 2.0, 3.0])}
    kept = Share(0.25).heads_to_keep(preset("tiny"), importance)
    assert kept == {"small": [0, 2, 3], "large": [1, 2, 3]}
