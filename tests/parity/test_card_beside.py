"""Parts of `make card` on the processor: `transformers.generate`, clients of a server, CTranslate2, training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.export.export import write_graphs
from antiphon.tools.bench.gpu.agreement import agreement, translate
from antiphon.tools.bench.gpu.cpu import measure_cpu, powers_of_two
from antiphon.tools.bench.gpu.decoding import (
    BART_LARGE,
    generate_with_transformers,
    kept_bundle,
    random_bundle,
    serve,
    shape_of,
    step_weight_bytes,
)
from antiphon.tools.bench.gpu.training import FiniteChecks, first_not_finite
from antiphon.training.task import Group, RunFolders
from antiphon.training.trainer import Place, Trainer, batches_from
from antiphon.transformer.random_model import random_transformer
from tests.unit.training.test_train import make_recipe

SOURCES = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]


def test_transformers_generate_is_measured_for_every_batch() -> None:
    figures = generate_with_transformers(shape_of("tiny"), SOURCES, 3, device="cpu", batches=(1, 2))
    assert [one["batch"] for one in figures] == [1, 2]
    assert all(one["tokens_per_s"] > 0 for one in figures)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.combinations
def test_each_kind_of_client_of_a_server_is_measured(tmp_path: Path) -> None:
    bundle = random_bundle("tiny", ("float32",), ("native",), tmp_path)
    flags = ("--max-queued-requests", "8")
    speeds = dict(serve(bundle.path, SOURCES, 4, device="cpu", rows=2, flags=flags))
    assert list(speeds) == ["streams", "many"]
    assert {speed.num_tokens for speed in speeds.values()} == {len(SOURCES) * 4}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_bundle_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="graphs"):
        random_bundle("tiny", ("int8",), ("cuda",), tmp_path)  # no GPU multiplies integers
    assert kept_bundle(tmp_path) is None
    made = random_bundle("tiny", ("float32",), ("native",), tmp_path)
    kept = kept_bundle(tmp_path)
    assert kept is not None
    assert kept.manifest == made.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.combinations
def test_the_processor_is_measured_by_lanes_and_workers_beside_ctranslate2(tmp_path: Path) -> None:
    figures = list(measure_cpu(tmp_path, models=("random",), preset="tiny", rows=1, threads=1))
    assert [figure["name"] for figure in figures if "name" in figure] == ["decode", "growth", "workers"]
    assert not [figure for figure in figures if "missing" in figure]


def test_powers_of_two_end_at_the_limit() -> None:
    assert [powers_of_two(limit) for limit in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8, 16]]


class Root(nn.Module):
    """The square root, whose gradient at 0 is infinite."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sqrt()


@pytest.mark.parametrize(
    ("inputs", "tensor"),
    [
        (1.0, None),
        (-1.0, "output of 1"),  # the root of a negative number
        (0.0, "gradient of 0.weight"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(inputs: float, tensor: str | None) -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    model = nn.Sequential(linear, Root())
    checks = FiniteChecks(model)
    model(torch.full((1, 1), inputs)).sum().backward()
    assert checks.first_not_finite() == tensor


def test_a_training_with_finite_numbers_runs_all_steps_and_is_not_changed(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    group = Group(rank=0, size=1, device=torch.device("cpu"))
    figures = list(first_not_finite(recipe, tmp_path, tmp_path / "work", 3, group.device))
    assert [(figure["precision"], figure["steps"], figure["step"]) for figure in figures] == [
        ("bfloat16", 3, None),
        ("float32", 3, None),
    ]
    trainer = Trainer(recipe, tmp_path, tmp_path / "alone", group)
    folders = RunFolders(data=tmp_path, run=trainer.folder, group=group)
    batches = batches_from(trainer.task, Place(epoch=0, batch=0), folders, trainer.config.seed)
    losses = [trainer.train_step(next(batches)[1]) for _ in range(3)]
    assert figures[1]["loss"] == losses[-1]


def test_a_training_that_diverges_ends_with_step_and_tensor(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, peak_lr=1e30, warmup_steps=1)
    for figure in first_not_finite(recipe, tmp_path, tmp_path / "work", 10, torch.device("cpu")):
        assert figure["steps"] == figure["step"] < 10
        assert figure["tensor"].split()[0] in ("output", "gradient", "parameter")


def test_a_step_reads_every_weight_of_the_decoder_but_those_of_the_sources_keys_and_values() -> None:
    config = shape_of("base")
    decoder = random_transformer(config).decoder
    assert decoder is not None
    matrices = {name: parameter for name, parameter in decoder.named_parameters() if parameter.ndim == 2}
    read = sum(parameter.numel() for name, parameter in matrices.items() if "cross_attention.kv" not in name)
    assert any("cross_attention.kv" in name for name in matrices)
    assert step_weight_bytes(config) == 2 * read


def test_the_shape_of_bart_large_has_its_number_of_weights() -> None:
    config = ModelConfig.model_validate(BART_LARGE)
    attention, feed_forward = 4 * config.d_model**2, 2 * config.d_model * config.d_ff
    layers = config.encoder_layers * (attention + feed_forward) + config.decoder_layers * (2 * attention + feed_forward)
    tables = (config.vocab_size + config.max_source_len + config.max_target_len) * config.d_model
    assert (layers + tables) / 406e6 == pytest.approx(1, abs=0.01)


def test_agreement_counts_equal_targets_and_tokens_before_the_first_difference() -> None:
    expected = [[5, 6, 2], [7, 8, 9, 2], [4]]
    assert agreement(expected, expected) == (3, 8)
    assert agreement([[5, 6, 2], [7, 8, 4, 2], [4, 2]], expected) == (1, 3 + 2 + 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_translations_of_float32_graphs_equal_the_models_own(tmp_path: Path) -> None:
    model = random_transformer(shape_of("tiny"))
    (graphs,) = write_graphs(model, tmp_path, ("float32",), ("cuda",))
    (found,) = translate(tmp_path, graphs, model.config, [[5, 6, 7, 2]], 4)
    target = [model.config.bos_id]
    with torch.no_grad():
        for _ in range(len(found)):
            target.append(int(model(torch.tensor([[5, 6, 7, 2]]), torch.tensor([target]))[0, -1].argmax()))
    assert found == target[1:]
