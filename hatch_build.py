"""Builds protobuf stubs, the native library and the engine, for the wheel, the editable install and `make stubs`.

All are written beside their sources, where the checkout imports them from, and are never committed. Run as a
script it builds them in place; with the argument "engine" only the engine, which depends on the version of Python;
with "native" or "kernel-bench" and the path of a library only that library, the second is of the benchmark.
Knows nothing of the Makefile, and imports nothing of antiphon: another process writes the header of the nodes for GPUs.

Wheels for others (`make dist`) have three settings in the environment. ANTIPHON_PLATFORM is their platform, such as
manylinux_2_28_aarch64, for which CXX and CC compile. With ANTIPHON_ENGINE=source the engine is not compiled, and the
wheel is for every version of Python; with "compiled" it must be. ANTIPHON_PYTHON is the version of Python that it is
compiled for, such as 3.13, if it is another than the one that builds: -I in CFLAGS names its headers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Each holds a part of the namespace package `antiphon`; the wheel joins them.
SOURCE_ROOTS = (Path("protos"), Path("service"), Path("model"))
PROTO_ROOT = SOURCE_ROOTS[0]
NATIVE_SOURCES = (Path("model/antiphon/ops/native"), Path("model/antiphon/ops/cuda/native"))
NATIVE_LIBRARY = Path("model/antiphon/ops/_native.so")
# A library of its own, which `antiphon bench --section kernels` has built in a checkout: no part of the wheel.
KERNEL_BENCH_SOURCES = Path("service/antiphon/tools/bench/native")
# Products and sums keep the order that is written: the same row gives the same bits in every kernel.
NATIVE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    # psABI: vectors never cross a file. Uninitialized: what GCC says of its own intrinsics.
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "-Wno-unknown-warning-option",  # Clang lacks the last
)
# No -march=native: a wheel runs on machines other than its builder's. Each of these files is for one instruction set
# and is entered only where the processor has it (native/cpu.cc).
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
INSTRUCTION_SETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "kernels_avx2.cc": _AVX2,
        "kernels_avxvnni.cc": (*_AVX2, "-mavxvnni"),
        "kernels_avx512.cc": _AVX512,
        "kernels_amx.cc": (*_AVX512, "-mamx-tile", "-mamx-int8"),
    },
    "aarch64": {
        "kernels_dotprod.cc": ("-march=armv8.2-a+dotprod",),
        "kernels_i8mm.cc": ("-march=armv8.2-a+dotprod+i8mm",),
    },
}
# Modules that mypyc compiles: the interpreter otherwise takes half of the engine's time for small models. Where a
# module was not compiled, Python runs its source, with equal results.
ENGINE = SOURCE_ROOTS[1] / "antiphon" / "engine"
# The first copies objects through their __dict__, which compiled ones do not have; the second is a coroutine; the third
# has subclasses of the interpreter's classes, and sends objects that compiled classes could not be made of.
_NOT_COMPILED = (ENGINE / "logits_processors.py", ENGINE / "reader.py", ENGINE / "remote.py")
BUNDLES = SOURCE_ROOTS[2] / "antiphon" / "bundles"
RECIPES = SOURCE_ROOTS[2] / "antiphon" / "training" / "recipes"
# mypyc puts the code of all modules into one library, which each module's own file loads by this name.
_ENGINE_LIBRARY = "antiphon_engine"
_PLATFORM = os.environ.get("ANTIPHON_PLATFORM", "")
_OWN_PYTHON = sysconfig.get_python_version()
_PYTHON = os.environ.get("ANTIPHON_PYTHON") or _OWN_PYTHON
_PYTHON_DIGITS = _PYTHON.replace(".", "")
_HOST_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
# Names the version of Python: the results for several versions are kept beside each other.
_SUFFIX = _HOST_SUFFIX
if _PLATFORM or _PYTHON != _OWN_PYTHON:
    _SUFFIX = f".cpython-{_PYTHON_DIGITS}-{_PLATFORM.split('_', 3)[-1] or os.uname().machine}-linux-gnu.so"
# Run by another interpreter. Arguments: folder for results, name of the library, version of Python, modules. mypyc
# makes every warning of the C compiler an error. It writes C for the version of Python in sys.version_info, and has no
# option for another one; setuptools adds the folder of this Python's headers, which another version must not see.
_COMPILE_ENGINE = """
import collections, sys
from mypyc.build import mypycify
from setuptools import Distribution

folder, name, version, *paths = sys.argv[1:]
options = ["--config-file=", "--ignore-missing-imports", "--namespace-packages", "--explicit-package-bases"]
options += [f"--cache-dir={folder}/cache"]
own = sys.version_info
target = tuple(map(int, version.split(".")))
if target != own[:2]:
    fields = collections.namedtuple("version_info", "major minor micro releaselevel serial")
    sys.version_info = fields(*target, 0, "final", 0)
modules = mypycify([*options, *paths], opt_level="2", multi_file=True, group_name=name, target_dir=f"{folder}/c")
sys.version_info = own
build = Distribution({"name": "antiphon", "ext_modules": modules}).get_command_obj("build_ext")
build.build_lib, build.build_temp, build.parallel = f"{folder}/built", f"{folder}/objects", True
build.ensure_finalized()
if target != own[:2]:
    build.include_dirs = []
build.run()
"""


class BuildError(Exception):
    """A generator or compiler is missing or failed; the message says which and what to do."""


class NativeBuildHook(BuildHookInterface[Any]):
    """Builds stubs, native library and engine before hatchling collects the files of a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build in place. The wheel is one of this platform; of one version of Python if the engine is compiled."""
        if self.target_name != "wheel":
            return
        try:
            generate_stubs(Path(self.root))
            library = compile_native(Path(self.root))
            engine = compile_engine(Path(self.root))
        except BuildError as error:
            self.app.abort(f"antiphon: {error}")
        if library is not None or engine is not None:
            build_data["pure_python"] = False
            python = "py3-none" if engine is None else f"cp{_PYTHON_DIGITS}-cp{_PYTHON_DIGITS}"
            build_data["tag"] = f"{python}-{_platform_tag()}"
        # An editable install finds the library in the checkout; a copy beside it would hide later builds.
        if engine is not None and version != "editable":
            build_data["artifacts"].append(f"/{ENGINE}/**/*{_SUFFIX}")
            build_data["force_include"][str(engine)] = engine.name
        if version != "editable":
            self._folder = tempfile.TemporaryDirectory()
            path = Path(self._folder.name) / "antiphon.cdx.json"
            bill = self._bill_of_materials(has_engine=engine is not None)
            path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
            build_data["sbom_files"].append(str(path))

    def _bill_of_materials(self, *, has_engine: bool) -> dict[str, Any]:
        """Return what the wheel contains of others and its models, in CycloneDX (PEP 770).

        Without serial number and time, so that two builds give the same bytes.
        """
        core = self.metadata.core
        components = [_library(**part) for part in self.config["vendored"]]
        if has_engine:
            mypyc = importlib.metadata.version("mypy")
            components.append(_library("mypyc", mypyc, "MIT AND PSF-2.0", f"pkg:pypi/mypy@{mypyc}"))
        name, version = core.name, self.metadata.version
        return {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": _library(name, version, core.license_expression, f"pkg:pypi/{name}@{version}")},
            "components": components + _models(Path(self.root)),
        }


def _library(name: str, version: str, licence: str, purl: str) -> dict[str, Any]:
    """Return a CycloneDX component."""
    return {"type": "library", "name": name, "version": version, "licenses": [{"expression": licence}], "purl": purl}


def _models(root: Path) -> list[dict[str, Any]]:
    """Return the bundles as CycloneDX components, derived from the collections of sentence pairs of their recipes."""
    models = []
    for path in sorted((root / BUNDLES).glob("*/manifest.json")):
        manifest = json.loads(path.read_bytes())
        data = _data_of_recipe(root, manifest["provenance"]["recipe"])
        if "reverse_of" in data:
            data = _data_of_recipe(root, data["reverse_of"])
        ancestors = [
            {
                "type": "data",
                "name": collection["name"],
                "description": collection["origin"],
                "licenses": [{"license": {"name": collection["licence"]}}],
                "copyright": collection["attribution"],
            }
            for collection in data["collections"]
        ]
        model = {"type": "machine-learning-model", "name": manifest["name"], "bom-ref": manifest["name"]}
        models.append({**model, "pedigree": {"ancestors": ancestors}})
    return models


def _data_of_recipe(root: Path, name: str) -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads((root / RECIPES / f"{name}.toml").read_text(encoding="utf-8"))["data"]
    return data


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
    """Compile the sources into one library and return its path; None where there are none.

    library: where, from root. flags: more of them, sanitizers for instance. CXX chooses the compiler, CXXFLAGS adds
    to its flags. Raises BuildError.
    """
    sources = sorted(path for folder in NATIVE_SOURCES for path in (root / folder).glob("*.cc"))
    if not sources:
        return None
    own = _instruction_sets()
    foreign = {name for names in INSTRUCTION_SETS.values() for name in names} - set(own)
    jobs = {source.stem: (source, own.get(source.name, ())) for source in sources if source.name not in foreign}
    return _compile_library(root, library, jobs, flags, generates=True)


def compile_kernel_bench(root: Path, library: Path) -> Path:
    """Compile the runs of single kernels for the benchmark, unless the library is newer than all sources.

    Their bare loops are compiled once for each instruction set, under the name of its kernels. Raises BuildError.
    """
    folders = (KERNEL_BENCH_SOURCES, NATIVE_SOURCES[0])
    sources = [path for folder in folders for path in (root / folder).iterdir()]
    if library.exists() and all(path.stat().st_mtime < library.stat().st_mtime for path in (*sources, Path(__file__))):
        return library
    loops = root / KERNEL_BENCH_SOURCES / "bare_loops.cc"
    jobs: dict[str, tuple[Path, Sequence[str]]] = {"kernel_runs": (root / KERNEL_BENCH_SOURCES / "kernel_runs.cc", ())}
    for name, options in ({"kernels_portable.cc": ()} | _instruction_sets()).items():
        kernels = name.removeprefix("kernels_").removesuffix(".cc")
        jobs[kernels] = (loops, (f"-DANTIPHON_LOOPS={kernels}", *options))
    library.parent.mkdir(parents=True, exist_ok=True)
    return _compile_library(root, library, jobs, [f"-I{NATIVE_SOURCES[0]}"], generates=False)


def _instruction_sets() -> dict[str, tuple[str, ...]]:
    """Return the files of instruction sets, and their flags, of the processor that the compiler compiles for."""
    target = _call([*_compiler(), "-dumpmachine"], Path(), "the C++ compiler").strip().split("-")[0]
    return dict(INSTRUCTION_SETS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(target, target), {}))


def _compiler() -> list[str]:
    """Return the words of CXX. Raises BuildError."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        name = compiler[0] if compiler else "CXX"
        raise BuildError(f"no C++ compiler: {name} is not there; install g++ or clang++, or set CXX")
    return compiler


def _compile_library(
    root: Path, library: Path, jobs: Mapping[str, tuple[Path, Sequence[str]]], flags: Sequence[str], *, generates: bool
) -> Path:
    """Compile and link sources with their own flags, by name of the object; return the library.

    generates: the sources include the header of the nodes for GPUs.
    """
    compiler = _compiler()
    extra = [*flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    if _PLATFORM and generates:
        extra += ["-include", str(NATIVE_SOURCES[0] / "old_glibc.h")]
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        if generates:
            extra += _cuda_nodes(root, Path(objects))
        outputs = [str(Path(objects) / f"{name}.o") for name in jobs]
        commands = (
            [*compiler, *NATIVE_FLAGS, *options, *extra, "-c", "-o", output, str(source.relative_to(root))]
            for output, (source, options) in zip(outputs, jobs.values(), strict=True)
        )
        list(pool.map(lambda command: _call(command, root, compiler[0]), commands))
        # A running server may have the old library mapped: write a new file and swap it in.
        unfinished = library.with_suffix(f".{os.getpid()}.new")
        # Before glibc 2.34 these were libraries of their own.
        libraries = ("-s", "-Wl,--no-as-needed", "-lpthread", "-ldl", "-lm") if _PLATFORM else ()
        linked = [*compiler, "-shared", "-pthread", *extra, "-o", str(unfinished), *outputs, *libraries]
        _call(linked, root, compiler[0])
    return (root / unfinished).replace(root / library)


def compile_engine(root: Path) -> Path | None:
    """Compile the engine's modules for one Python in place, and return the library that they share.

    Does nothing if nothing has changed. If mypyc, the headers of Python or a C compiler that takes the result are
    missing, removes earlier results, prints what is missing and returns None; if the engine must be compiled, raises
    BuildError.
    """
    wanted = os.environ.get("ANTIPHON_ENGINE")
    sources = [] if wanted == "source" else engine_sources(root)
    library = root / SOURCE_ROOTS[1] / f"{_ENGINE_LIBRARY}__mypyc{_SUFFIX}"
    if not sources or _is_compiled(sources, library, root):
        return library if sources else None
    for old in (*(root / ENGINE).rglob(f"*{_SUFFIX}"), *library.parent.glob(f"{_ENGINE_LIBRARY}*{_SUFFIX}")):
        old.unlink()
    try:
        _require_for_engine()
        with tempfile.TemporaryDirectory() as folder:
            _run_mypyc(sources, root, Path(folder))
            built = Path(folder) / "built"
            for path in (built / "antiphon").rglob("*.so"):
                shutil.copy(path, _renamed(library.parent / path.relative_to(built)))
            (shared,) = built.glob(f"{_ENGINE_LIBRARY}*.so")
            shutil.copy(shared, library)  # last: it shows that all others are there
    except BuildError as error:
        if wanted == "compiled":
            raise
        print(f"antiphon: the engine is not compiled and costs more CPU time: {error}", file=sys.stderr)
        return None
    return library


def engine_sources(root: Path) -> list[Path]:
    """Return the modules that `compile_engine` compiles."""
    left_out = {root / path for path in _NOT_COMPILED}
    modules = (path for path in sorted((root / ENGINE).rglob("*.py")) if path.name != "__init__.py")
    return [path for path in modules if left_out.isdisjoint((path, *path.parents))]


def _is_compiled(sources: Sequence[Path], library: Path, root: Path) -> bool:
    """Return whether the library is newer than all sources, and no module is left of a source that was removed."""
    if not library.exists() or {_module(path) for path in sources} != set((root / ENGINE).rglob(f"*{_SUFFIX}")):
        return False
    return all(path.stat().st_mtime < library.stat().st_mtime for path in (*sources, Path(__file__)))


def _renamed(path: Path) -> Path:
    """Return the name for the processor and the Python of the wheel; mypyc takes those that build."""
    return path.with_name(path.name.removesuffix(_HOST_SUFFIX) + _SUFFIX)


def _module(source: Path) -> Path:
    return source.with_name(source.stem + _SUFFIX)


def _run_mypyc(sources: Sequence[Path], root: Path, folder: Path) -> None:
    """Compile into folder/built."""
    environment = os.environ | {"MYPYPATH": os.pathsep.join(str((root / path).resolve()) for path in SOURCE_ROOTS)}
    names = [str(path.resolve()) for path in sources]
    if _PLATFORM:  # the library names its sources, in tracebacks and assertions: not by folders of this machine
        names = [str(path.relative_to(root)) for path in sources]
        given = shlex.split(environment.get("CFLAGS", ""))
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("include"), str(folder)]
        places += [flag[2:] for flag in given if flag.startswith("-I")]
        environment["CFLAGS"] = shlex.join([*given, *(f"-ffile-prefix-map={place}=." for place in places)])
    command = [sys.executable, "-c", _COMPILE_ENGINE, str(folder), _ENGINE_LIBRARY, _PYTHON, *names]
    _call(command, root, "mypyc", environment)


def _require_for_engine() -> None:
    """Raise BuildError if mypyc, or something that it needs, is missing."""
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        raise BuildError("install mypy and setuptools")
    if _PYTHON == _OWN_PYTHON and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise BuildError("no Python.h; install python3-dev, or the headers of this Python")


def _cuda_nodes(root: Path, folder: Path) -> list[str]:
    """Write cuda_nodes.h from the declarations of the nodes for GPUs; return the flags by which sources find it."""
    command = [sys.executable, "-m", "antiphon.ops.cuda.node_header", str(folder / "cuda_nodes.h")]
    _call(command, root, "node_header", os.environ | {"PYTHONPATH": str(root / SOURCE_ROOTS[2])})
    return [f"-I{folder}", f"-I{NATIVE_SOURCES[1]}"]


def _environment_program(name: str) -> str:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=search)
    if found is None:
        raise BuildError(f"{name} is not there; install mypy-protobuf")
    return found


def _call(command: Sequence[str], root: Path, name: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a program in root and return its output. Raises BuildError."""
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.stderr:
        print(done.stderr, end="", file=sys.stderr)
    if done.returncode:
        print(done.stdout, end="", file=sys.stderr)
        raise BuildError(f"{name} failed with exit status {done.returncode}")
    return done.stdout


def _platform_tag() -> str:
    return _PLATFORM or sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main() -> int:
    """Build in place; returns the exit status."""
    root = Path(__file__).resolve().parent
    try:
        if sys.argv[1:2] == ["kernel-bench"]:
            compile_kernel_bench(root, Path(sys.argv[2]))
            return 0
        if sys.argv[1:2] == ["native"]:
            compile_native(root, Path(sys.argv[2]))
            return 0
        if sys.argv[1:] != ["engine"]:
            generate_stubs(root)
            compile_native(root)
        compile_engine(root)
    except BuildError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
