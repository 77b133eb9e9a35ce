"""Compile the kernels ahead of time: one library file for each architecture. Needs Triton, but no card and no driver.

A library file starts with a text header: a line `antiphon-kernels VERSION ARCHITECTURE COUNT`, a line for each variant
`NAME WARPS SHARED_BYTES OFFSET SIZE PARAMETER...` with parameters as `name:kind` (p pointer, i int32, f float32), and
an empty line. The images follow; OFFSET counts from the end of the header. The launcher passes arguments by these names.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.model.ops.cuda.kernel_list import ARCHITECTURES, KERNELS, Kernel, Parameter, Variant, variants

LIBRARY_VERSION = 1
FOLDER = Path(__file__).with_name("compiled")
_WARP = 32
_KINDS = {"i32": "i", "fp32": "f"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One compiled variant. shared_bytes: dynamic shared memory of a launch."""

    variant: Variant
    code: bytes
    num_warps: int
    shared_bytes: int


def library_name(architecture: int) -> str:
    """Return the name of an architecture's file."""
    return f"kernels.sm_{architecture}.bin"


def compile_variant(variant: Variant, architecture: int) -> Image:
    """Compile one variant. Raises an error of Triton where it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"antiphon.model.ops.cuda.kernels.{variant.kernel.module}")
    source = ASTSource(
        fn=getattr(module, variant.kernel.name),
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=_alignments(variant.kernel),
    )
    options = {"num_warps": variant.num_warps, "num_stages": 2, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, _WARP), options=options)
    metadata: Any = compiled.metadata
    return Image(
        variant=variant,
        code=compiled.asm["cubin"],
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
    )


def _alignments(kernel: Kernel) -> dict[tuple[int], list[list[Any]]]:
    """Return the parameters that are multiples of 16, as the compiler wants to be told."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, given in enumerate(kernel.parameters)
        if given.is_pointer or given.is_aligned
    }


def write_library(path: Path, architecture: int, images: Sequence[Image]) -> None:
    """Write images to a library file."""
    lines, offset = [f"antiphon-kernels {LIBRARY_VERSION} {architecture} {len(images)}"], 0
    for image in images:
        parameters = " ".join(f"{given.name}:{kind_of(given)}" for given in image.variant.kernel.parameters)
        sizes = f"{image.num_warps} {image.shared_bytes} {offset} {len(image.code)}"
        lines.append(f"{image.variant.name} {sizes} {parameters}")
        offset += len(image.code)
    header = "\n".join([*lines, "", ""]).encode("ascii")
    path.write_bytes(header + b"".join(image.code for image in images))


def kind_of(given: Parameter) -> str:
    """Return the letter of a parameter's kind in the header."""
    return "p" if given.is_pointer else _KINDS[given.type]


def _compile_at(work: tuple[int, str]) -> Image:
    architecture, name = work
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    return compile_variant(_by_name()[name], architecture)


def _by_name() -> Mapping[str, Variant]:
    return {variant.name: variant for variant in variants()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile every variant for the architectures of the command line; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--kernel", nargs="+", choices=[kernel.name for kernel in KERNELS], help="default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default: beside the code)")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    names = [each.name for each in variants() if args.kernel is None or each.kernel.name in args.kernel]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for architecture in args.architecture:
            images = list(pool.map(_compile_at, [(architecture, name) for name in names]))
            path = args.folder / library_name(architecture)
            write_library(path, architecture, images)
            print(f"{path}: {len(images)} kernels, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
