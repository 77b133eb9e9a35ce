"""The other sides of the GPU benchmark, on the processor: `transformers.generate`, and clients of a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from antiphon.architecture.config import ModelConfig
from antiphon.export.export import write_graphs
from antiphon.tools.bench.gpu.agreement import agreement, translate
from antiphon.tools.bench.gpu.decoding import (
    BART_LARGE,
    generate_with_transformers,
    random_bundle,
    serve_streams,
    shape_of,
    step_weight_bytes,
)
from antiphon.transformer.random_model import random_transformer

SOURCES = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]


def test_transformers_generate_is_measured_for_every_batch() -> None:
    figures = generate_with_transformers(shape_of("tiny"), SOURCES, 3, device="cpu", batches=(1, 2))
    assert [one["batch"] for one in figures] == [1, 2]
    assert all(one["tokens_per_s"] > 0 for one in figures)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.combinations
def test_streams_of_a_server_are_measured(tmp_path: Path) -> None:
    bundle = random_bundle("tiny", ("float32",), ("native",), tmp_path)
    figures = serve_streams(bundle.path, SOURCES, 4, device="cpu", streams=2)
    assert (figures["streams"], figures["sources"]) == (2, 3)
    assert figures["tokens_per_s"] > 0


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
