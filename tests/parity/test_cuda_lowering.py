"""Graphs for GPUs, computed on the CPU by the references of their nodes, compared with the Transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from onnx_ir.tensor_adapters import to_torch_dtype

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import GraphSet, Precision, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import ExportError, LoweringError, VerificationError
from antiphon.export import cuda_lowering, export, trace
from antiphon.export.cuda_lowering import MAX_VOCABULARY, check_config
from antiphon.export.export import CUDA_PRECISIONS, export_bundle, write_graphs
from antiphon.export.ports import (
    Port,
    decoder_inputs,
    decoder_outputs,
    encoder_inputs,
    encoder_outputs,
    head_inputs,
    head_outputs,
)
from antiphon.export.verify import verify, verify_encoder
from antiphon.ops.cuda.nodes import NODES
from antiphon.ops.operator import Node
from antiphon.transformer.random_model import random_transformer
from tests.marks import marked
from tests.parity import test_decoder_only, test_encoders
from tests.parity.exports import small_config
from tests.parity.test_native_graph import ALL_VARIANTS

ENCODER, DECODER = test_encoders.ALONE, test_decoder_only.ALONE
_REFUSED = {"module_heads", "post_norms"}
# The configurations of the other parity tests, and more.
MODELS: dict[str, dict[str, object]] = {
    **{name: given for name, given in ALL_VARIANTS.items() if not _REFUSED & given.keys()},
    **{name: DECODER | given for name, given in test_decoder_only.DECODERS.items()},
    **{name: ENCODER | given for name, given in test_encoders.ENCODERS.items()},
    "rope_encoder": ENCODER | dict(positions="rope", bias=False, norm_placement="pre"),
    "average_alone": dict(decoder_self="average", average=dict(d_ff=None, gated=False)),
    "average_gates": dict(decoder_self="average", average=dict(d_ff=None)),
    "average_feed_forward": dict(decoder_self="average", average=dict(d_ff=96, activation="relu", gated=False)),
    "wide_table": dict(positions="learned", positions_offset=2, d_model=256, encoder_layers=1, decoder_layers=1),
}  # fmt: skip
# Widths of which the kernels need multiples of 16, and vocabularies that are none.
CHANGES: dict[str, dict[str, object]] = {
    "paper": dict(vocab_size=270),
    "t5": dict(head_dim=48),
    "marian": dict(vocab_size=265),
    "none_untied": dict(head_dim=32),
    "rope_gated_post": dict(head_dim=32),
    "alibi_six_heads": dict(head_dim=16),
    "llama": dict(head_dim=32),
    "albert": dict(head_dim=32, embedding_width=32),
}
HEAD_WIDTHS: dict[object, int] = {40: 48, 24: 32}  # of transforms, for the same reason
DECLARED = {node.name: node for node in NODES}
FIXED = {"int32": ir.DataType.INT32, "int64": ir.DataType.INT64, "float32": ir.DataType.FLOAT}
ELEMENTS = dict(bfloat16=ir.DataType.BFLOAT16, float16=ir.DataType.FLOAT16, float32=ir.DataType.FLOAT)


def config_of(name: str) -> ModelConfig:
    options = MODELS[name] | CHANGES.get(name, {})
    if isinstance(heads := options.get("heads"), list):
        width = "transform_width"
        options["heads"] = [head | {width: HEAD_WIDTHS.get(head.get(width), head.get(width))} for head in heads]
    return small_config(**options)


def files_of(graphs: GraphSet) -> dict[str, str]:
    """Return the file of each part and head."""
    parts = [("encoder", graphs.encoder), ("decoder", graphs.decoder), *graphs.heads.items()]
    return {part: file for part, file in parts if file is not None}


@pytest.mark.parametrize("name", marked(MODELS, "combinations", but=["paper", "t5", "albert"]))
def test_cuda_graphs_agree_with_the_transformer(name: str, tmp_path: Path) -> None:
    """The comparison feeds single tokens and prefixes; rows are at different positions; batches have padding."""
    model = random_transformer(config_of(name), seed=1)
    precisions: tuple[Precision, ...] = CUDA_PRECISIONS if name in ("paper", "t5", "bert") else ("bfloat16", "float32")
    sets = write_graphs(model, tmp_path, precisions, ("cuda",))
    assert [graphs.precision for graphs in sets] == list(precisions)
    for graphs in sets:
        check = verify_encoder if model.decoder is None else verify
        check(tmp_path, graphs, model, seed=7)
        for part, file in files_of(graphs).items():
            graph = ir.load(tmp_path / file).graph
            assert_ports(graph, ports_of(model.config, part, graphs.precision))
            for node in graph:
                assert_as_declared(node, ELEMENTS[graphs.precision])


def ports_of(config: ModelConfig, part: str, precision: Precision) -> tuple[list[Port], list[Port]]:
    """Return the declared inputs and outputs of a graph."""
    if part == "encoder":
        return encoder_inputs(config, "cuda", precision), encoder_outputs(config, "cuda", precision)
    if part == "decoder":
        return decoder_inputs(config, "cuda", precision), decoder_outputs(config, "cuda")
    (head,) = (head for head in config.heads if head.task == part)
    return head_inputs(config, head, precision), head_outputs(config, head, "cuda", precision)


def assert_ports(graph: ir.Graph, wanted: tuple[list[Port], list[Port]]) -> None:
    for values, ports in zip((graph.inputs, graph.outputs), wanted, strict=True):
        assert [value.name for value in values] == [port.name for port in ports]
        for value, port in zip(values, ports, strict=True):
            assert value.dtype is not None
            assert to_torch_dtype(value.dtype) == port.dtype
            assert [getattr(axis, "value", axis) for axis in value.shape or ()] == list(port.axes)


def assert_as_declared(node: ir.Node, element: ir.DataType) -> None:
    """A node is a product without bias, or has the inputs, attributes and outputs of nodes.py in their types."""
    if node.op_type == "Gemm":
        assert {name: attribute.value for name, attribute in node.attributes.items()} == {"transB": 1}
        assert [value.dtype for value in node.inputs if value is not None] == [element] * 2
        return
    declared = DECLARED[node.op_type]
    assert node.domain == "antiphon"
    assert {name: attribute.type for name, attribute in node.attributes.items()} == dict(attribute_types(declared))
    assert len(node.outputs) == len(declared.outputs)
    for value, output in zip(node.outputs, declared.outputs, strict=True):
        assert value.dtype == FIXED.get(output.kind, element)
    padded = [*node.inputs, *[None] * (len(declared.inputs) - len(node.inputs))]
    for operand, given in zip(padded, declared.inputs, strict=True):
        assert given.optional or operand is not None, f"{node.op_type} has no {given.name}"
        assert operand is None or operand.dtype == FIXED.get(given.kind, element), given.name


def attribute_types(declared: Node) -> Iterator[tuple[str, ir.AttributeType]]:
    types: Mapping[Any, ir.AttributeType] = {
        int: ir.AttributeType.INT, bool: ir.AttributeType.INT, float: ir.AttributeType.FLOAT,
        str: ir.AttributeType.STRING,
    }  # fmt: skip
    return ((attribute.name, types[attribute.type]) for attribute in declared.attributes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_dim=24), "head_dim=24 must be a multiple of 16"),
        (dict(head_dim=272), "head_dim=272 must be at most 256 in bfloat16"),
        (dict(d_model=72, head_dim=16), "d_model=72 must be a multiple of 16"),
        (dict(d_ff=100), "d_ff=100 must be a multiple of 16"),
        (dict(vocab_size=MAX_VOCABULARY + 1), f"a vocabulary of {MAX_VOCABULARY + 1} is above the limit"),
        (ENCODER | dict(disentangled=dict(span=16)), "disentangled attention"),
        (
            dict(decoder_self="average", average=dict(d_ff=100)),
            "d_ff of average=100 must be a multiple of 16",
        ),
        (ALL_VARIANTS["capped"], "lowering='cuda' has no kernel for post_norms=True"),
        (ALL_VARIANTS["uneven_heads"], "lowering='cuda' has no kernel for module_heads"),
        (ENCODER | dict(embedding_width=24), "embedding_width=24 must be a multiple of 16"),
        (
            ENCODER | dict(heads=[dict(task="pool", transform_width=40)]),
            "transform_width of pool=40 must be a multiple of 16",
        ),
    ],
)
def test_models_that_the_kernels_cannot_compute_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        check_config(small_config(**options), "bfloat16")


def test_wide_heads_of_encoders_are_refused_in_float32() -> None:
    with pytest.raises(LoweringError, match="head_dim=144 must be at most 128 in float32"):
        check_config(small_config(head_dim=144), "float32")


def test_largest_widths_are_accepted() -> None:
    check_config(small_config(head_dim=256, vocab_size=MAX_VOCABULARY), "bfloat16")
    check_config(small_config(head_dim=128), "float32")
    check_config(small_config(**DECODER, head_dim=256), "float32")


@pytest.mark.combinations
def test_bundle_with_native_and_cuda_graphs_is_written_and_loaded(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bundle = export_bundle(
        checkpoint, tmp_path / "bundle", precisions=("float32", "bfloat16"), lowerings=("native", "cuda")
    )
    names = {name for name in load_bundle(bundle.path).manifest.files if name.endswith((".bin", ".onnx"))}
    assert names == {
        "explain.float32.onnx",
        *(f"weights.{kind}.bin" for kind in ("native.float32", "cuda.float32", "cuda.bfloat16")),
        *(
            f"{part}.{kind}.onnx"
            for part in ("encoder", "decoder")
            for kind in ("native.float32", "cuda.float32", "cuda.bfloat16")
        ),
    }
    assert [(graphs.lowering, graphs.precision, graphs.explain) for graphs in bundle.manifest.graphs] == [
        ("native", "float32", "explain.float32.onnx"),
        ("cuda", "float32", None),
        ("cuda", "bfloat16", None),
    ]
    assert bundle.graph_set().lowering == "native"
    assert bundle.graph_set(lowering="cuda").precision == "bfloat16"
    # Half as many bytes, in which tied weights are stored once.
    sizes = {kind: bundle.file(f"weights.cuda.{kind}.bin").stat().st_size for kind in ("float32", "bfloat16")}
    assert sizes["bfloat16"] < 0.55 * sizes["float32"] < 0.6 * 4 * checkpoint.model.num_parameters


def test_weights_that_the_lowering_does_not_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test simulates an operator with an input that it got after the lowering was written."""
    model = random_transformer(config_of("paper"), seed=1)
    traced = trace.trace_encoder(model)
    names = ["gate" if name == "inner_bias" else name for name in cuda_lowering._INPUT_NAMES["FeedForwardSublayer"]]
    monkeypatch.setitem(cuda_lowering._INPUT_NAMES, "FeedForwardSublayer", names)
    with pytest.raises(LoweringError, match="has no kernel for gate of the node FeedForwardSublayer"):
        cuda_lowering.lower_for_cuda(traced, model.config, "encoder", "bfloat16")


def test_export_refuses_cuda_graphs_that_disagree_with_the_model(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test simulates an exporter fault: it traces another model than that of the checkpoint."""
    other, traced = random_transformer(small_config(), seed=1), trace.trace_decoder
    monkeypatch.setattr(export, "trace_decoder", lambda model: traced(other))
    with pytest.raises(VerificationError, match="cuda bfloat16 graphs disagree with the model: a logit is off"):
        export_bundle(checkpoint, tmp_path / "bundle", precisions=("bfloat16",), lowerings=("cuda",))


@pytest.mark.parametrize(
    ("lowerings", "precisions", "message"),
    [
        (("native",), ("float32", "bfloat16"), "precision='bfloat16' does not fit lowering='native'"),
        (("cuda",), ("bfloat16", "int8"), "precision='int8' does not fit lowering='cuda'"),
        (("native", "cuda"), ("bfloat16",), "lowering='native' has no graphs at precision=bfloat16"),
        (("native", "cuda"), ("int4",), "lowering='cuda' has no graphs at precision=int4"),
    ],
)
def test_precisions_that_a_lowering_does_not_have_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, lowerings: Any, precisions: Any, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export_bundle(checkpoint, tmp_path / "bundle", precisions=precisions, lowerings=lowerings)


@pytest.mark.parametrize(
    ("lowerings", "given", "expected"),
    [
        (("native",), None, ("float32", "int8")),
        (("cuda",), None, ("bfloat16",)),
        (("native", "cuda"), None, ("float32", "int8", "bfloat16")),
        (("cuda",), ["float16", "float16"], ("float16",)),
    ],
)
def test_default_precisions_follow_the_lowerings(lowerings: Any, given: Any, expected: tuple[str, ...]) -> None:
    assert export.chosen_precisions(given, lowerings) == expected
