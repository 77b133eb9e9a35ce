"""The explain graph compared with PyTorch, its weights, which are stored once, and the explainer that runs it."""

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

from antiphon.bundle.explain_session import ExplainSession
from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.domain.errors import Unsupported
from antiphon.errors import BundleError, GraphError, VerificationError
from antiphon.export.explain import ExplainModule, rounded, store_packed, trace_explain, verify_explain
from antiphon.export.export import export_bundle, write_graphs
from antiphon.export.weights import WeightsFile
from antiphon.runtime import explain
from antiphon.runtime.explain import Explainer
from antiphon.transformer.layers import CrossAttention, SelfAttention
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.marks import marked
from tests.parity.conftest import VARIANTS
from tests.parity.exports import small_config

SOURCE = [11, 12, 13, 14, 15, 2]
TARGET = [1, 21, 22, 23]

# Widths that are not multiples of the packing sizes, so that slices must remove the padding of packed weights.
ODD: dict[str, object] = dict(d_model=72, head_dim=20, num_heads=3, d_ff=90, vocab_size=270)


def observed_values(model: Transformer, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Return the projected values of each attention, and the input of its output projection, during `run`."""
    observed: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        observed[name] = tensor.detach()

    hooks = []
    for name, module in model.named_modules():
        attention, _, part = name.rpartition(".")
        if part in ("qkv", "kv"):
            hooks.append(module.register_forward_hook(lambda _, __, out, key=attention: keep(f"{key}.values", out)))
        elif name.endswith("attention.out"):
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, key=name: keep(key, inputs[0])))
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return observed


@pytest.mark.parametrize("overrides", [{}, ODD, *VARIANTS.values()], ids=["paper", "odd", *VARIANTS])
def test_recorded_weights_times_values_are_the_outputs_of_attention(overrides: dict[str, object]) -> None:
    model = random_transformer(small_config(**overrides))
    tensors = torch.tensor([SOURCE]), torch.tensor([TARGET])
    observed = observed_values(model, lambda: model(*tensors))
    with torch.no_grad():
        maps = ExplainModule(model).maps(*tensors)
    attentions = {
        name: module for name, module in model.named_modules() if isinstance(module, SelfAttention | CrossAttention)
    }
    for name, attention in attentions.items():
        kind = "cross" if name.endswith("cross_attention") else f"{name.split('.')[0]}_self"
        layer = int(name.split(".")[2])
        values = observed[f"{name}.values"].chunk(3 if kind != "cross" else 2, dim=-1)[-1]
        attended = maps[kind][layer] @ values[0].reshape(-1, *attention.heads).transpose(0, 1)  # [H, T, D]
        torch.testing.assert_close(attended.transpose(0, 1).flatten(1), observed[f"{name}.out"][0], atol=1e-5, rtol=0)
    for rows in maps.values():
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(rows.shape[:-1]))
    assert ("decoder_self" in maps) == (model.config.decoder_self == "attention")
    assert "decoder_self" not in maps or not maps["decoder_self"].triu(1).any()


@pytest.mark.parametrize("name", marked(["odd", *VARIANTS], "combinations", but=["odd"]))
def test_explain_graph_equals_pytorch_for_every_storage_of_its_weights(name: str, tmp_path: Path) -> None:
    model = random_transformer(small_config(**({"odd": ODD} | VARIANTS)[name]))
    traced = trace_explain(model)
    for precision in ("float32", "int8"):
        graph = traced.clone()
        store_packed(graph, precision)
        path = tmp_path / f"{precision}.onnx"
        with WeightsFile(tmp_path / f"{precision}.bin") as weights:
            weights.save(graph, path)
        # Only the order of float32 sums differs. A wrongly unpacked weight has an error orders of magnitude larger.
        assert verify_explain(path, model, precision) < 1e-5


def test_verify_explain_refuses_the_graph_of_another_model(bundle: Bundle) -> None:
    other = random_transformer(small_config(), seed=1)
    with pytest.raises(VerificationError, match=r"explain.int8.onnx disagrees with the model: an attention weight"):
        verify_explain(bundle.file("explain.int8.onnx"), other, "int8")


def test_export_adds_an_explain_graph_of_each_precision(bundle: Bundle) -> None:
    explained = [(graphs.precision, graphs.explain) for graphs in bundle.manifest.graphs]
    assert set(explained) == {("float32", "explain.float32.onnx"), ("int8", "explain.int8.onnx")}
    assert {"explain.float32.onnx", "explain.int8.onnx"} <= bundle.manifest.files.keys()


@pytest.mark.combinations
def test_explain_graph_uses_the_weights_that_are_already_stored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sizes = []
    for explain_too in (False, True):
        directory = tmp_path / str(explain_too)
        directory.mkdir()
        write_graphs(checkpoint.model, directory, ("int8",), ("native",), explain=explain_too)
        sizes.append({path.name: path.stat().st_size for path in directory.glob("*.bin")})
    assert sizes[0] == sizes[1]


def test_explain_graph_contains_only_standard_onnx_operators(bundle: Bundle) -> None:
    for precision in ("float32", "int8"):
        graph = ir.load(bundle.file(f"explain.{precision}.onnx")).graph
        assert {node.domain for node in graph} == {""}
        assert [value.name for value in graph.inputs] == ["source_ids", "target_ids"]
        assert [value.name for value in graph.outputs] == ["encoder_self", "decoder_self", "cross"]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_explainer_returns_the_weights_of_the_model(bundle: Bundle, checkpoint: Checkpoint, precision: str) -> None:
    found = Explainer(bundle, precision=precision).explain(SOURCE, TARGET)  # type: ignore[arg-type]
    reference = rounded(ExplainModule(checkpoint.model), precision)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = reference.maps(torch.tensor([SOURCE]), torch.tensor([TARGET]))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted.numpy(), atol=1e-5)
    assert found["cross"].shape == (2, 4, len(TARGET), len(SOURCE))


def test_explainer_prefers_int8(bundle: Bundle) -> None:
    found = Explainer(bundle).explain(SOURCE, TARGET)["cross"]
    np.testing.assert_array_equal(found, Explainer(bundle, precision="int8").explain(SOURCE, TARGET)["cross"])
    assert not np.array_equal(found, Explainer(bundle, precision="float32").explain(SOURCE, TARGET)["cross"])


def test_explainer_accepts_the_longest_source_and_target_and_a_begin_token_alone(bundle: Bundle) -> None:
    explainer = Explainer(bundle)
    longest = explainer.explain([5] * 48, [6] * 24)
    assert longest["encoder_self"].shape[2:] == (48, 48)
    assert longest["decoder_self"].shape[2:] == (24, 24)
    assert sum(maps.size for maps in longest.values()) == explainer.num_weights(48, 24)
    assert explainer.explain(SOURCE, [1])["decoder_self"].tolist() == np.ones((2, 4, 1, 1)).tolist()


@pytest.mark.combinations
def test_explainer_refuses_a_bundle_without_the_graph(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bundle = export_bundle(checkpoint, tmp_path / "small", precisions=("int8",), explain=False)
    assert "explain" not in (tmp_path / "small" / "manifest.json").read_text()
    explainer = Explainer(bundle)
    assert not explainer.is_available
    with pytest.raises(Unsupported, match="bundle 'small' holds no explain graph"):
        explainer.explain(SOURCE, TARGET)


def test_explainer_refuses_more_weights_than_its_bound(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    explainer = Explainer(bundle)
    monkeypatch.setattr(explain, "MAX_WEIGHTS", explainer.num_weights(len(SOURCE), len(TARGET)))
    explainer.explain(SOURCE, TARGET)
    with pytest.raises(Unsupported, match="6 source and 5 target tokens have 728 attention weights; at most 608"):
        explainer.explain(SOURCE, [*TARGET, 5])


@pytest.mark.combinations
@pytest.mark.parametrize("most", [0, 500, 1000, 4321])
def test_longest_target_is_the_largest_whose_weights_are_computed(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    explainer = Explainer(bundle)
    monkeypatch.setattr(explain, "MAX_WEIGHTS", most)
    for source_len in range(1, 12):
        longest = explainer.longest_target(source_len)
        assert explainer.num_weights(source_len, longest + 1) > most
        assert longest == 0 or explainer.num_weights(source_len, longest) <= most


def test_explainer_gives_equal_answers_in_several_threads(bundle: Bundle) -> None:
    explainer = Explainer(bundle)
    expected = Explainer(bundle).explain(SOURCE, TARGET)["cross"]
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: found.append(explainer.explain(SOURCE, TARGET)["cross"])) for _ in range(8)
    ]
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
    script = "import sys, antiphon.runtime.explain as _; print(sorted({'torch', 'onnx', 'onnx_ir'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"
