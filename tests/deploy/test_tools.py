"""Installation of missing programs for tests of deployment."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy import tools
from tests.deploy.tools import ROOT, tool

UNPACK = ROOT / "requirements" / "unpack.sh"


def unpack(folder: Path, programs: tuple[str, ...], wanted: str) -> str:
    """Return the output of unpack.sh on a machine with those programs and without a network; it must succeed."""
    path = folder / "bin"
    path.mkdir(exist_ok=True)
    for name in programs:
        found = shutil.which(name)
        assert found is not None
        with contextlib.suppress(FileExistsError):
            (path / name).symlink_to(found)
    environment = {"PATH": str(path)} | dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = ["/bin/sh", str(UNPACK), str(folder / "tools"), wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_present_program_is_not_downloaded(tmp_path: Path) -> None:
    assert unpack(tmp_path, ("mkdir", "uname"), "coreutils=uname") == ""


def test_missing_programs_are_listed_on_a_machine_without_apt(tmp_path: Path) -> None:
    assert "no apt to get it with: its tests are skipped" in unpack(tmp_path, ("mkdir",), "some-package=some-program")


def test_unavailable_package_is_reported(tmp_path: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("apt-get and dpkg are not on this machine: Debian and its relatives have them")
    programs = ("mkdir", "mktemp", "rm", "apt-get", "dpkg")
    assert "it cannot be fetched or run" in unpack(tmp_path, programs, "prometheus=some-program")
    assert not list((tmp_path / "tools").glob("archives.*"))


def test_unpacked_alertmanager_reads_the_unpacked_templates(tmp_path: Path) -> None:
    """Regression: Debian's program reads them below /usr, where they are only if the package is installed."""
    usr = tmp_path / "tools" / "usr"
    templates, program = usr / "share" / "prometheus" / "alertmanager", usr / "bin" / "prometheus-alertmanager"
    for folder in (templates, program.parent):
        folder.mkdir(parents=True)
    (templates / "default.tmpl").write_text("the unpacked template", encoding="utf-8")
    program.write_text('#!/bin/sh\necho "$1"; cat /usr/share/prometheus/alertmanager/default.tmpl', encoding="utf-8")
    program.chmod(0o755)
    size = program.stat().st_size
    for _ in ("once", "again"):
        assert unpack(tmp_path, ("mkdir", "sed", "grep", "chmod", "cat", "uname"), "coreutils=uname") == ""
        done = subprocess.run([program, "an argument"], capture_output=True, text=True, check=True, cwd="/")
        assert done.stdout == "an argument\nthe unpacked template"
    # The strings in a Go program have fixed lengths.
    assert (usr / "libexec" / program.name).stat().st_size == size


def test_locked_tool_is_preferred_to_one_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an old kubectl on PATH skipped the tests of the manifests on a machine that had the locked one."""
    for folder in ("locked", "system"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kubectl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    monkeypatch.setattr(tools, "LOCKED", tmp_path / "none")
    assert tool("kubectl", "make deploy-tools") == tmp_path / "system" / "kubectl"
    monkeypatch.setattr(tools, "LOCKED", tmp_path / "locked")
    assert tool("kubectl", "make deploy-tools") == tmp_path / "locked" / "kubectl"


def test_missing_tool_skips_its_test_and_names_the_package() -> None:
    with pytest.raises(pytest.skip.Exception, match="make deploy-tools"):
        tool("some-program-that-nobody-has", "make deploy-tools")
