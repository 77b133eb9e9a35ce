"""File of the compiled kernels of one architecture. Knows neither Triton nor CUDA.

The file starts with a text header: a line `antiphon-kernels VERSION ARCHITECTURE COUNT`, a line for each variant
`NAME WARPS SHARED_BYTES OFFSET SIZE PARAMETER...` with parameters as `name:kind` (p address, i int32, a int32 that is a
multiple of 16, f float32), and an empty line. The images follow; OFFSET counts from the end of the header. The launcher
refuses a kernel with other parameters than its own operators have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.ops.cuda.kernel_list import Parameter, Variant, variants

VERSION = 2
FOLDER = Path(__file__).with_name("compiled")
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


def write_library(path: Path, architecture: int, images: Sequence[Image]) -> None:
    """Write images to a file."""
    lines, offset = [f"antiphon-kernels {VERSION} {architecture} {len(images)}"], 0
    for image in images:
        parameters = " ".join(f"{given.name}:{kind_of(given)}" for given in image.variant.kernel.parameters)
        sizes = f"{image.num_warps} {image.shared_bytes} {offset} {len(image.code)}"
        lines.append(f"{image.variant.name} {sizes} {parameters}")
        offset += len(image.code)
    header = "\n".join([*lines, "", ""]).encode("ascii")
    path.write_bytes(header + b"".join(image.code for image in images))


def read_library(path: Path) -> list[Image]:
    """Read the images of a file that this version wrote."""
    header, _, images = path.read_bytes().partition(b"\n\n")
    by_name = {variant.name: variant for variant in variants()}
    found = []
    for line in header.decode("ascii").splitlines()[1:]:
        name, num_warps, shared_bytes, offset, size, *_ = line.split()
        code = images[int(offset) : int(offset) + int(size)]
        found.append(Image(variant=by_name[name], code=code, num_warps=int(num_warps), shared_bytes=int(shared_bytes)))
    return found


def kind_of(given: Parameter) -> str:
    """Return the letter of a parameter's kind in the header."""
    if given.is_pointer:
        return "p"
    return "a" if given.is_aligned else _KINDS[given.type]
