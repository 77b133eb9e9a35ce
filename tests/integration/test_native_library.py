"""An unusable native library is refused with one line that names the file or the variable, without a traceback."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import antiphon.ops
from antiphon.errors import WorkspaceError
from antiphon.ops.workspace import LIBRARY, NATIVE_VERSION, Workspace

NATIVE = Path(antiphon.ops.__file__).parent / "native"
# Command of antiphon with another path of the library.
WITH_LIBRARY = """
import pathlib, sys
from antiphon.cli.main import main
from antiphon.ops.workspace import Workspace
Workspace.__init__.__defaults__ = (pathlib.Path(sys.argv[1]),)
sys.exit(main(sys.argv[2:]))
"""


def compiled(source: str, target: Path, *flags: str) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-x", "c++", "-std=c++17", *flags, "-o", str(target), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return target


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("Hallo.\n", encoding="utf-8")
    return path


def complaint(library: Path, text: Path, command: str, **variables: str) -> str:
    """Return the error message of the command."""
    arguments = {
        "serve": ["serve", "--port", "0", "--metrics-port", "0"],
        "evaluate": ["evaluate", str(shipped()), "--source", str(text), "--reference", str(text)],
    }[command]
    asked = {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")} | variables
    program = [sys.executable, "-c", WITH_LIBRARY, str(library), *arguments]
    done = subprocess.run(program, env=asked, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(f"antiphon {command}: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def shipped() -> Path:
    return Path(antiphon.ops.__file__).parents[1] / "bundles" / "en-de"


@pytest.mark.parametrize("command", ["serve", "evaluate"])
def test_command_names_a_library_that_is_missing(command: str, text: Path) -> None:
    said = complaint(text.parent / "absent.so", text, command)
    assert "absent.so cannot be used: " in said
    assert "install antiphon again" in said


@pytest.mark.parametrize("command", ["serve", "evaluate"])
def test_command_names_the_variable_when_it_has_an_unknown_instruction_set(command: str, text: Path) -> None:
    said = complaint(LIBRARY, text, command, ANTIPHON_CPU="mmx")
    assert "ANTIPHON_CPU is mmx; it must be one of " in said
    assert "portable" in said


def test_workspace_refuses_the_library_of_another_antiphon(tmp_path: Path) -> None:
    other = NATIVE_VERSION + 1
    library = compiled(
        f'extern "C" int antiphon_native_version() {{ return {other}; }}', tmp_path / "other.so", "-shared", "-fPIC"
    )
    message = rf"other\.so cannot be used: its version is {other}, this antiphon needs {NATIVE_VERSION}; install"
    with pytest.raises(WorkspaceError, match=message):
        Workspace(library)


def test_workspace_reports_why_the_library_refuses_an_onnx_runtime() -> None:
    class Options:
        def register_custom_ops_library(self, path: str) -> None:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : needs ONNX Runtime 1.18 or newer, not 1.17.3")

    with pytest.raises(WorkspaceError, match=r"_native\.so cannot be used: needs ONNX Runtime 1\.18 or newer, not"):
        Workspace().attach(Options())


@pytest.mark.parametrize("wanted", ["avx2", "avxvnni", "avx512", "amx"])
def test_kernels_that_the_processor_lacks_are_refused(tmp_path: Path, wanted: str) -> None:
    """Return the choice of kernels on a processor with the base instruction set only."""
    if os.uname().machine != "x86_64":
        pytest.skip("tests/arm has the choice of 64-bit Arm")
    tables = "\n".join(
        f"const Kernels& {name}Kernels() {{ static const Kernels table{{}}; return table; }}"
        for name in ("Portable", "Avx2", "AvxVnni", "Avx512", "Amx")
    )
    source = f"""
#include <cstdio>
#include <exception>
#include "{NATIVE}/cpu.cc"
namespace antiphon {{ {tables} }}
int main() {{
  try {{ antiphon::ActiveKernels(); }} catch (const std::exception& error) {{ std::puts(error.what()); }}
}}"""
    program = compiled(source, tmp_path / "choice", "-D__builtin_cpu_supports(name)=0", f"-I{NATIVE}")
    for asked, answer in ((wanted, f"ANTIPHON_CPU is {wanted}, which this processor lacks\n"), ("portable", "")):
        done = subprocess.run([program], env={"ANTIPHON_CPU": asked}, capture_output=True, text=True, check=True)
        assert done.stdout == answer


def has_avx_vnni() -> bool:
    return " avx_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def test_fastest_kernels_of_a_processor_are_chosen(tmp_path: Path) -> None:
    """Return the choice on processors with some of this processor's instruction sets."""
    if os.uname().machine != "x86_64":
        pytest.skip("tests/arm has the choice of 64-bit Arm")
    names = {"Portable": "portable", "Avx2": "avx2", "AvxVnni": "avxvnni", "Avx512": "avx512", "Amx": "amx"}
    tables = "\n".join(
        f'const Kernels& {prefix}Kernels() {{ static Kernels table{{}}; table.name = "{name}"; return table; }}'
        for prefix, name in names.items()
    )
    source = f"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
static bool Has(const char* name) {{ return std::strstr(std::getenv("HAS"), name) != nullptr; }}
#define __builtin_cpu_supports(name) Has(name)
#include "{NATIVE}/cpu.cc"
namespace antiphon {{ {tables} }}
int main() {{ std::puts(antiphon::ActiveKernels().name); }}"""
    program = compiled(source, tmp_path / "choice", f"-I{NATIVE}")
    avx2, avx512 = "avx2 fma f16c", "avx512f avx512bw avx512dq avx512vl avx512vnni"
    with_avx2 = "avxvnni" if has_avx_vnni() else "avx2"
    choices = {"": "portable", "avx2 fma": "portable", avx2: with_avx2, f"{avx2} {avx512}": "avx512"}
    for has, expected in choices.items():
        done = subprocess.run([program], env={"HAS": has}, capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n", has
