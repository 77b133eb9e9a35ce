"""The export command: written files, refusals, and no files left after a refusal."""

from __future__ import annotations

import argparse
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from antiphon.bundle.manifest import Bundle, Lowering, Precision, Provenance, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import ExportError, VerificationError
from antiphon.export import export, ports, trace, weights
from antiphon.export.calibration import find_outliers
from antiphon.export.export import export_bundle
from antiphon.export.verify import DIVERGENCES, TOLERANCES, Tolerance, divergences, verify
from antiphon.export.weights import NO_OUTLIERS
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.parity.exports import small_config

COLUMNS = [3, 20, 41]
WRONG = {"int8": 1.02, "int4": 1.1}  # factors of all weights


def parse(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def test_export_command_writes_a_bundle_with_licence_and_provenance(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provenance = Provenance(source="https://example.org/pairs", licence="CC-BY-2.0", attribution="By many people.")
    folder = checkpoint.text_folder
    (folder / "provenance.json").write_text(provenance.model_dump_json())
    try:
        code = export.run(parse(folder, tmp_path / "bundle", "--precision", "int8", "--name", "small"))
    finally:
        (folder / "provenance.json").unlink()
    assert code == 0, capsys.readouterr().err
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.manifest.name == "small"
    assert bundle.manifest.provenance == provenance
    assert "By many people." in bundle.file("NOTICE").read_text()
    assert set(bundle.manifest.files) == {
        "NOTICE", "tokenizer.json", "weights.native.int8.bin", "encoder.native.int8.onnx", "decoder.native.int8.onnx",
        "explain.int8.onnx",
    }  # fmt: skip
    assert [graphs.cache for graphs in bundle.manifest.graphs] == ["float16"]


@pytest.mark.parametrize(
    ("flags", "lowerings"),
    [
        ([], ("native",)),
        (["--lowering", "cuda"], ("cuda",)),
        (["--lowering", "cuda", "native", "cuda"], ("native", "cuda")),
    ],
)
def test_export_command_chooses_lowerings(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], lowerings: tuple[Lowering, ...]
) -> None:
    asked: dict[str, object] = {}

    def record(*_: object, **choices: object) -> Bundle:
        asked.update(choices)
        raise ExportError("enough")

    monkeypatch.setattr(export, "export_bundle", record)
    monkeypatch.setattr(export, "load_checkpoint", lambda path: None)
    assert export.run(parse("checkpoint", "bundle", *flags, "--cache-type", "float32")) == 2
    assert asked["lowerings"] == lowerings
    assert asked["cache"] == "float32"


def test_bundle_has_the_tensor_names_of_the_contract(bundle: Bundle) -> None:
    graphs = bundle.graph_set("float32")
    for name, directions in (
        (graphs.encoder_file, (ports.encoder_inputs, ports.encoder_outputs)),
        (graphs.decoder_file, (ports.decoder_inputs, ports.decoder_outputs)),
    ):
        graph = ir.load(bundle.file(name)).graph
        for values, expected in zip((graph.inputs, graph.outputs), directions, strict=True):
            wanted = expected(bundle.manifest.model, "native")
            assert [value.name for value in values] == [port.name for port in wanted]
            assert [value.dtype for value in values] == [ir.DataType.from_numpy(dtype_of(port)) for port in wanted]


def dtype_of(port: ports.Port) -> np.dtype[Any]:
    return torch.empty(0, dtype=port.dtype).numpy().dtype


def test_native_graphs_take_the_cache_in_the_type_of_their_graph_set(bundle: Bundle) -> None:
    expected: dict[Precision, str] = {"float32": "float32", "int8": "float16"}
    for precision, wanted in expected.items():
        graphs = bundle.graph_set(precision, "native")
        assert graphs.cache == wanted
        for name in (graphs.encoder_file, graphs.decoder_file):
            (cache,) = (value for value in ir.load(bundle.file(name)).graph.inputs if value.name == "cache")
            assert cache.dtype == ir.DataType.from_numpy(np.dtype(wanted))


def test_native_graphs_contain_only_operators_of_this_project(bundle: Bundle) -> None:
    for graphs in bundle.manifest.graphs:
        for name in (graphs.encoder_file, graphs.decoder_file):
            assert {node.domain for node in ir.load(bundle.file(name)).graph} == {"antiphon"}


@pytest.mark.combinations
def test_export_refuses_graphs_that_disagree_with_the_model(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test simulates an exporter fault: it traces another model than that of the checkpoint."""
    other = random_transformer(small_config(), seed=1)

    def trace_other(model: Transformer) -> ir.Model:
        return trace.trace_decoder(other)

    monkeypatch.setattr(export, "trace_decoder", trace_other)
    with pytest.raises(VerificationError, match="native float32 graphs disagree with the model: a logit is off"):
        export_bundle(checkpoint, tmp_path / "bundle", precisions=("float32",))
    assert not list(tmp_path.iterdir())


def with_outliers(checkpoint: Checkpoint) -> Checkpoint:
    """Return a model of the same function with values of attention that are 1,000 times larger."""
    model = deepcopy(checkpoint.model)
    assert model.encoder is not None
    assert model.decoder is not None
    width = checkpoint.config.d_model
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        attention = layer.self_attention
        attention.qkv.weight.data[[2 * width + column for column in COLUMNS]] *= 1000
        attention.out.weight.data[:, COLUMNS] /= 1000
    return replace(checkpoint, model=model)


def test_export_keeps_outliers_in_float32(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = with_outliers(checkpoint).model
    outliers = find_outliers(model)
    products = [
        parameter
        for name, parameter in model.named_parameters()
        if name == "encoder.layers.0.self_attention.out.weight"
    ]
    assert products
    assert all(set(COLUMNS) <= set(outliers[weight.data_ptr()].tolist()) for weight in products)
    assert not any(len(columns) for columns in find_outliers(checkpoint.model).values())
    errors = []
    for name, calibrated in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TOLERANCES, "int8", Tolerance(max_error=np.inf, rms_error=np.inf, min_agreement=0))
            if not calibrated:
                patch.setattr(export, "find_outliers", lambda *_: NO_OUTLIERS)
            (graphs,) = export.write_graphs(model, tmp_path / name, ("int8",), ("native",))
            errors.append(verify(tmp_path / name, graphs, model).rms_error)
    assert errors[0] < errors[1] / 4


def test_export_leaves_out_a_precision_that_disagrees(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = Tolerance(max_error=1e-6, rms_error=1e-6, min_agreement=1.01)
    monkeypatch.setitem(TOLERANCES, "int8", impossible)
    monkeypatch.setitem(DIVERGENCES, "int8", 0.0)
    written = export_bundle(checkpoint, tmp_path / "bundle", precisions=("int8", "float32"), explain=False)
    assert [graphs.precision for graphs in written.manifest.graphs] == ["float32"]
    assert not [path for path in written.path.iterdir() if path.suffix == ".onnx" and "int8" in path.name]
    message = "native int8 is left out: native int8 graphs disagree with the model: over texts, tokens diverge by"
    assert message in capsys.readouterr().err
    with pytest.raises(VerificationError, match="native int8 graphs disagree"):
        export_bundle(checkpoint, tmp_path / "alone", precisions=("int8",), explain=False)


def test_divergence_is_that_of_kullback_and_leibler() -> None:
    random = np.random.default_rng(0)
    found, right = (random.normal(scale=scale, size=(5, 40)).astype(np.float32) for scale in (1, 3))
    log_found, log_right = (torch.from_numpy(logits).log_softmax(dim=1) for logits in (found, right))
    expected = torch.nn.functional.kl_div(log_found, log_right, reduction="none", log_target=True).sum(dim=1)
    np.testing.assert_allclose(divergences(found + 7, right), expected, rtol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_export_accepts_the_error_of_rounding_and_no_larger_one(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    """Beyond the tolerance, the error must be that of the same rounding in PyTorch."""
    strict = Tolerance(max_error=1e-6, rms_error=1e-6, min_agreement=0.5)
    monkeypatch.setitem(TOLERANCES, precision, strict)
    written = export_bundle(checkpoint, tmp_path / "bundle", precisions=(precision,), explain=False)
    assert [graphs.precision for graphs in written.manifest.graphs] == [precision]
    packed = getattr(weights, f"pack_{precision}")
    monkeypatch.setattr(
        weights,
        f"pack_{precision}",
        lambda weight: replace(packed(weight), scales=packed(weight).scales * np.float32(WRONG[precision])),
    )
    with pytest.raises(VerificationError, match=f"native {precision} graphs disagree with the model: .* off by"):
        export_bundle(checkpoint, tmp_path / "wrong", precisions=(precision,), explain=False)


def test_export_refuses_an_existing_directory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ExportError, match="is not empty; --overwrite replaces a bundle"):
        export_bundle(checkpoint, tmp_path)
    with pytest.raises(ExportError, match=r"is not a bundle \(manifest.json is missing\) and will not be replaced"):
        export_bundle(checkpoint, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.combinations
def test_export_with_overwrite_removes_every_file_of_the_old_bundle(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    for name in ("manifest.json", "encoder.old.onnx"):
        (target / name).write_text("{}")
    bundle = export_bundle(checkpoint, target, precisions=("float32",), overwrite=True)
    assert {path.name for path in target.iterdir()} == {"manifest.json", *bundle.manifest.files}
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_export_refuses_a_name_that_clients_cannot_request(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="name='my model' must match"):
        export_bundle(checkpoint, tmp_path / "my model")


def test_export_command_names_the_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.run(parse(tmp_path / "nothing", tmp_path / "bundle")) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "nothing" in message


def test_export_does_not_change_the_random_state(checkpoint: Checkpoint) -> None:
    before = torch.random.get_rng_state()
    trace.trace_encoder(checkpoint.model)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("changed", [dict(norm="none"), dict(residual=False)])
def test_fused_graphs_are_refused_without_norms_or_residual_connections(
    checkpoint: Checkpoint, changed: dict[str, Any], tmp_path: Path
) -> None:
    config = small_config(**changed)
    odd = replace(checkpoint, config=config, model=random_transformer(config))
    field = next(iter(changed))
    with pytest.raises(ExportError, match=f"{field}=.* cannot be exported"):
        export_bundle(odd, tmp_path / "native")
