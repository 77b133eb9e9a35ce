"""Section `kernels`: rates of products and attention on one core, beside the bare rate of the same instruction.

Kernels are called directly, in one thread (kernel_runs.py): without ONNX Runtime, tasks and allocation of outputs. A
product includes the quantisation of its rows; the end of a step is the product over the vocabulary and the likeliest
token of each row. The bare rate is that of a loop on registers; portable kernels have none, since they have no
instruction of their own. One row of a product is also compared with a loop that only reads as many bytes. Measurements
of the two sides alternate, and each is the fastest of several short ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from antiphon.tools.bench.kernel_runs import (
    PORTABLE,
    AttentionShape,
    KernelRun,
    ProductShape,
    active_kernels,
    bare_run,
    packed_attention_run,
    paged_attention_run,
    product_run,
    read_run,
    sample_run,
)
from antiphon.tools.bench.report import Case, Finding
from antiphon.tools.bench.setup import Setup

ROWS = (1, 8, 32, 64)
# Inputs and outputs of the products of a decoder layer.
PRODUCTS = {
    "en-de": ((256, 768), (256, 256), (256, 1024), (1024, 256)),
    "base": ((512, 1536), (512, 512), (512, 2048), (2048, 512)),
}
# The same of the product over the vocabulary.
VOCABULARIES = {"en-de": (256, 8000), "base": (512, 32000)}
# Heads and their width.
HEADS = {"en-de": (8, 32), "base": (8, 64)}
PACKED_LEN = 30
SELF_LEN, CROSS_LEN = 64, 30

# Shortest measurement, long enough for the clock. The fastest of several was probably not interrupted by other work.
LEAST_S, TIMES = 0.001, 5
PRODUCTS_UNIT, READING_UNIT = "G multiply-adds/s", "GB/s of weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One measured kernel. make: returns its run by the name of the kernels.

    bits: of a weight; 32 for attention, which multiplies float32. weight_bytes: size of the weight of a product.
    """

    case: str
    rows: int
    make: Callable[[str], KernelRun]
    bits: Literal[4, 8, 32]
    weight_bytes: int | None = None


def kernels(setup: Setup) -> list[Finding]:
    """Measure every product and attention at every number of rows."""
    name, rows = active_kernels(), setup.rows or ROWS
    return [finding for kernel in kernels_of(rows) for finding in _measure(kernel, name, setup.repeat)]


def kernels_of(rows: Sequence[int]) -> Iterator[Kernel]:
    """Return all kernels that the section measures."""
    for count in rows:
        for model, shapes in PRODUCTS.items():
            for inputs, outputs in shapes:
                yield from _products(model, ProductShape(count, inputs, outputs))
        for model, (inputs, outputs) in VOCABULARIES.items():
            yield _end_of_step(model, ProductShape(count, inputs, outputs))
        for model, heads in HEADS.items():
            packed = AttentionShape(count, PACKED_LEN, *heads)
            yield Kernel(
                case=f"{model}, packed attention, {PACKED_LEN} tokens",
                rows=count,
                make=partial(packed_attention_run, shape=packed),
                bits=32,
            )
            yield from _paged(model, "self", AttentionShape(count, SELF_LEN, *heads), appends=True)
            yield from _paged(model, "cross", AttentionShape(count, CROSS_LEN, *heads), appends=False)


def _products(model: str, shape: ProductShape) -> Iterator[Kernel]:
    widths: tuple[Literal[8, 4], ...] = (8, 4)
    for bits in widths:
        yield Kernel(
            case=f"{model}, int{bits} linear, {shape.inputs} x {shape.outputs}",
            rows=shape.rows,
            make=partial(product_run, shape=shape, bits=bits),
            bits=bits,
            weight_bytes=shape.inputs * shape.outputs * bits // 8,
        )


def _end_of_step(model: str, shape: ProductShape) -> Kernel:
    return Kernel(
        case=f"{model}, end of step, int8 {shape.inputs} x {shape.outputs}",
        rows=shape.rows,
        make=partial(sample_run, shape=shape),
        bits=8,
        weight_bytes=shape.inputs * shape.outputs,
    )


def _paged(model: str, kind: str, shape: AttentionShape, *, appends: bool) -> Iterator[Kernel]:
    for cache, is_half in (("float16", True), ("float32", False)):
        yield Kernel(
            case=f"{model}, paged {kind} attention, {shape.length} tokens, {cache}",
            rows=shape.rows,
            make=partial(paged_attention_run, shape=shape, is_half=is_half, appends=appends),
            bits=32,
        )


def _measure(kernel: Kernel, name: str, repeat: int) -> list[Finding]:
    """Return the rate of a kernel and, for one row of a product, the rate at which it reads its weight."""
    with kernel.make(name) as run:
        findings = [_alone(kernel, run, repeat) if name == PORTABLE else _beside_bare(kernel, run, name, repeat)]
        if kernel.rows == 1 and kernel.weight_bytes is not None:
            findings.append(_beside_reading(kernel, run, name, repeat))
    return findings


def _alone(kernel: Kernel, run: KernelRun, repeat: int) -> Finding:
    rate = statistics.median(_giga(run, run.work) for _ in range(repeat))
    return Finding(name="kernels", case=kernel.case, rows=kernel.rows, antiphon=round(rate, 3), unit=PRODUCTS_UNIT)


def _beside_bare(kernel: Kernel, run: KernelRun, name: str, repeat: int) -> Finding:
    with bare_run(name, bits=kernel.bits) as bare:
        pairs = [(_giga(run, run.work), _giga(bare, bare.work)) for _ in range(repeat)]
    case = Case(name="kernels", case=kernel.case, rows=kernel.rows, against=f"bare loop, {name}, one core")
    return case.finding(pairs, PRODUCTS_UNIT, digits=3)


def _beside_reading(kernel: Kernel, run: KernelRun, name: str, repeat: int) -> Finding:
    assert kernel.weight_bytes is not None
    with read_run(name, kernel.weight_bytes) as read:
        pairs = [(_giga(run, kernel.weight_bytes), _giga(read, read.work)) for _ in range(repeat)]
    case = Case(name="kernels", case=kernel.case, rows=kernel.rows, against=f"reading only, {name}, one core")
    return case.finding(pairs, READING_UNIT, digits=3)


def _giga(run: KernelRun, work: float) -> float:
    """Return billions of units of work a second."""
    return work / min(run.seconds(LEAST_S) for _ in range(TIMES)) / 1e9
