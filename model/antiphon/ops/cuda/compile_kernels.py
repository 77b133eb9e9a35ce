"""Compile the kernels ahead of time, and refuse those over their budget. Needs Triton, but no card and no driver."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from antiphon.errors import BudgetError
from antiphon.ops.cuda.kernel_list import ARCHITECTURES, ELEMENT_TYPES, KERNELS, Kernel, Variant, variants
from antiphon.ops.cuda.library_file import FOLDER, Image, library_name, write_library
from antiphon.ops.cuda.resource_usage import check_budget, usage_of

_WARP = 32


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
        attrs=_alignments(variant.kernel),
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


def _alignments(kernel: Kernel) -> dict[tuple[int], list[list[Any]]]:
    """Return the compiler's attributes for the parameters that are multiples of 16, by index."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, given in enumerate(kernel.parameters)
        if given.is_pointer or given.is_aligned
    }


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
    names = [kernel.name for kernel in KERNELS]
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
