"""Strict schemas of custom resources: refuse the objects that an API server would refuse or prune, without a server."""

import functools
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.deploy.manifests import Manifest, load

Schema = dict[str, Any]


def definitions() -> Path:
    """Return the folder of CustomResourceDefinitions. Skips the test if there is none."""
    data = os.environ.get("ANTIPHON_DATA")
    if data is None or not (folder := Path(data) / "crds").is_dir():
        pytest.skip("no CustomResourceDefinitions: ANTIPHON_DATA names no folder that has crds/")
    return folder


def validate(manifest: Manifest) -> None:
    """Raise jsonschema.ValidationError if a custom resource does not match its definition.

    Rules in CEL and admission webhooks are not checked.
    """
    group, _, version = manifest["apiVersion"].partition("/")
    jsonschema.Draft202012Validator(_schema(group, version, manifest["kind"])).validate(manifest)


@functools.cache
def _schema(group: str, version: str, kind: str) -> Schema:
    (definition,) = [found for found in _specs(definitions(), group) if found["names"]["kind"] == kind]
    (schema,) = [found["schema"]["openAPIV3Schema"] for found in definition["versions"] if found["name"] == version]
    strict = _strict(schema)
    assert isinstance(strict, dict)
    return strict


@functools.cache
def _specs(folder: Path, group: str) -> tuple[Schema, ...]:
    files = sorted(folder.glob(f"{group}_*.yaml"))
    return tuple(definition["spec"] for file in files for definition in load(file.read_text(encoding="utf-8")))


def _strict(schema: Any) -> Any:
    """Return a structural schema that refuses unknown fields, which an API server drops silently.

    The patterns are Go's, which can switch to ignoring case after an anchor; Python's can do so only at the start.
    """
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(value) for name, value in schema.items()}
    if isinstance(pattern := strict.get("pattern"), str) and pattern.startswith("^(?i)"):
        strict["pattern"] = "(?i)^" + pattern.removeprefix("^(?i)")
    if strict.get("x-kubernetes-int-or-string") is True:
        strict.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    known = isinstance(strict.get("properties"), dict) and strict.get("type") == "object"
    if known and "additionalProperties" not in strict and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    return strict
