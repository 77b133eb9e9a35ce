"""Kernels compiled for every architecture: their resources and instructions, as the compiler's own tools report them.

`make kernels` compiles all element types and checks the same budgets; here it is the type that is served by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from antiphon.errors import BudgetError
from antiphon.ops.cuda import ARCHITECTURES, library_name
from antiphon.ops.cuda.compile_kernels import (
    Image,
    ResourceUsage,
    check_budget,
    instructions_of,
    read_library,
    usage_of,
)
from antiphon.ops.cuda.nodes import NODES, variants

# Registers of a thread that leave room for two programs of four warps beside each other where memory is the limit.
MEMORY_BOUND_REGISTERS = 128

Compiled = Mapping[int, Mapping[str, Image]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compile bfloat16 kernels, in a process of its own: here Triton interprets."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-m", "antiphon.ops.cuda.compile_kernels", "--element-type", "bfloat16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([*command, "--folder", str(folder)], check=True, env=environment)
    return {
        architecture: {image.variant.name: image for image in read_library(folder / library_name(architecture))}
        for architecture in ARCHITECTURES
    }


def test_every_variant_is_compiled_for_every_architecture(compiled: Compiled) -> None:
    expected = {variant.name for variant in variants() if variant.element_type == "bfloat16"}
    assert all(set(images) == expected for images in compiled.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_their_budgets(compiled: Compiled, architecture: int) -> None:
    for name, image in compiled[architecture].items():
        usage = usage_of(image.code, image.shared_bytes)
        check_budget(name, usage, architecture)
        if image.variant.kernel.name != "packed_attention":
            assert usage.registers <= MEMORY_BOUND_REGISTERS, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_attention_multiplies_on_tensor_cores(compiled: Compiled, architecture: int) -> None:
    for name, image in compiled[architecture].items():
        if image.variant.kernel.name == "packed_attention":
            products = [one for one in instructions_of(image.code) if one.startswith(("HMMA", "HGMMA"))]
            assert products, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [
        "embed", "add_norm", "activate", "gated_sum", "ssru", "paged_average", "pick", "paged_write",
        "paged_attention.64", "paged_attention.128",
    ],
)  # fmt: skip
def test_kernels_load_16_bytes_at_once(compiled: Compiled, architecture: int, name: str) -> None:
    kernel, _, width = name.partition(".")
    image = compiled[architecture][".".join(filter(None, (kernel, "bfloat16", width)))]
    assert any(one.startswith("LDG.E.128") for one in instructions_of(image.code))


def test_a_library_file_returns_what_was_written(compiled: Compiled) -> None:
    for images in compiled.values():
        assert {image.variant.kernel.name for image in images.values()} == {
            kernel.name for node in NODES for kernel in node.kernels
        }
        assert all(image.code.startswith(b"\x7fELF") and image.num_warps in (1, 4, 8) for image in images.values())


def test_budget_refuses_spills_and_too_much_shared_memory() -> None:
    within = ResourceUsage(registers=255, stack_bytes=0, local_bytes=0, shared_bytes=99 << 10)
    check_budget("kernel", within, 86)
    with pytest.raises(BudgetError, match="8 of stack"):
        check_budget("kernel", ResourceUsage(registers=255, stack_bytes=8, local_bytes=0, shared_bytes=0), 90)
    with pytest.raises(BudgetError, match="the limit is 101376"):
        check_budget("kernel", ResourceUsage(registers=9, stack_bytes=0, local_bytes=0, shared_bytes=102400), 89)
