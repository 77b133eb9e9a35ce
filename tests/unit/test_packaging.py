"""Properties of the distribution: light imports, one source of build requirements, complete locks."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from deploy.sbom import python_licence
from tests.unit.client.unasync import COMMAND, GENERATED, WRITTEN, synchronous

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("protos", "service", "model")
LOCKS = ("serve.lock", "test.lock", "pythons.lock", "oip-clients.lock", "dist.lock", "image.lock")
SERVING = ("onnxruntime", "numpy", "tokenizers", "pydantic", "prometheus_client", "uvloop", "torch", "transformers")


def loaded_by(module: str) -> set[str]:
    """Return the top-level packages that a new interpreter has loaded after importing `module`."""
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def locked(name: str) -> list[str]:
    """Return the requirements of a lock, one string each: name, version, marker, hashes."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()


@pytest.mark.parametrize("module", ["antiphon.client", "antiphon.cli.main", "antiphon.v1.inference_pb2_grpc"])
def test_client_imports_nothing_of_the_server(module: str) -> None:
    assert loaded_by(module).isdisjoint(SERVING)


def test_server_import_leaves_torch_unloaded() -> None:
    assert loaded_by("antiphon.server.process").isdisjoint({"torch", "onnx", "onnxscript", "transformers"})


def test_no_source_root_hides_the_others() -> None:
    """Python takes a folder with an __init__.py for the whole of a package (PEP 420)."""
    assert [root for root in SOURCE_ROOTS if (ROOT / root / "antiphon" / "__init__.py").exists()] == []


def test_rules_of_imports_name_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    packages = {
        f"antiphon.{path.parent.name}"
        for root in SOURCE_ROOTS
        for path in (ROOT / root / "antiphon").glob("*/__init__.py")
    }
    modules = {f"antiphon.{path.stem}" for root in SOURCE_ROOTS for path in (ROOT / root / "antiphon").glob("*.py")}
    assert modules == {"antiphon.errors"}
    assert set(settings["root_packages"]) == packages
    named = {name for layer in settings["contracts"][0]["layers"] for name in layer.split(" | ")}
    assert named == packages | modules


def test_errors_import_nothing_of_antiphon() -> None:
    """import-linter follows the imports of packages only."""
    path = ROOT / "model" / "antiphon" / "errors.py"
    imports = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("import", "from"))]
    assert imports == ["from __future__ import annotations"]


def test_synchronous_client_is_generated_from_the_asynchronous_one() -> None:
    written = WRITTEN.read_text(encoding="utf-8")
    assert GENERATED.read_text(encoding="utf-8") == synchronous(written), f"run: {COMMAND}"


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_and_hashes_every_requirement(name: str) -> None:
    requirements = locked(name)
    assert requirements
    assert [line for line in requirements if not re.match(r"[\w.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []


@pytest.mark.parametrize("name", LOCKS)
def test_lock_contains_no_address_and_no_torch(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"^(--|torch==|nvidia-|triton==)", text, flags=re.MULTILINE)


def test_serve_lock_agrees_with_test_lock() -> None:
    serve, test = ({line.split()[0] for line in locked(name)} for name in LOCKS[:2])
    assert serve <= test


def test_serve_lock_contains_every_requirement_of_serving() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["serving"], *extras["server"]]
    held = {canonical(line.split("==")[0]) for line in locked("serve.lock")}
    assert {canonical(re.split(r"[^\w.-]", line)[0]) for line in wanted} - held == {"antiphon"}


def canonical(name: str) -> str:
    """Normalise a name as package indexes do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_project_states_build_requirements_and_torch_only_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["dependency-groups"]["build"] == project["build-system"]["requires"]
    (torch,) = [line for line in project["project"]["optional-dependencies"]["train"] if line.startswith("torch")]
    assert torch in (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8").splitlines()
    assert torch == f"torch=={project['tool']['uv']['dependency-metadata'][0]['version']}"


@pytest.mark.parametrize("module", ["antiphon.server.process", "antiphon.export.profile"])
def test_onnxruntime_stores_no_identifier_and_sends_no_telemetry(module: str, tmp_path: Path) -> None:
    # Without the setting, it writes its telemetry id below the home directory as soon as it is loaded.
    code = f"import {module}, onnxruntime; onnxruntime.InferenceSession"
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name] == []


def test_onnxruntime_is_imported_in_one_place() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for folder in ("model", "service")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(import|from) onnxruntime\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    # The second runs in an environment of its own.
    assert importing == {"model/antiphon/bundle/onnx_runtime.py", "service/antiphon/tools/bench/rival_programs.py"}


def test_marks_that_make_test_leaves_out_are_explained_to_contributors_and_used() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    declared = dict(line.split(": ", 1) for line in settings["markers"])
    del declared["gpu"]  # skipped by itself
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = contributing.partition("| Mark | Tests |\n|---|---|\n")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.M)) == declared
    rest = re.search(r"^REST := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert rest is not None
    assert {*rest[1].split(" or "), "arm"} == declared.keys()  # `make test-arm` runs these
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    assert set(re.findall(r"pytest\.mark\.(\w+)", tests)) >= declared.keys()


def test_citation_names_the_version_and_the_licence_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    own = project["license"].partition(" AND ")[0]
    assert (citation["version"], citation["license"]) == (project["version"], own)


def test_code_of_others_is_beside_its_licence_which_the_wheel_contains() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [list(ROOT.glob(pattern)) for pattern in project["license-files"]]
    assert all(texts)
    folders = {path.parent for paths in texts for path in paths} - {ROOT}
    notice = re.compile(rb"^\W*(Copyright\b|SPDX-License-Identifier: *(.+?)\s*$)", re.MULTILINE)
    noticed = 0
    for path in (path for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*") if path.is_file()):
        found = notice.search(path.read_bytes()[:2000]) if path.suffix in (".cc", ".css", ".h", ".js", ".py") else None
        if found or "vendor" in path.parts:
            assert not folders.isdisjoint(path.parents), path
            noticed += 1
    assert noticed >= 4


def test_named_versions_and_licences_of_others_are_those_inside() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    vendored = {row["name"]: row for row in project["tool"]["hatch"]["build"]["hooks"]["custom"]["vendored"]}
    page = ROOT / "service" / "antiphon" / "play" / "static" / "vendor" / "lit-html.js"
    assert f'.push("{vendored["lit-html"]["version"]}")' in page.read_text(encoding="utf-8")
    header = ROOT / "model" / "antiphon" / "ops" / "native" / "onnxruntime" / "onnxruntime_c_api.h"
    api = vendored["onnxruntime"]["version"].removeprefix("1.")
    assert f"#define ORT_API_VERSION {api}\n" in header.read_text(encoding="utf-8")
    assert {row["licence"] for row in vendored.values()} < set(project["project"]["license"].split(" AND "))
    # The runtime that mypyc compiles into the engine.
    text = ROOT / "service" / "antiphon" / "engine" / "mypyc.LICENSE"
    assert text.read_text() == importlib.metadata.distribution("mypy").read_text("licenses/LICENSE")


# Licences that allow to ship a package without publishing sources of our own. MPL-2.0 concerns its own files only.
ALLOWED = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MPL-2.0", "PSF-2.0", "Zlib"}


def test_packages_of_the_image_have_permissive_licences() -> None:
    """Not of the cuda image's: NVIDIA's libraries there are proprietary."""
    names = {re.split("==", line)[0] for line in locked("image.lock")}
    licences = {
        name: python_licence(message_from_string(importlib.metadata.distribution(name).read_text("METADATA") or ""))
        for name in names
    }
    words = {name: set(re.findall(r"[\w.-]+", text or "unknown")) - {"AND", "OR"} for name, text in licences.items()}
    assert {name: found for name, found in words.items() if not found <= ALLOWED} == {}
