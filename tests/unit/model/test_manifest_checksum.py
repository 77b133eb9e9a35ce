"""Refusal of a manifest with a changed byte, or with token ids outside the vocabulary; the message names the field."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.bundle.manifest import FORMAT_VERSION, MANIFEST_NAME, load_bundle
from antiphon.errors import BundleError
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.manifests import edit_manifest

WHOLE = (SHIPPED_BUNDLE / MANIFEST_NAME).read_bytes()
VERSION_AT = WHOLE.index(b'"format_version": ') + len(b'"format_version": ')


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SHIPPED_BUNDLE, tmp_path / "bundle")
    return tmp_path / "bundle"


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
def test_a_wrong_value_is_refused_in_one_line_with_its_field(
    copy: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
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
