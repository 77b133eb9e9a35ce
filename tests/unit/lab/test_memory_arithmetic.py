"""Predicted memory against measured memory, over a grid of small models; both are deterministic."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.manifest import Bundle, Manifest, load_bundle
from antiphon.errors import UncoveredModelError
from antiphon.export.export import write_graphs
from antiphon.lab.costs import allocated_peak
from antiphon.lab.memory import measurement
from antiphon.lab.memory.arithmetic import LOSS_ROWS, native, native_weights, padding, training, translation
from antiphon.lab.memory.terms import (
    Case,
    LabBackend,
    Prediction,
    crossings,
    lecture_rows,
    longest,
    num_parameters,
    with_length,
)
from antiphon.text.format import TextFormat
from antiphon.training.losses import ROWS, padding_of
from antiphon.training.task import Group
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer

pytestmark = pytest.mark.combinations

TOLERANCE = 0.1
BACKENDS: tuple[LabBackend, ...] = ("eager", "sdpa")
SHAPES: dict[str, dict[str, object]] = {
    "post-norm": dict(dropout=0.1),
    "pre-norm": dict(dropout=0.1, norm_placement="pre", vocab_size=2000),
    "gelu": dict(dropout=0.1, norm_placement="pre", activation="gelu", d_ff=256),
    "gated": dict(gated=True, activation="silu", num_heads=1, tie_output=False, d_ff=128),
    "untied": dict(tie_source_target=False, source_vocab_size=700, positions="learned", dropout=0.1),
    "rotary": dict(dropout=0.1, norm_placement="pre", positions="rope", vocab_size=2000),
    "wide heads": dict(head_dim=16, encoder_layers=1, decoder_layers=3, output_bias=True),
}
CELLS = (
    *((name, 3, 60) for name in SHAPES),
    *(
        (name, batch, length)
        for name in ("post-norm", "pre-norm", "rotary")
        for batch, length in ((1, 16), (16, 64), (1, 400))
    ),
)


def case_of(name: str, batch: int, length: int) -> Case:
    return with_length(Case(config=preset("tiny", **SHAPES[name]), batch=batch, length=1), length)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = preset("tiny", **SHAPES[name])
    assert num_parameters(config) == Transformer(config).num_parameters


@pytest.mark.parametrize(("name", "batch", "length"), CELLS)
def test_training_step_needs_the_predicted_memory(name: str, batch: int, length: int) -> None:
    case = case_of(name, batch, length)
    for backend, checkpointing, bf16 in product(BACKENDS, (False, True), (False, True)):
        one = replace(case, backend=backend, checkpointing=checkpointing, bf16=bf16)
        measured = measurement.TrainingStep(one).peak_bytes()
        assert training(one).peak_bytes == pytest.approx(measured, rel=TOLERANCE), (backend, checkpointing, bf16)


@pytest.mark.parametrize(("name", "batch", "length"), CELLS)
def test_translation_needs_the_predicted_memory(name: str, batch: int, length: int) -> None:
    case = case_of(name, batch, length)
    # A processor without products in bfloat16 makes copies in float32 for them.
    precisions = (False, True) if Group.join().computes_bf16 else (False,)
    for backend, bf16 in product(BACKENDS, precisions):
        one = replace(case, backend=backend, bf16=bf16)
        measured = measurement.translation_peak(one)
        assert translation(one).peak_bytes == pytest.approx(measured, rel=TOLERANCE), (backend, bf16)


def test_rotated_queries_and_keys_need_the_predicted_memory() -> None:
    rotary = replace(case_of("rotary", 8, 100), backend="sdpa")
    plain = replace(rotary, config=rotary.config.model_copy(update={"positions": "none"}))
    predicted = training(rotary).peak_bytes - training(plain).peak_bytes
    measured = measurement.TrainingStep(rotary).peak_bytes() - measurement.TrainingStep(plain).peak_bytes()
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


def test_allocated_peak_counts_what_lives_at_once() -> None:
    def run() -> None:
        first = torch.zeros(1000)
        second = first + 1
        del first
        torch.cat((second, second))

    assert allocated_peak(run) == 12_000


@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_native_graphs_need_the_predicted_memory(tmp_path: Path, norm_placement: str, positions: str) -> None:
    config = preset("tiny", norm_placement=norm_placement, positions=positions, vocab_size=1000, d_ff=160)
    graphs = write_graphs(random_transformer(config), tmp_path, ("float32", "int8"), ("native",))
    for chosen in graphs:
        manifest = Manifest(
            name="tiny", model=config, text=TextFormat(template=("$text",)), graphs=(chosen,), files={}
        )  # fmt: skip
        bundle = Bundle(path=tmp_path, manifest=manifest)
        for batch, length in ((1, 16), (4, 64)):
            case = Case(config=config, batch=batch, length=length)
            weights, blocks, workspace = native(
                case, chosen.precision, np.dtype(chosen.cache or "float32").itemsize
            ).terms
            assert blocks.num_bytes == measurement.pool_bytes(bundle, case)
            peak = measurement.native_workspace_peak(bundle, case)
            assert workspace.num_bytes == pytest.approx(peak, rel=TOLERANCE)
            assert weights.num_bytes == pytest.approx(measurement.weights_bytes(bundle), rel=TOLERANCE)


def test_shipped_bundle_has_the_predicted_weights() -> None:
    bundle = load_bundle(Path(__file__).parents[3] / "model" / "antiphon" / "bundles" / "en-de")
    weights = native_weights(bundle.manifest.model, "int8")
    assert weights == pytest.approx(measurement.weights_bytes(bundle), rel=1e-3)


def test_rows_of_the_loss_are_those_of_the_code() -> None:
    assert LOSS_ROWS == ROWS
    assert [padding(rows) for rows in range(1, 2000, 7)] == [padding_of(rows) for rows in range(1, 2000, 7)]


def test_lecture_counts_one_float32_matrix() -> None:
    rows = lecture_rows(preset("base"))
    assert [row.matrix_bytes for row in rows] == [256 << 20, 4 << 30, 64 << 30]
    assert [row.model_bytes // row.matrix_bytes for row in rows] == [8 * 18] * 3


def test_attention_crosses_the_feed_forward_layer_where_both_cost_the_same() -> None:
    config = preset("big")
    matrices, projections, *_ = (crossing.length for crossing in crossings(config))
    width, inner = config.d_model, config.d_ff
    assert 4 * matrices**2 * width == 4 * matrices * width * inner
    assert 4 * projections**2 * width + 8 * projections * width**2 == 4 * projections * width * inner


@pytest.mark.parametrize("predict", [training, translation])
def test_longest_length_fits_and_the_next_one_does_not(predict: Callable[[Case], Prediction]) -> None:
    case = Case(config=preset("base"), batch=2, length=1)
    length = longest(case, predict, 8 << 30)
    assert predict(with_length(case, length)).peak_bytes <= 8 << 30 < predict(with_length(case, length + 1)).peak_bytes


def test_longest_length_is_0_if_the_weights_alone_do_not_fit() -> None:
    assert longest(Case(config=preset("base"), batch=1, length=1), training, 1 << 20) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(positions="alibi"), "positions='alibi' is not covered"),
        (dict(norm="rmsnorm"), "norm='rmsnorm'"),
        (dict(decoder_self="ssru"), "decoder_self='ssru' is not covered"),
    ],
)
def test_arithmetic_refuses_models_that_it_does_not_describe(changes: dict[str, object], message: str) -> None:
    config: ModelConfig = preset("tiny", **changes)
    with pytest.raises(UncoveredModelError, match=message):
        training(Case(config=config, batch=1, length=8))
