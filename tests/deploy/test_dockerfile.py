"""The Dockerfile: linted, complete, and with locked packages only. `make image-check` tests the image."""

import re
import subprocess
import tomllib
from pathlib import Path

from tests.deploy.tools import ROOT, tool

DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[str]:
    """Return every instruction as one line, without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    return [re.sub(r"\s+", " ", line) for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def stages() -> dict[str, list[str]]:
    """Return instructions by stage; FROM comes first. A last stage without a name has the key ""."""
    found: dict[str, list[str]] = {}
    for line in instructions():
        if line.startswith("FROM "):
            name = line.partition(" AS ")[2]
            found[name] = []
        if found:
            found[name].append(line)
    return found


def test_dockerfile_is_clean_for_hadolint() -> None:
    hadolint = tool("hadolint", "make deploy-tools installs it")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_installs_only_locked_packages() -> None:
    installs = [line for line in instructions() if re.search(r"\bpip\b.* install ", line)]
    assert len(installs) >= 4
    for line in installs:
        assert "--no-deps" in line
        locks = r"--require-hashes -r requirements/(image|image-cuda|kernels)\.lock"
        assert re.search(rf"{locks}|--no-index", line), line


def test_dockerfile_runs_nothing_as_root_in_final_stages() -> None:
    found = stages()
    for name in ("cpu", "cuda"):
        first, *rest = found[name]
        assert first == f"FROM runtime AS {name}"
        assert {line.split()[0] for line in rest} <= {"COPY", "ARG", "LABEL", "ENV"}
        assert not any("--from=install" in line for line in rest)
    runtime = found["runtime"]
    assert [line for line in runtime if line.startswith("USER ")] == ["USER 10001:10001"]
    assert runtime.index("USER 10001:10001") > max(i for i, line in enumerate(runtime) if line.startswith("RUN "))
    assert found["bundle"][0] == "FROM scratch AS bundle"
    assert "USER 10001:10001" in found["bundle"]


def test_dockerfile_builds_the_cpu_image_by_default() -> None:
    assert list(stages().items())[-1] == ("", ["FROM cpu"])


def test_dockerignore_includes_copied_files_and_excludes_build_products() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"
    allowed = [line.removeprefix("!") for line in patterns if line.startswith("!")]
    copied = {
        source
        for line in instructions()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(pattern) or source.startswith(f"{pattern}/") for pattern in allowed), source
    assert {"**/*.so", "**/__pycache__"} <= set(patterns)
    # Antiphon itself comes from the wheel: no build sees its service or its protos, nor what a checkout made of them.
    assert "dist/*.whl" in allowed
    assert not {"protos", "service"} & set(allowed)


def test_make_image_names_the_image_by_the_version_of_the_package() -> None:
    make = tool("make", "install make")
    done = subprocess.run(
        [make, "--dry-run", "image", "BUILDER=docker"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"--tag antiphon:{version} " in done.stdout
    assert f"--build-arg VERSION={version} " in done.stdout
