"""Kernels run by Triton's interpreter on memory addresses, as the launcher runs the compiled ones on a card.

Import this module before any kernel: Triton decides while it decorates a function who will run it.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from antiphon.ops.cuda.nodes import Kernel, Variant, variants

Grid = tuple[int, int, int]
Order = Callable[[list[Grid]], list[Grid]]
"""Returns the programs of a grid in the order in which they run."""

_POINTER_TYPES = {
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
}


class _Pointer:
    """An address as Triton takes tensors: with a type and no size."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


def in_order(programs: list[Grid]) -> list[Grid]:
    """Return the programs as they are."""
    return programs


def launch(name: str, grid: Grid, arguments: Sequence[int | float], order: Order = in_order) -> None:
    """Run one variant of nodes.py; arguments in the order of its parameters, pointers as addresses."""
    variant = _variant(name)
    types = variant.signature
    names = [parameter.name for parameter in variant.parameters]
    converted = {
        key: interpreter._implicit_cvt(
            _Pointer(int(value), _POINTER_TYPES[types[key]]) if types[key].startswith("*") else value
        )
        for key, value in zip(names, arguments, strict=True)
    }
    programs = order(list(itertools.product(range(grid[0]), range(grid[1]), range(grid[2]))))
    _run(_function(variant.kernel).rewrite(), grid, programs, converted | variant.constants)


def _run(function: Any, grid: Grid, programs: list[Grid], arguments: dict[str, Any]) -> None:
    """Run programs one by one; as Triton's GridExecutor does, but on memory in place."""
    builder = interpreter.interpreter_builder
    _patch_language(function)
    builder.set_grid_dim(*grid)
    with np.errstate(all="ignore"):
        for program in programs:
            builder.set_grid_idx(*program)
            function(**arguments)


@cache
def _patch_language(function: Any) -> None:
    """Let the functions of triton.language compute; for good, since nothing is compiled in this process.

    Triton does it for every call of one kernel by another, which takes a third of the time.
    """
    interpreter._patch_lang(function)
    interpreter._patch_lang(interpreter.tl.sum.fn)  # its module names the language in another way


@cache
def _variant(name: str) -> Variant:
    return next(variant for variant in variants() if variant.name == name)


def _function(kernel: Kernel) -> Any:
    module = importlib.import_module(f"antiphon.ops.cuda.kernels.{kernel.module}")
    return getattr(module, kernel.name)


def _dot(self: Any, a: Any, b: Any, d: Any, *_settings: Any) -> Any:
    """Multiply in float32: the interpreter multiplies the bits of bfloat16 as integers."""
    left, right = (_as_float32(operand) for operand in (a, b))
    return TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def _as_float32(operand: Any) -> Any:
    if operand.dtype.scalar == interpreter.tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data.astype(np.float32)


def _with_bool_mask(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a method whose mask is cast to bool: the interpreter broadcasts comparisons as int32."""

    def call(self: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        cast = TensorHandle(mask.data.astype(bool), interpreter.tl.int1)
        return method(self, *arguments[:place], cast, *arguments[place + 1 :])

    return call


def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    return self.rewrite()(*arguments, **keywords)


InterpretedFunction.__call__ = _call
InterpreterBuilder.create_dot = _dot
InterpreterBuilder.create_masked_load = _with_bool_mask(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _with_bool_mask(InterpreterBuilder.create_masked_store, 2)
