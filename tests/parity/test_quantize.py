"""Rounding of weights to int8, and the size of what is stored."""

from __future__ import annotations

import numpy as np

from antiphon.bundle.manifest import Bundle
from antiphon.export.quantize import quantize_rows


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
