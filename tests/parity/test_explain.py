"""The explain graph against PyTorch, its weights stored once, and the explainer that runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from antiphon.model.bundle.explain_session import ExplainSession
from antiphon.model.bundle.graph import GraphError
from antiphon.model.bundle.manifest import Bundle, BundleError, Lowering, load_bundle
from antiphon.model.checkpoints.checkpoint import Checkpoint
from antiphon.model.export.explain.explain_graph import ExplainModule, rounded, trace_explain, verify_explain
from antiphon.model.export.explain.explain_weights import Layout, store_as
from antiphon.model.export.export import export_bundle, write_graphs
from antiphon.model.export.verification.verify import VerificationError
from antiphon.model.export.weights.weights_file import WeightsFile
from antiphon.model.transformer.random_model import random_transformer
from antiphon.model.transformer.transformer import Transformer
from antiphon.service.domain.errors import Unsupported
from antiphon.service.runtime import explain
from antiphon.service.runtime.explain import Explainer
from tests.parity.conftest import VARIANTS
from tests.parity.exports import small_config

SOURCE = [11, 12, 13, 14, 15, 2]
TARGET = [21, 22, 23]

# Widths that are no multiple of what weights are packed in, where slices must take off what packing added.
ODD: dict[str, object] = dict(d_model=72, head_dim=20, num_heads=3, d_ff=90, vocab_size=270)


def observed_values(model: Transformer, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Return the input of each layer's output projection during `run`; later runs do not change it."""
    held: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: held.update({name: given[0].detach()}))
        for name, module in model.named_modules()
        if name.endswith("attention.out")
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return held


@pytest.mark.parametrize("overrides", [{}, ODD, *VARIANTS.values()], ids=["paper", "odd", *VARIANTS])
def test_explain_module_weighs_values_as_the_model_does(overrides: dict[str, object]) -> None:
    """Weights times values must be what the model's attention puts out, with its own (other) code."""
    model = random_transformer(small_config(**overrides))
    given = torch.tensor([SOURCE]), torch.tensor([[1, *TARGET]])
    expected = observed_values(model, lambda: model(*given))
    found = observed_values(model, lambda: ExplainModule(model)(*given))
    with torch.no_grad():
        maps = ExplainModule(model)(*given)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=name)
    for weights in maps:
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    assert not maps[1].triu(1).any()


@pytest.mark.parametrize("overrides", [ODD, *VARIANTS.values()], ids=["odd", *VARIANTS])
def test_explain_graph_equals_pytorch_however_its_weights_are_stored(
    overrides: dict[str, object], tmp_path: Path
) -> None:
    model = random_transformer(small_config(**overrides))
    traced = trace_explain(model)
    layouts: tuple[Layout, ...] = ("native", "plain")
    for layout in layouts:
        for precision in ("float32", "int8"):
            graph = traced.clone()
            store_as(graph, layout, precision)
            path = tmp_path / f"{layout}.{precision}.onnx"
            with WeightsFile(tmp_path / f"{layout}.{precision}.bin") as weights:
                weights.save(graph, path)
            # Only the order of float32 sums differs; a weight wrongly unpacked is off by orders of magnitude.
            assert verify_explain(path, model, precision) < 1e-5


def test_verify_explain_refuses_another_models_graph(bundle: Bundle) -> None:
    other = random_transformer(small_config(), seed=1)
    with pytest.raises(VerificationError, match=r"explain.int8.onnx disagrees with the model: an attention weight"):
        verify_explain(bundle.file("explain.int8.onnx"), other, "int8")


def test_export_adds_an_explain_graph_of_each_precision(bundle: Bundle) -> None:
    explained = [(graphs.precision, graphs.explain) for graphs in bundle.manifest.graphs]
    assert set(explained) == {("float32", "explain.float32.onnx"), ("int8", "explain.int8.onnx")}
    assert {"explain.float32.onnx", "explain.int8.onnx"} <= bundle.manifest.files.keys()


@pytest.mark.parametrize("lowering", ["native", "contrib"])
def test_explain_graph_reads_the_weights_that_are_stored_already(
    checkpoint: Checkpoint, tmp_path: Path, lowering: Lowering
) -> None:
    sizes = []
    for explain_too in (False, True):
        directory = tmp_path / str(explain_too)
        directory.mkdir()
        write_graphs(checkpoint.model, directory, ("int8",), (lowering,), explain=explain_too)
        sizes.append({path.name: path.stat().st_size for path in directory.glob("*.bin")})
    # Contrib graphs keep the embedding's scales times sqrt(M): one table of 272 floats may come on top.
    for name, size in sizes[0].items():
        assert sizes[1][name] - size <= (0 if lowering == "native" else 2048), name


def test_explain_graph_is_plain_onnx(bundle: Bundle) -> None:
    for precision in ("float32", "int8"):
        graph = ir.load(bundle.file(f"explain.{precision}.onnx")).graph
        assert {node.domain for node in graph} == {""}
        assert [value.name for value in graph.inputs] == ["source_ids", "target_ids"]
        assert [value.name for value in graph.outputs] == ["encoder_self", "decoder_self", "cross"]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_explainer_gives_the_models_weights_with_the_begin_token_first(
    bundle: Bundle, checkpoint: Checkpoint, precision: str
) -> None:
    explanation = Explainer(bundle, precision=precision).explain(SOURCE, TARGET)  # type: ignore[arg-type]
    reference = ExplainModule(rounded(checkpoint.model, precision))  # type: ignore[arg-type]
    with torch.no_grad():
        expected = reference(torch.tensor([SOURCE]), torch.tensor([[checkpoint.config.bos_id, *TARGET]]))
    for found, wanted in zip(
        (explanation.encoder_self, explanation.decoder_self, explanation.cross), expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
    assert explanation.cross.shape == (2, 4, len(TARGET) + 1, len(SOURCE))


def test_explainer_prefers_int8(bundle: Bundle) -> None:
    found = Explainer(bundle).explain(SOURCE, TARGET)
    np.testing.assert_array_equal(found.cross, Explainer(bundle, precision="int8").explain(SOURCE, TARGET).cross)
    assert not np.array_equal(found.cross, Explainer(bundle, precision="float32").explain(SOURCE, TARGET).cross)


def test_explainer_takes_the_longest_source_and_target_and_an_empty_target(bundle: Bundle) -> None:
    explainer = Explainer(bundle)
    longest = explainer.explain([5] * explainer.max_source_len, [6] * explainer.max_target_len)
    assert longest.encoder_self.shape[2:] == (48, 48)
    assert longest.decoder_self.shape[2:] == (24, 24)
    assert sum(maps.size for maps in (longest.encoder_self, longest.decoder_self, longest.cross)) == (
        explainer.num_weights(explainer.max_source_len, explainer.max_target_len)
    )
    assert explainer.explain(SOURCE, []).decoder_self.tolist() == np.ones((2, 4, 1, 1)).tolist()


def test_explainer_refuses_a_bundle_without_the_graph(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bundle = export_bundle(checkpoint, tmp_path / "small", precisions=("int8",), lowerings=("contrib",), explain=False)
    assert "explain" not in (tmp_path / "small" / "manifest.json").read_text()
    explainer = Explainer(bundle)
    assert not explainer.is_available
    with pytest.raises(Unsupported, match="bundle 'small' holds no explain graph"):
        explainer.explain(SOURCE, TARGET)


def test_explainer_refuses_more_weights_than_its_bound(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    explainer = Explainer(bundle)
    monkeypatch.setattr(explain, "MAX_WEIGHTS", explainer.num_weights(len(SOURCE), len(TARGET)))
    explainer.explain(SOURCE, TARGET)
    with pytest.raises(Unsupported, match="6 source and 4 target tokens have 728 attention weights; at most 608"):
        explainer.explain(SOURCE, [*TARGET, 5])


def test_explainer_answers_threads_alike(bundle: Bundle) -> None:
    explainer = Explainer(bundle)
    expected = Explainer(bundle).explain(SOURCE, TARGET).cross
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(explainer.explain(SOURCE, TARGET).cross)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for cross in found:
        np.testing.assert_array_equal(cross, expected)


def test_explain_session_names_a_file_it_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "explain.onnx").write_bytes(b"no graph")
    with pytest.raises(GraphError, match=r"explain.onnx: the explain graph cannot be loaded"):
        ExplainSession(tmp_path / "explain.onnx")


def test_load_bundle_refuses_a_damaged_explain_graph(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, tmp_path / "copy")
    (tmp_path / "copy" / "explain.int8.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"explain.int8.onnx is damaged"):
        load_bundle(tmp_path / "copy")


def test_explainer_needs_neither_torch_nor_onnx() -> None:
    script = (
        "import sys, antiphon.service.runtime.explain as _; "
        "print(sorted({'torch', 'onnx', 'onnx_ir'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"
