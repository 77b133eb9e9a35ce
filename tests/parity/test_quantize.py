"""Rounding of weights to 8 and 4 bits, and the size of what is stored. test_native_ops.py tests the operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from antiphon.bundle.manifest import Bundle
from antiphon.export.export import export_bundle
from antiphon.export.quantize import GROUP, quantize_groups, quantize_rows
from antiphon.export.verify import verify
from antiphon.export.weights import pack_int4, pack_int8, unpack_int4
from antiphon.transformer.random_model import random_transformer
from tests.operators import normal
from tests.parity.conftest import VARIANTS
from tests.parity.exports import small_config, write_checkpoint


def test_quantize_rows_keeps_each_weight_within_half_a_step() -> None:
    weight = np.random.default_rng(0).standard_normal((7, 33), np.float32)
    weight[3] = 0
    integers, scale = quantize_rows(weight)
    assert np.abs(integers.astype(int)).max() == 127
    assert (np.abs(integers * scale[:, None] - weight) <= scale[:, None] * 0.5001).all()


def test_tied_embedding_is_stored_once(bundle: Bundle) -> None:
    config = bundle.manifest.model
    table = config.vocab_size * config.d_model
    products = config.encoder_layers * (4 * config.d_model**2 + 2 * config.d_model * config.d_ff)
    products += config.decoder_layers * (8 * config.d_model**2 + 2 * config.d_model * config.d_ff)
    positions = 4 * config.d_model * (config.max_source_len + config.max_target_len)
    size = bundle.manifest.files["weights.native.int8.bin"].size
    assert table + products < size < 1.1 * (table + products) + positions + 20_000


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (20, 100), (1, 1), (1030, 33)])
def test_packed_integers_are_equal_after_unpacking(outputs: int, inputs: int) -> None:
    weight = normal(outputs, inputs)
    groups = quantize_groups(weight)
    assert (unpack_int4(pack_int4(weight).nibbles, outputs, inputs) == groups.integers).all()
    assert groups.integers.min() >= -8
    assert groups.integers.max() <= 7


def test_weights_are_within_half_a_step_and_extremes_are_clipped_slightly() -> None:
    weight = normal(64, 256)
    weight[3], weight[5, :GROUP] = 0, 0
    groups = quantize_groups(weight)
    steps = np.abs(groups.ratios.astype(np.float32) * groups.scales[:, None]).repeat(GROUP, axis=1)
    error = np.abs(groups.weight() - weight)
    assert (error <= 3 * steps + 1e-7).all()
    assert (error <= 0.501 * steps + 1e-7).mean() > 0.97
    assert 0.07 < np.sqrt((error**2).mean() / (weight**2).mean()) < 0.09
    assert (groups.weight()[3] == 0).all()


def test_packed_int8_weights_have_more_bytes_than_int4() -> None:
    weight = normal(512, 512)
    held = pack_int4(weight)
    assert (held.nibbles.nbytes + held.ratios.nbytes) * 8 / weight.size == 4.5
    assert pack_int8(weight).integers.nbytes * 8 / weight.size == 8


def test_int4_graphs_agree_with_pytorch_and_are_smaller(tmp_path: Path) -> None:
    """The loss of 4 bits is largest for T5's unscaled scores; the other variants lose a third of it."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", small_config(**VARIANTS["t5"]))
    nibbles = export_bundle(checkpoint, tmp_path / "bundle", precisions=("int8", "int4"), explain=False)
    graphs = nibbles.graph_set("int4")
    verify(nibbles.path, graphs, random_transformer(nibbles.manifest.model), seed=7)
    sizes = {name: nibbles.manifest.files[f"weights.native.{name}.bin"].size for name in ("int8", "int4")}
    assert sizes["int4"] < 0.8 * sizes["int8"]
    assert (graphs.cache, graphs.explain) == ("float16", None)
    assert nibbles.graph_set().precision == "int8"
