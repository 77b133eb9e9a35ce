"""Compiles the stand-in for CUDA: the libraries that ONNX Runtime's CUDA provider needs, in one folder.

Every function that the provider imports and that the sources do not define becomes one that reports its name, so the
stand-in fits every version of the provider.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
_FILES = {
    "libcudart.so.13": ("core.c", "runtime.c"),
    "libcublas.so.13": ("blas.c",),
    "libcublasLt.so.13": ("blas_lt.c",),
    "libcurand.so.10": (),
    "libcuda.so.1": ("driver.c",),
}
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread")


def provider_library() -> Path:
    """Return the file of the installed CUDA provider."""
    found = importlib.util.find_spec("onnxruntime")
    assert found is not None, "onnxruntime-gpu is not installed"
    return Path(str(found.origin)).parent / "capi" / "libonnxruntime_providers_cuda.so"


LIBRARIES = tuple(_FILES)
"""Names of the libraries, each after those that it needs."""


def build(folder: Path) -> None:
    """Write the libraries into a folder."""
    imported = _imported_functions(provider_library())
    for library, sources in _FILES.items():
        defined = {name for source in sources for name in _functions(SOURCES / source)}
        _compile(folder, library, sources, sorted(imported.get(library, set()) - defined))


def _imported_functions(provider: Path) -> Mapping[str, set[str]]:
    """Return the functions that the provider imports from each library."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", str(provider)], check=True, capture_output=True, text=True
    ).stdout
    imported: dict[str, set[str]] = {}
    for name, library in re.findall(r" U (\w+)(?:@(libcu[\w.]+))?$", listing, re.MULTILINE):
        if library:
            imported.setdefault(library, set()).add(name)
        elif re.match(r"cu[A-Z]", name):
            imported.setdefault("libcuda.so.1", set()).add(name)
    return imported


def _functions(source: Path) -> set[str]:
    """Return the names of the functions that a source defines at the start of a line."""
    return set(re.findall(r"^(?!static)[\w* ]+?\b(\w+)\([^;]*?\{", source.read_text(), re.MULTILINE))


def _compile(folder: Path, library: str, sources: Sequence[str], missing: Sequence[str]) -> None:
    stubs = folder / f"{library}.c"
    lines = [f'int {name}(void) {{ return standin_missing("{name}"); }}' for name in missing]
    stubs.write_text("\n".join(["int standin_missing(const char*);", *lines, ""]))
    versions = folder / f"{library}.map"
    versions.write_text(f"{library} {{ global: *; }};\n")
    is_versioned = library not in ("libcuda.so.1", "libcurand.so.10")
    link = [f"-Wl,--version-script={versions}"] if is_versioned else []
    if library != "libcudart.so.13":
        link += [str(folder / "libcudart.so.13"), "-Wl,-rpath,$ORIGIN"]
    files = [str(SOURCES / source) for source in sources]
    command = ["cc", *_FLAGS, f"-I{SOURCES}", f"-Wl,-soname,{library}", "-o", str(folder / library), *files, str(stubs)]
    subprocess.run([*command, *link], check=True)
