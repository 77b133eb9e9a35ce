"""Encoder-only models: exported graphs compared with PyTorch, for states and all heads, any lengths and any batch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest
import torch

from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import Bundle, Precision, load_bundle
from antiphon.errors import VerificationError
from antiphon.export import export, ports, profile, trace
from antiphon.export.bundle_model import NativeEncoder
from antiphon.export.export import export_bundle
from antiphon.export.ports import Port
from antiphon.export.verify import verify_encoder
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.marks import marked
from tests.parity.exports import export_random, small_config, write_checkpoint

ALONE: dict[str, object] = dict(architecture="encoder", decoder_layers=0)
LABELS = ("one", "two", "three")
ENCODERS: dict[str, dict[str, object]] = {
    "bert": dict(
        positions="learned", activation="gelu", scale_embeddings=False, embedding_norm=True, token_types=3,
        norm_eps=1e-12, heads=[
            dict(task="fill_mask", transform_width=64, activation="gelu", norm=True, tied=True),
            dict(task="next_sentence", labels=("is_next", "not_next"), transform_width=64, activation="tanh"),
            dict(task="pool", transform_width=64, activation="tanh"),
            dict(task="classify", labels=("score",), scores="none", transform_width=40, activation="tanh", bias=False),
            dict(task="tag", labels=LABELS),
        ],
    ),
    "albert": dict(
        positions="learned", activation="gelu_tanh", scale_embeddings=False, embedding_norm=True, token_types=2,
        embedding_width=24, share_layers=True, encoder_layers=3, head_dim=20,
        heads=[
            dict(task="fill_mask", transform_width=24, activation="gelu_tanh", norm=True, tied=True),
            dict(task="classify", labels=LABELS, transform_width=64, activation="silu"),
        ],
    ),
    "types_without_norm": dict(
        positions="t5_relative", token_types=1, norm_placement="pre", norm="rmsnorm", heads=[dict(task="fill_mask")]
    ),
    "t5_with_embedding": dict(
        positions="t5_relative", norm_placement="pre", norm="rmsnorm", bias=False, attention_scale=1.0, gated=True,
        activation="gelu_tanh", scale_embeddings=False, embedding=dict(poolings=("mean", "lasttoken")),
        heads=[dict(task="embed", input_width=128, transform_width=48, activation="tanh", bias=False)],
    ),
}  # fmt: skip
SOURCE_LENS = (17, 1, 33, 5, 16)


@pytest.fixture(scope="module", params=marked(ENCODERS, "combinations", but=["bert"]))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_random(tmp_path_factory.mktemp(request.param), ALONE | ENCODERS[request.param])


def encoder_of(bundle: Bundle, precision: Precision) -> NativeEncoder:
    return NativeEncoder(bundle.path, bundle.graph_set(precision), bundle.manifest.model, threads=2)


def test_encoder_only_model_agrees_with_pytorch(bundle: Bundle) -> None:
    config = bundle.manifest.model
    for graphs in bundle.manifest.graphs:
        assert (graphs.decoder, graphs.explain, graphs.cache) == (None, f"explain.{graphs.precision}.onnx", None)
        assert list(graphs.heads) == [head.task for head in config.heads]
        verify_encoder(bundle.path, graphs, random_transformer(config), seed=7)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_states_and_outputs_of_a_source_do_not_depend_on_its_neighbours(bundle: Bundle, precision: Precision) -> None:
    """States and outputs are bit-identical for any sources before and after it in the packed batch."""
    config, encoder = bundle.manifest.model, encoder_of(bundle, precision)
    random = np.random.default_rng(3)
    sources = [random.integers(0, config.vocab_size, length) for length in SOURCE_LENS]
    types = [random.integers(0, max(config.token_types, 1), length) for length in SOURCE_LENS]
    together = encoder.encode(sources, types)
    for source, kinds, states in zip(sources, types, together, strict=True):
        (alone,) = encoder.encode([source], [kinds])
        np.testing.assert_array_equal(alone, states)
    for head in config.heads:
        read = [np.tile(states, (1, config.head_input_width(head) // config.d_model)) for states in together]
        outputs = np.split(encoder.read_out(head.task, np.concatenate(read)), np.cumsum(SOURCE_LENS)[:-1])
        for states, expected in zip(read, outputs, strict=True):
            np.testing.assert_array_equal(encoder.read_out(head.task, states), expected)
            np.testing.assert_array_equal(encoder.read_out(head.task, states[-1:]), expected[-1:])


def test_encoder_graphs_have_the_tensor_names_of_the_contract(bundle: Bundle) -> None:
    config = bundle.manifest.model
    wanted: dict[Task | Literal["encoder"], tuple[list[Port], list[Port]]] = {}
    wanted["encoder"] = (ports.encoder_inputs(config, "native"), ports.encoder_outputs(config, "native"))
    for head in config.heads:
        wanted[head.task] = (ports.head_inputs(config, head), ports.head_outputs(config, head))
    for graphs in bundle.manifest.graphs:
        for part, (inputs, outputs) in wanted.items():
            name = graphs.encoder_file if part == "encoder" else graphs.heads[part]
            graph = ir.load(bundle.file(name)).graph
            for values, expected in zip((graph.inputs, graph.outputs), (inputs, outputs), strict=True):
                assert [value.name for value in values] == [port.name for port in expected]
            (shape,) = (value.shape for value in graph.outputs)
            assert shape is not None
            assert shape[-1] == outputs[0].axes[-1]


def test_shared_weights_are_stored_once(bundle: Bundle) -> None:
    """With tied embeddings and shared layers the file has each parameter once, and padding."""
    config = bundle.manifest.model
    held = bundle.file("weights.native.float32.bin").stat().st_size
    parameters = 4 * random_transformer(config).num_parameters
    assert held < 1.2 * parameters


@pytest.mark.parametrize("part", ["encoder", "tag"])
def test_export_refuses_graphs_that_disagree_with_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The test simulates an exporter fault: it traces another model than that of the checkpoint."""
    config = small_config(**ALONE | dict(encoder_layers=1), heads=[dict(task="tag", labels=LABELS)])
    checkpoint, other = write_checkpoint(tmp_path / "checkpoint", config), random_transformer(config, seed=1)

    def trace_other(_: Transformer, *task: Task) -> ir.Model:
        return trace.trace_head(other, *task) if task else trace.trace_encoder(other)

    monkeypatch.setattr(export, "trace_encoder" if part == "encoder" else "trace_head", trace_other)
    with pytest.raises(VerificationError, match=f"native float32 {part} graph disagrees with the model: off by"):
        export_bundle(checkpoint, tmp_path / "bundle", precisions=("float32",))
    assert not (tmp_path / "bundle").exists()


def test_profile_of_an_encoder_measures_its_graph(bundle: Bundle) -> None:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    plot = bundle.path.parent / "plot.png"
    args = parser.parse_args([str(bundle.path), "--lengths", "4,8,16,32", "--rows", "1,3", "--plot", str(plot)])
    assert profile.run(args) == 0
    memory = load_bundle(bundle.path).manifest.memory
    assert memory is not None
    assert set(memory.fits) == {"native-float32", "native-int8"}
    assert all(fit.c == 0 and fit.b > 0 for fit in memory.fits.values())


def test_heads_and_token_types_reach_the_gradient() -> None:
    """Every parameter of an encoder has a gradient through its heads, as training needs."""
    config = small_config(**ALONE, **ENCODERS["bert"])
    model = Transformer(config)
    ids = torch.randint(4, config.vocab_size, (2, 9))
    states = model.encode(ids, torch.tensor([9, 4], dtype=torch.int32), torch.arange(9).remainder(3).expand(2, 9))
    read = torch.stack([model.read_out(head.task, states[:, 0]).square().mean() for head in config.heads])
    gradients = torch.autograd.grad(read.sum(), list(model.parameters()), allow_unused=True)
    assert all(gradient is not None for gradient in gradients)
