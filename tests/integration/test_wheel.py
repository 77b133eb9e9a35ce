"""The wheel, built from the sdist, contains every file once and runs outside of the checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

pytestmark = pytest.mark.combinations

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("protos", "service", "model")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout from its sdist, with the build tools of this environment, without downloads."""
    out = tmp_path_factory.mktemp("dist")
    quick = {"CXXFLAGS": "-O0", "CFLAGS": "-O0"}  # these tests need no optimised code
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=ROOT, **quick)
    (built,) = out.glob("*.whl")
    return built


def is_built(name: str) -> bool:
    """Return whether the build writes this file beside the sources."""
    return "_pb2" in name or name.endswith((".so", ".pyc", ".bin"))


def packaged_sources() -> Iterator[str]:
    """Return the wheel's names of all source files; it contains no C++ sources and no model cards of recipes."""
    for root in SOURCE_ROOTS:
        for path in (ROOT / root / "antiphon").rglob("*"):
            name = path.relative_to(ROOT / root).as_posix()
            is_left_out = "/native/" in name or ("/recipes/" in name and path.suffix == ".md")
            if path.is_file() and not is_built(name) and not is_left_out:
                yield name


def test_wheel_contains_each_source_once(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert {name for name in names if not is_built(name)} == set(packaged_sources())


def test_wheel_contains_stubs_types_licence_and_native_library(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    stubs = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py", "inference_pb2_grpc.pyi")
    for package in ("v1", "oip"):
        assert {f"antiphon/{package}/{name}" for name in ("inference.proto", *stubs)} <= names
    assert {"antiphon/py.typed", "antiphon/ops/_native.so"} <= names
    licences = {name.partition(".dist-info/licenses/")[2] for name in names} - {""}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert licences == {
        path.relative_to(ROOT).as_posix() for pattern in project["license-files"] for path in ROOT.glob(pattern)
    }


def test_wheel_lists_the_parts_of_others_and_the_data_of_its_models(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
    text = archive.read(path).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    parts = {part["name"]: part for part in json.loads(text)["components"]}
    compiled = {"mypyc"} if any(name.startswith("antiphon_engine__mypyc") for name in archive.namelist()) else set()
    assert parts.keys() == {"lit-html", "Inter", "onnxruntime", "en-de", "de-en"} | compiled
    for name in ("en-de", "de-en"):
        data = parts[name]["pedigree"]["ancestors"]
        lines = [
            f"- {row['name']}: {row['description']}. {row['licenses'][0]['license']['name']}. {row['copyright']}"
            for row in data
        ]
        manifest = json.loads(archive.read(f"antiphon/bundles/{name}/manifest.json"))
        assert "\n".join(lines) == manifest["provenance"]["attribution"]


@pytest.mark.skipif(not (Path(sysconfig.get_path("include")) / "Python.h").exists(), reason="no headers of Python")
def test_wheel_contains_the_compiled_engine_and_is_of_one_version_of_python(wheel: Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"antiphon_engine__mypyc{suffix}", f"antiphon/engine/engine{suffix}"} <= names
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{version}-{version}-" in wheel.name


def test_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    where = "import antiphon.client, antiphon.bundle.manifest as b; print(antiphon.client.__file__, b.__file__)"
    for path in run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(site)).split():
        assert Path(path).is_relative_to(site)
    assert "generate" in run(site / "bin" / "antiphon", "--help", cwd=tmp_path, PYTHONPATH=str(site))


# The newest versions in glibc 2.28 and in libstdc++ 8, the oldest that has this glibc (PEP 600).
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


def test_library_of_a_wheel_for_others_needs_no_newer_system(tmp_path: Path) -> None:
    library = tmp_path / "_native.so"
    quick = {"CXXFLAGS": "-O1", "ANTIPHON_PLATFORM": f"manylinux_2_28_{os.uname().machine}"}
    run(sys.executable, "hatch_build.py", "native", library, cwd=ROOT, **quick)
    symbols = run("objdump", "-T", library, cwd=tmp_path)
    versions = {
        (name, tuple(map(int, number.split(".")))) for name, number in re.findall(r"\b([A-Z]+)_([\d.]+)\b", symbols)
    }
    assert {name for name, _ in versions} >= {"GLIBC", "GLIBCXX"}
    assert not [(name, version) for name, version in versions if version > NEWEST[name]]
