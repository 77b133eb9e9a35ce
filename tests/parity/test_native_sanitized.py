"""Random calls of every native operator, and random steps of beam searches, with AddressSanitizer and
UndefinedBehaviorSanitizer.

ANTIPHON_SANITIZE_ROUNDS is the number of calls of each operator with each instruction set of this processor; `make
sanitize` makes many. Leaks are not checked, because Python and ONNX Runtime keep memory until the process ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hatch_build import compile_native
from tests.operators import NODES

pytestmark = pytest.mark.hardship

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("ANTIPHON_SANITIZE_ROUNDS", "24"))
# Without checks of variables after their scope, and at -O1: the inlined scopes of the kernels would take the compiler
# five times as long, and -O2 takes it 100 s more. Memory is checked by calls, which find the same as inlined checks and
# save the compiler a seventh of its time.
FLAGS = (
    "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
    "-fno-sanitize-address-use-after-scope", "--param", "asan-instrumentation-with-call-threshold=0",
)  # fmt: skip


def runtime(name: str) -> str:
    """Return the path of a library of the compiler."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not Path(path := done.stdout.strip()).is_absolute():
        pytest.skip(f"the C++ compiler has no {name}")
    return path


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment that loads the sanitizers' runtime first: Python was not built for sanitizers.

    The C++ library comes with it, because the runtime must find exceptions in it before ONNX Runtime throws one.
    """
    return {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def library(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = compile_native(ROOT, tmp_path_factory.mktemp("sanitized") / "_native.so", FLAGS)
    assert built is not None
    return built


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kernels", ["portable", "avx2", "avxvnni", "avx512", "amx", "dotprod", "i8mm"])
def test_random_calls_read_and_write_only_valid_memory(
    library: Path, environment: dict[str, str], kernels: str
) -> None:
    chosen = {**environment, "ANTIPHON_CPU": kernels}
    done = run(chosen, "-m", "tests.parity.native_fuzz", str(library), f"--rounds={ROUNDS}")
    if "which this processor lacks" in done.stderr or "must be one of" in done.stderr:
        pytest.skip(f"this processor has no {kernels}")
    last = "".join(done.stdout.splitlines(keepends=True)[-1:])
    assert done.returncode == 0, f"{last}{done.stderr[:6000]}"
    assert not done.stderr
    assert last == f"seed 0: {list(NODES)[-1]} {ROUNDS - 1}\n"


def test_steps_of_beam_searches_read_and_write_only_valid_memory(library: Path, environment: dict[str, str]) -> None:
    done = run(environment, "-m", "tests.parity.beam_steps", str(library), f"--rounds={ROUNDS}")
    assert done.returncode == 0, done.stderr[:6000]
    assert not done.stderr


def test_sanitizer_detects_a_write_behind_an_array(library: Path, environment: dict[str, str]) -> None:
    """The sanitizer is in effect: it reports that the library writes seven counters into the space of one."""
    careless = f"""
import ctypes, numpy
room = numpy.zeros(1, numpy.uint64)
ctypes.CDLL({str(library)!r}).antiphon_workspace_stats(None, ctypes.c_void_p(room.ctypes.data))
"""
    done = run(environment, "-c", careless)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


def test_protected_page_detects_a_read_behind_an_array(environment: dict[str, str]) -> None:
    careless = """
import ctypes, numpy
from tests.parity.native_fuzz import at_end_of_page
array = at_end_of_page(numpy.arange(5, dtype=numpy.int32))
assert array.tolist() == [0, 1, 2, 3, 4]
ctypes.string_at(array.ctypes.data + array.nbytes, 1)
"""
    done = run(environment, "-c", careless)
    assert done.returncode != 0
    assert "AddressSanitizer: SEGV" in done.stderr
