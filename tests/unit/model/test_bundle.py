"""Verification of a bundle before it is loaded: damaged files, and files outside the directory."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from antiphon.bundle.external_data import NotAGraph, external_files
from antiphon.bundle.manifest import MANIFEST_NAME, load_bundle
from antiphon.errors import BundleError
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.manifests import edit_manifest

GRAPH = "decoder.native.int8.onnx"
WEIGHTS = "weights.native.int8.bin"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SHIPPED_BUNDLE, tmp_path / "bundle")
    load_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


def entry_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def relist(copy: Path, name: str) -> None:
    """Update the manifest for a changed file, as the author of a forged bundle would."""
    edit_manifest(copy, lambda manifest: manifest["files"].update({name: entry_of(copy / name)}))


def _truncate(copy: Path) -> None:
    with (copy / WEIGHTS).open("r+b") as stream:
        stream.truncate(1000)


def _flip_a_bit(copy: Path) -> None:
    with (copy / WEIGHTS).open("r+b") as stream:
        stream.seek(1000)
        (byte,) = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte ^ 1]))


def _list_second_name(name: str) -> Callable[[Path], None]:
    """List a file of another name with the contents of the tokenizer's file."""

    def spoil(copy: Path) -> None:
        edit_manifest(copy, lambda manifest: manifest["files"].update({name: manifest["files"]["tokenizer.json"]}))

    return spoil


def _link_out(copy: Path) -> None:
    outside = copy.parent / "outside.bin"
    (copy / WEIGHTS).rename(outside)
    (copy / WEIGHTS).symlink_to(outside)


def _leave_out_weights(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].pop(WEIGHTS))


def _name_weights(location: str) -> Callable[[Path], None]:
    """Make a graph read its weights from another file, and update the manifest for the graph."""

    def spoil(copy: Path) -> None:
        graph = onnx.load(copy / GRAPH, load_external_data=False)
        for tensor in graph.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        onnx.save(graph, copy / GRAPH)
        relist(copy, GRAPH)

    return spoil


def _replace_graph(copy: Path) -> None:
    (copy / GRAPH).write_bytes(b"\xff" * 100)
    relist(copy, GRAPH)


def _write_manifest(content: bytes) -> Callable[[Path], None]:
    def spoil(copy: Path) -> None:
        (copy / MANIFEST_NAME).write_bytes(content)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncate, rf"{WEIGHTS} is damaged: 1000 bytes, the manifest says \d+$"),
        (_flip_a_bit, rf"{WEIGHTS} is damaged: \d+ bytes with sha256 \w+\.\.\., the manifest says"),
        (lambda copy: (copy / WEIGHTS).unlink(), rf"{WEIGHTS} is missing$"),
        (
            _list_second_name("../tokenizer.json"),
            r"files names '../tokenizer.json'; only plain file names are allowed$",
        ),
        (_list_second_name("/etc/hostname"), r"files names '/etc/hostname'; only plain"),
        (_list_second_name(".."), r"files names '..'; only plain"),
        (_list_second_name("a\0b"), r"files names 'a\\x00b'; only plain"),
        (_link_out, rf"{WEIGHTS} is a link out of the bundle$"),
        (_leave_out_weights, rf"{GRAPH} keeps weights in '{WEIGHTS}', which files of manifest.json does not list$"),
        (_name_weights("../secret.bin"), r"keeps weights in '../secret.bin', which files of manifest"),
        (_name_weights("/dev/zero"), r"keeps weights in '/dev/zero', which files of manifest"),
        (_name_weights("*/_ORT_MEM_ADDR_/*"), r"keeps weights in '\*/_ORT_MEM_ADDR_/\*', which"),
        (_replace_graph, rf"{GRAPH} is not an ONNX graph$"),
        (_write_manifest(b"[" * 100_000), r"manifest.json cannot be read: "),
        (_write_manifest(b" " * (2**24 + 1)), r"manifest.json cannot be read: it is larger than 16777216 bytes$"),
        (_write_manifest(b"[]"), r"format_version is None"),
    ],
)
def test_damaged_bundle_is_refused(spoil: Callable[[Path], None], message: str, copy: Path) -> None:
    spoil(copy)
    with pytest.raises(BundleError, match=message):
        load_bundle(copy)


def test_links_inside_a_bundle_are_followed(copy: Path) -> None:
    """Orchestrators mount files like this: each file is a link into a hidden folder of the bundle."""
    (copy / "..data").mkdir()
    for file in [path for path in copy.iterdir() if path.is_file()]:
        file.rename(copy / "..data" / file.name)
        file.symlink_to(Path("..data") / file.name)
    load_bundle(copy)


def _external(location: str) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), location)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="location", value=location)
    return tensor


def test_external_data_is_found_at_every_place_of_a_graph(tmp_path: Path) -> None:
    inner = helper.make_graph([], "inner", [], [], [_external("in-a-subgraph")])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    constant = helper.make_node("Constant", [], ["z"], value=_external("in-a-constant"))
    listed = helper.make_node("Constant", [], ["l"], values=[_external("in-a-list")])
    sparse = helper.make_sparse_tensor(_external("in-sparse-values"), _external("in-sparse-indices"), [4])
    graph = helper.make_graph([node, constant, listed], "outer", [], [], [_external("in-the-graph")])
    graph.sparse_initializer.append(sparse)
    function = helper.make_function(
        "d", "f", [], ["z"], [helper.make_node("Constant", [], ["z"], value=_external("in-a-function"))], []
    )
    onnx.save(helper.make_model(graph, functions=[function]), tmp_path / "model.onnx")
    assert external_files(tmp_path / "model.onnx") == {
        "in-a-subgraph",
        "in-a-constant",
        "in-a-list",
        "in-sparse-values",
        "in-sparse-indices",
        "in-the-graph",
        "in-a-function",
    }


def test_field_numbers_equal_those_of_onnx() -> None:
    from antiphon.bundle import external_data

    kinds: dict[str, Any] = {
        "Model": onnx.ModelProto,
        "Function": onnx.FunctionProto,
        "Training": onnx.TrainingInfoProto,
        "Graph": onnx.GraphProto,
        "Node": onnx.NodeProto,
        "Attribute": onnx.AttributeProto,
        "Sparse": onnx.SparseTensorProto,
        "Tensor": onnx.TensorProto,
        "Entry": onnx.StringStringEntryProto,
    }
    names = {kind.DESCRIPTOR.name: name for name, kind in kinds.items()}
    for name, fields in external_data._FIELDS.items():
        theirs = {
            field.number: names[field.message_type.name]
            for field in kinds[name].DESCRIPTOR.fields
            if field.message_type is not None and field.message_type.name in names
        }
        # Metadata are key-value entries too, but ONNX Runtime does not open them.
        assert fields == {number: kind for number, kind in theirs.items() if kind != "Entry" or number == 13}


def test_file_that_is_not_a_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(NotAGraph):
        external_files(tmp_path / "model.onnx")
