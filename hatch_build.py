"""Builds protobuf stubs and the native library, for the wheel, the editable install and `make stubs`.

Both are written beside their sources, where the checkout imports them from, and are never committed. Run as a
script it builds them in place. Knows nothing of the Makefile, and imports nothing of antiphon.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO_ROOT = Path("protos")
NATIVE_SOURCES = Path("model/ops/native")
NATIVE_LIBRARY = Path("model/ops/_native.so")
# Products and sums keep the order that is written: the same row gives the same bits in every kernel.
NATIVE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    # psABI: vectors never cross a file. Uninitialized: what GCC says of its own intrinsics.
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
# No -march=native: a wheel runs on machines other than its builder's. Each of these files is for one instruction set
# and is entered only where the processor has it (native/cpu.cc).
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
INSTRUCTION_SETS = {
    "kernels_avx2.cc": _AVX2,
    "kernels_avx512.cc": _AVX512,
    "kernels_amx.cc": (*_AVX512, "-mamx-tile", "-mamx-int8"),
}


class BuildError(Exception):
    """A generator or compiler is missing or failed; the message says which and what to do."""


class NativeBuildHook(BuildHookInterface[Any]):
    """Builds stubs and native library before hatchling collects the files of a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build in place; the native library makes the wheel one of this platform, for any Python 3."""
        if self.target_name != "wheel":
            return
        try:
            generate_stubs(Path(self.root))
            library = compile_native(Path(self.root))
        except BuildError as error:
            self.app.abort(f"antiphon: {error}")
        if library is not None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"


def generate_stubs(root: Path) -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their .pyi beside every .proto below protos/. Raises BuildError."""
    protos = sorted(path.relative_to(root / PROTO_ROOT) for path in (root / PROTO_ROOT).rglob("*.proto"))
    if not protos:
        return
    import grpc_tools

    command = [sys.executable, "-m", "grpc_tools.protoc"]
    command += [f"--proto_path={PROTO_ROOT}", f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}"]
    for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
        command.append(f"--plugin={plugin}={_environment_program(plugin)}")
    command += [f"--{name}_out={PROTO_ROOT}" for name in ("python", "grpc_python")]
    command += [f"--{name}_out=quiet:{PROTO_ROOT}" for name in ("mypy", "mypy_grpc")]
    _call([*command, *map(str, protos)], root, "protoc")


def compile_native(root: Path, library: Path = NATIVE_LIBRARY, flags: Sequence[str] = ()) -> Path | None:
    """Compile model/ops/native/*.cc into one library and return its path; None where there are no sources.

    library: where, from root. flags: more of them, sanitizers for instance. CXX chooses the compiler, CXXFLAGS adds
    to its flags. Raises BuildError.
    """
    sources = sorted((root / NATIVE_SOURCES).glob("*.cc"))
    if not sources:
        return None
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        name = compiler[0] if compiler else "CXX"
        raise BuildError(f"no C++ compiler: {name} is not there; install g++ or clang++, or set CXX")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        sources = [source for source in sources if source.name not in INSTRUCTION_SETS]
    extra = [*flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = list(pool.map(lambda source: _compile(source, compiler, extra, root, Path(objects)), sources))
        # A running server may have the old library mapped: write a new file and swap it in.
        unfinished = library.with_suffix(".so.new")
        _call([*compiler, "-shared", "-pthread", *extra, "-o", str(unfinished), *outputs], root, compiler[0])
    return (root / unfinished).replace(root / library)


def _compile(source: Path, compiler: Sequence[str], extra: Sequence[str], root: Path, objects: Path) -> str:
    target = str(objects / f"{source.stem}.o")
    flags = [*NATIVE_FLAGS, *INSTRUCTION_SETS.get(source.name, ()), *extra]
    _call([*compiler, *flags, "-c", "-o", target, str(source.relative_to(root))], root, compiler[0])
    return target


def _environment_program(name: str) -> str:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=search)
    if found is None:
        raise BuildError(f"{name} is not there; install mypy-protobuf")
    return found


def _call(command: Sequence[str], root: Path, name: str) -> None:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.stderr:
        print(done.stderr, end="", file=sys.stderr)
    if done.returncode:
        raise BuildError(f"{name} failed with exit status {done.returncode}")


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main() -> int:
    """Build in place; returns the exit status."""
    root = Path(__file__).resolve().parent
    try:
        generate_stubs(root)
        compile_native(root)
    except BuildError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
