"""Verification of a bundle before it is loaded: damaged files and manifests, and files outside the directory."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from antiphon.bundle.external_data import NotAGraph, external_files
from antiphon.bundle.manifest import FORMAT_VERSION, MANIFEST_NAME, load_bundle
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


WHOLE = (SHIPPED_BUNDLE / MANIFEST_NAME).read_bytes()
VERSION_AT = WHOLE.index(b'"format_version": ') + len(b'"format_version": ')


def refusal(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        load_bundle(bundle)
    return str(caught.value)


def test_a_bit_flipped_in_any_byte_of_the_manifest_is_refused_with_its_name(copy: Path) -> None:
    rng = random.Random(7)
    # Every bit of the version too: another version must not disable the check.
    flips = [(at, rng.randrange(8)) for at in range(len(WHOLE))] + [(VERSION_AT, bit) for bit in range(8)]
    for at, bit in flips:
        (copy / MANIFEST_NAME).write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ 1 << bit]) + WHOLE[at + 1 :])
        assert str(copy / MANIFEST_NAME) in refusal(copy), (at, bit)


@pytest.mark.parametrize("content", [WHOLE + b"\n", WHOLE.replace(b"  ", b" "), b" " + WHOLE])
def test_manifest_is_refused_when_white_space_has_changed(copy: Path, content: bytes) -> None:
    (copy / MANIFEST_NAME).write_bytes(content)
    assert f"{copy / MANIFEST_NAME} is damaged" in refusal(copy)


def test_edited_manifest_is_refused_with_a_remedy(copy: Path) -> None:
    (copy / MANIFEST_NAME).write_bytes(WHOLE.replace(b'"num_heads": 8', b'"num_heads": 4'))
    message = refusal(copy)
    assert f"{copy / MANIFEST_NAME} is damaged" in message
    assert "export or import it again" in message


def test_manifest_without_checksum_is_refused(copy: Path) -> None:
    manifest = json.loads(WHOLE)
    del manifest["checksum"]
    (copy / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
    assert f"{copy / MANIFEST_NAME}: checksum is missing" in refusal(copy)


@pytest.mark.parametrize("version", [1, 2, 3, FORMAT_VERSION + 1, None, "4"])
def test_manifest_of_another_version_is_refused_with_a_remedy(copy: Path, version: object) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(format_version=version))
    message = refusal(copy)
    assert f"format_version is {version!r}; this Antiphon reads {FORMAT_VERSION}" in message
    assert "export or import the model again" in message


def _set(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        *outer, last = path
        found: Any = manifest
        for name in outer:
            found = found.setdefault(name, {}) if isinstance(found, dict) else found[name]
        found[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("text", "template", 1, value=10000), "text.template is 10000; it must be from 0 to 9999"),
        (_set("text", "template", 1, value=-1), "text.template is -1; it must be from 0 to 9999"),
        (
            _set("text", "pair_template", value=["$text", 11000, "$pair"]),
            "text.pair_template is 11000; it must be from",
        ),
        (_set("text", "pair_start", value=-1), "text.pair_start is -1; "),
        (_set("text", "special_ids", 3, value=65536), "text.special_ids is 65536; it must be from 0 to 9999"),
        (_set("text", "added_tokens", "<x>", value=10001), "text.added_tokens.<x> is 10001; it must be from 0 to 9999"),
        (_set("text", "languages", "de", value=10002), "text.languages.de is 10002; it must be from 0 to 9999"),
        (_set("text", "mask_id", value=10003), "text.mask_id is 10003; it must be from 0 to 9999"),
        (_set("text", "default_source_language", value="xx"), "text.default_source_language is 'xx'; it must be one "),
        (_set("text", "default_target_language", value="xx"), "text.default_target_language is 'xx'; it must be one "),
        (
            _set("generation", "forced_first_id", value=10004),
            "generation.forced_first_id is 10004; it must be from 0 to",
        ),
        (
            _set("generation", "suppressed_ids", value=[5, 10005]),
            "generation.suppressed_ids is 10005; it must be from 0",
        ),
        (_set("generation", "stop_ids", value=[-6]), "generation.stop_ids is -6; it must be from 0 to 9999"),
        (_set("model", "eos_id", value=10000), "model: Value error, eos_id=10000 must be below vocab_size=10000"),
        (_set("model", "num_heads", value=3), "num_heads=3 does not divide d_model=256"),
        (_set("model", "num_heads", value="four"), "model.num_heads: "),
        (_set("name", value="a\nb"), "name: "),
        (_set("graphs", 0, "precision", value="int9"), "graphs.0.precision: "),
    ],
)
def test_a_wrong_value_is_refused_by_field(copy: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_manifest(copy, change)
    found = refusal(copy)
    assert f"{copy / MANIFEST_NAME}: " in found
    assert message in found
    assert len(found.splitlines()) == 1


def test_ids_of_a_source_are_compared_with_the_source_vocabulary(copy: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["model"] |= {"tie_source_target": False, "source_vocab_size": 500}
        manifest["text"]["template"] = ["$text", 500]

    edit_manifest(copy, change)
    assert "text.template is 500; it must be from 0 to 499" in refusal(copy)
