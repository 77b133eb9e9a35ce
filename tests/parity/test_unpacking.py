"""Checkpoints reconstructed from bundles, compared with the checkpoint before export, the graphs and CTranslate2."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ctranslate2
import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from antiphon.bundle.manifest import Bundle, Precision, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.errors import BundleError, CheckpointError
from antiphon.export.export import export_bundle
from antiphon.export.graph_edit import constant_array
from antiphon.export.quantize import quantize_groups, quantize_rows
from antiphon.export.unpacking import unpack_checkpoint
from antiphon.export.verify import verify
from antiphon.export.weights import unpack_int8
from antiphon.load.workload import EVERYDAY
from antiphon.runtime.lanes import open_runner
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import encode_sources
from antiphon.tools.bench.ctranslate2_conversion import ctranslate2_specification, save_ctranslate2_model, translate
from antiphon.tools.offline import Offline
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Stack, Transformer
from tests.parity.exports import native_stepper, small_config, write_checkpoint

MAX_NEW_TOKENS = 64
# With the same integers, only activations are rounded to int8: the root mean square of the error of the logits is 0.016
# for the shipped bundle, a sixth of what an export may have.
MAX_RMS_ERROR = 0.05


def exported(bundle: Bundle) -> Transformer:
    """Return the model of `export_random` before its export."""
    return load_checkpoint(bundle.path.parent / "checkpoint").model


@torch.no_grad()
def round_as_stored(model: Transformer, precision: Precision) -> None:
    """Round products and token embeddings as a bundle stores them; vocabulary and embeddings have at least int8."""
    eight_bits = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    eight_bits.add(id(model.output.weight))
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for weight in weights:
        if precision == "int4" and id(weight) not in eight_bits:
            weight.copy_(torch.from_numpy(quantize_groups(weight.numpy()).weight()))
        elif precision != "float32":
            integers, scales = quantize_rows(weight.numpy())
            weight.copy_(torch.from_numpy(integers * scales[:, None]))


def used_numbers(model: Transformer) -> dict[str, torch.Tensor]:
    """Return all parameters, without rows and buckets that no position or distance uses."""
    used = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for side, max_len in (("encoder", model.config.max_source_len), ("decoder", model.config.max_target_len)):
        stack = getattr(model, side)
        assert isinstance(stack, Stack)
        for name, numbers in (
            (f"{side}.positions.table", stack.positions.vectors),
            (f"{side}.relative_bias.weight", stack.relative_bias.by_distance(max_len - 1)),
        ):
            if name in used:
                assert numbers is not None
                used[name] = numbers.detach()
    return used


def assert_reconstructed(bundle: Bundle, precision: Precision) -> None:
    original = exported(bundle)
    round_as_stored(original, precision)
    found, expected = used_numbers(unpack_checkpoint(bundle, precision).model), used_numbers(original)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), parameter.numpy(), err_msg=name)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_reconstructed_numbers_equal_the_rounded_checkpoint(variant: Bundle, precision: Precision) -> None:
    assert_reconstructed(variant, precision)


def test_reconstructed_numbers_equal_the_rounded_checkpoint_when_int4(tmp_path: Path) -> None:
    """Widths are no multiples of 64, so that groups are padded."""
    original = write_checkpoint(tmp_path / "checkpoint", small_config(d_model=40, d_ff=72, tie_output=False))
    bundle = export_bundle(original, tmp_path / "bundle", precisions=("int4",), explain=False)
    assert_reconstructed(bundle, "int4")


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Export a model whose encoder layers have equal weights, with an output of its own, so that its targets vary."""
    folder = tmp_path_factory.mktemp("repeating")
    original = write_checkpoint(folder / "checkpoint", small_config(tie_output=False))
    assert original.model.encoder is not None
    first, second = original.model.encoder.layers
    second.load_state_dict(first.state_dict())
    weights = weights_of(original.model)
    save_checkpoint(folder / "checkpoint", config=original.config, weights=weights, tokenizer=original.tokenizer)
    return export_bundle(original, folder / "bundle", explain=False)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_reconstructed_numbers_equal_the_rounded_checkpoint_when_layers_are_equal(
    repeating: Bundle, precision: Precision
) -> None:
    """Equal constants are stored once, under the name of the first: names do not identify the weights."""
    assert_reconstructed(repeating, precision)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_native_graphs_agree_with_the_reconstructed_model(variant: Bundle, precision: Precision) -> None:
    rebuilt = unpack_checkpoint(variant, precision).model
    found = verify(variant.path, variant.graph_set(precision), rebuilt)  # raises beyond the tolerance of an export
    assert found.rms_error < MAX_RMS_ERROR


def test_native_graphs_choose_the_tokens_of_the_reconstructed_model(repeating: Bundle) -> None:
    """Float32, because with int8 rounded activations can decide between the nearly equal logits of a random model."""
    rebuilt = unpack_checkpoint(repeating, "float32")
    config = rebuilt.config
    dice = np.random.default_rng(3)
    sources = [[*dice.integers(4, 272, length).tolist(), config.eos_id] for length in (1, 4, 9, 9, 23, 40)]
    step = native_stepper(repeating, "float32").start([np.array(source) for source in sources], config.max_target_len)
    fed, produced = np.full(len(sources), config.bos_id), []
    for position in range(config.max_target_len):
        fed = step(fed, np.full(len(sources), position, np.int32)).argmax(axis=1)
        produced.append(fed)
    rows = np.stack(produced, axis=1).tolist()
    ended = [row[: row.index(config.eos_id)] if config.eos_id in row else row for row in rows]
    assert greedy(rebuilt.model, sources, config.max_target_len) == ended
    assert len({tuple(row) for row in ended}) > 1, "the outputs must differ, or the comparison is empty"


@pytest.fixture(scope="module")
def shipped() -> Bundle:
    return load_bundle(SHIPPED_BUNDLE)


@pytest.fixture(scope="module")
def unpacked(shipped: Bundle) -> Checkpoint:
    return unpack_checkpoint(shipped)


def test_reconstructed_shipped_bundle_translates_as_the_bundle_does(
    shipped: Bundle, unpacked: Checkpoint, tmp_path: Path
) -> None:
    """CTranslate2 computes in float32, the bundle rounds activations to int8: all 25 sentences were equal when written.

    PyTorch computes in float32 too; only sums are in another order.
    """
    sources = encode_sources(unpacked.tokenizer, unpacked.text, list(EVERYDAY))
    save_ctranslate2_model(unpacked, tmp_path)
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    theirs = translate(translator, sources, max_decoding_length=MAX_NEW_TOKENS)
    with Offline(open_runner(shipped, max_rows=8, threads=1), rows=8) as offline:
        answers = offline.translate(sources, concurrency=8, max_new_tokens=MAX_NEW_TOKENS)
    ours = [[token for token in answer if token != unpacked.config.eos_id] for answer in answers]
    eager = greedy(unpacked.model, sources, MAX_NEW_TOKENS)
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 0.8 * len(sources)
    assert sum(a == b for a, b in zip(eager, theirs, strict=True)) >= len(sources) - 1


def test_ctranslate2_quantises_the_shipped_bundle_to_the_same_integers(shipped: Bundle, unpacked: Checkpoint) -> None:
    """The first product of each feed-forward layer, which is the only one with an activation."""
    spec = ctranslate2_specification(unpacked)
    spec.validate()
    spec.optimize(quantization="int8")
    config, graphs = unpacked.config, shipped.graph_set("int8")
    for side, name in ((spec.encoder, graphs.encoder_file), (spec.decoder, graphs.decoder_file)):
        nodes = ir.load(shipped.file(name)).graph
        ours = [node for node in nodes if node.op_type == "QuantizedFeedForwardSublayer"]
        for layer, node in zip(side.layer, ours, strict=True):
            packed = constant_array(node.inputs[2])  # inner_weight
            assert packed is not None
            integers = unpack_int8(packed, config.d_ff, config.d_model)
            np.testing.assert_array_equal(layer.ffn.linear_0.weight.numpy(), integers)


def test_unpacking_names_what_differs_between_graphs_and_manifest(shipped: Bundle) -> None:
    def described(**fields: object) -> Bundle:
        model = shipped.manifest.model.model_copy(update=fields)
        return dataclasses.replace(shipped, manifest=shipped.manifest.model_copy(update={"model": model}))

    with pytest.raises(CheckpointError, match=r"encoder\S+ has 13 norms, .* has 11"):
        unpack_checkpoint(described(encoder_layers=5))
    with pytest.raises(CheckpointError, match=r"vocab=10000, the manifest's model has 8016"):
        unpack_checkpoint(described(vocab_size=8016))
    with pytest.raises(CheckpointError, match=r"bias of \S+ has shape None, expected"):
        unpack_checkpoint(described(output_bias=True))
    with pytest.raises(CheckpointError, match=r"architecture='decoder' cannot be unpacked"):
        unpack_checkpoint(described(architecture="decoder"))
    with pytest.raises(BundleError, match=r"no native graphs at precision float32"):
        unpack_checkpoint(shipped, "float32")
