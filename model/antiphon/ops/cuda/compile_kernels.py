"""Compile the kernels ahead of time, and refuse those over their budget. Needs Triton, but no card and no driver.

The file of an architecture starts with a text header: a line `antiphon-kernels VERSION ARCHITECTURE COUNT`, a line for
each variant `NAME WARPS SHARED_BYTES OFFSET SIZE PARAMETER...` with parameters as `name:kind` (p address, i int32, a
int32 that is a multiple of 16, f float32), and an empty line. The images follow; OFFSET counts from the end of the
header. The launcher refuses a kernel with other parameters than its own operators have.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.errors import BudgetError
from antiphon.ops.cuda import ARCHITECTURES, FOLDER, library_name
from antiphon.ops.cuda.nodes import ELEMENT_TYPES, NODES, Variant, variants

VERSION = 2
"""Version of the file."""
SHARED_LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory that one program can use, in bytes, by architecture (CUDA programming guide, table of capabilities)."""
_WARP = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One compiled variant. shared_bytes: dynamic shared memory of a launch."""

    variant: Variant
    code: bytes
    num_warps: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceUsage:
    """Resources of one thread (registers; stack and local memory in bytes), and of one program (shared, in bytes).

    Local memory is where registers are spilled to.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def compile_variant(variant: Variant, architecture: int) -> Image:
    """Compile one variant. Raises BudgetError, or an error of Triton where it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"antiphon.ops.cuda.kernels.{variant.kernel.module}")
    source = ASTSource(
        fn=getattr(module, variant.kernel.name),
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=_alignments(variant),
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, _WARP), options=options)
    metadata: Any = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise BudgetError(f"{variant.name} needs scratch memory, which the launcher does not give")
    check_budget(variant.name, usage_of(compiled.asm["cubin"], metadata.shared), architecture)
    return Image(
        variant=variant, code=compiled.asm["cubin"], num_warps=metadata.num_warps, shared_bytes=metadata.shared
    )


def _alignments(variant: Variant) -> dict[tuple[int], list[list[Any]]]:
    """Return the compiler's attributes for the parameters that are multiples of 16, by index."""
    aligned = (index for index, parameter in enumerate(variant.parameters) if parameter.is_aligned)
    return {(index,): [["tt.divisibility", 16]] for index in aligned}


def usage_of(code: bytes, dynamic_shared_bytes: int) -> ResourceUsage:
    """Return the resources of a cubin. Raises CalledProcessError if it is none."""
    report = _cuobjdump("--dump-resource-usage", code)
    fields = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    return ResourceUsage(
        registers=fields["REG"],
        stack_bytes=fields["STACK"],
        local_bytes=fields["LOCAL"],
        shared_bytes=fields["SHARED"] + dynamic_shared_bytes,
    )


def instructions_of(code: bytes) -> list[str]:
    """Return the names of a cubin's instructions in their order, with their modifiers: `LDG.E.128.CONSTANT`."""
    listing = _cuobjdump("--dump-sass", code)
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE)


def check_budget(name: str, usage: ResourceUsage, architecture: int) -> None:
    """Raise BudgetError if a kernel spills registers, or needs more shared memory than the architecture has."""
    if usage.local_bytes or usage.stack_bytes:
        raise BudgetError(
            f"{name} for sm_{architecture} uses {usage.local_bytes} bytes of local memory and {usage.stack_bytes} of"
            " stack; both must be 0"
        )
    if usage.shared_bytes > SHARED_LIMITS[architecture]:
        raise BudgetError(
            f"{name} for sm_{architecture} uses {usage.shared_bytes} bytes of shared memory; the limit is"
            f" {SHARED_LIMITS[architecture]}"
        )


def write_library(path: Path, architecture: int, images: Sequence[Image]) -> None:
    """Write images to a file."""
    lines, offset = [f"antiphon-kernels {VERSION} {architecture} {len(images)}"], 0
    for image in images:
        parameters = image.variant.node.signature(image.variant.kernel)
        sizes = f"{image.num_warps} {image.shared_bytes} {offset} {len(image.code)}"
        lines.append(f"{image.variant.name} {sizes} {parameters}")
        offset += len(image.code)
    header = "\n".join([*lines, "", ""]).encode("ascii")
    path.write_bytes(header + b"".join(image.code for image in images))


def read_library(path: Path) -> list[Image]:
    """Read the images of a file that this version wrote."""
    header, _, images = path.read_bytes().partition(b"\n\n")
    by_name = {variant.name: variant for variant in variants()}
    read = []
    for line in header.decode("ascii").splitlines()[1:]:
        name, num_warps, shared_bytes, offset, size, *_ = line.split()
        code = images[int(offset) : int(offset) + int(size)]
        read.append(Image(variant=by_name[name], code=code, num_warps=int(num_warps), shared_bytes=int(shared_bytes)))
    return read


def _cuobjdump(option: str, code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(_program("cuobjdump")), option, file.name]
        # cuobjdump looks for nvdisasm on the path.
        environment = {"PATH": str(_program("nvdisasm").parent)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@cache
def _program(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _compile_named(name: str, architecture: int) -> Image:
    """Compile in a process of the pool: a variant itself cannot be sent there."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    return compile_variant(next(variant for variant in variants() if variant.name == name), architecture)


def _chosen(args: argparse.Namespace) -> list[str]:
    """Return the names of the variants that the command line asks for."""
    return [
        variant.name
        for variant in variants()
        if variant.kernel.name in args.kernel and variant.element_type in args.element_type
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the command line asks for; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = [kernel.name for node in NODES for kernel in node.kernels]
    parser.add_argument("--architecture", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--kernel", nargs="+", choices=names, default=names)
    parser.add_argument("--element-type", nargs="+", choices=ELEMENT_TYPES, default=list(ELEMENT_TYPES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = _chosen(args)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for architecture in args.architecture:
            images = list(pool.map(_compile_named, chosen, [architecture] * len(chosen)))
            path = args.folder / library_name(architecture)
            write_library(path, architecture, images)
            print(f"{path}: {len(images)} kernels, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
