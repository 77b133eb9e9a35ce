"""Kernels to compile: parameters and variants of each, and the architectures. Imports no Triton.

A variant's name is the kernel's name, its element type and, where it has one, the width of a head: `embed.bfloat16`,
`paged_attention.float16.64`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

ARCHITECTURES = (80, 86, 89, 90, 120)
"""Compute capabilities, times ten, for which the provider of ONNX Runtime has code and the kernels do not spill."""

ElementType = Literal["bfloat16", "float16", "float32"]
ELEMENT_TYPES: tuple[ElementType, ...] = ("bfloat16", "float16", "float32")

HEAD_WIDTHS = (16, 32, 64, 128, 256)
"""Compiled widths of a head: the next one above a model's own is used."""
MAX_FLOAT32_HEAD_WIDTH = 128
"""Largest width for packed attention in float32: a wider one needs more shared memory than consumer cards have."""

VOCABULARY_PART = 4096
"""Number of tokens that one program of the kernel `vocabulary` reduces."""
MAX_PARTS = 128
"""Largest number of such parts, which limits the vocabulary to 524,288 tokens."""

_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BLOCK = {"BLOCK": 1024}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Run-time parameter of a kernel.

    type: `element` for the variant's own, else a type of Triton. is_aligned: the value is a multiple of 16, which the
    compiler uses for wide loads; pointers are always aligned to 16 bytes.
    """

    name: str
    type: str
    is_pointer: bool
    is_aligned: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel: function `name` of the module kernels/`module`.py."""

    name: str
    module: str
    parameters: tuple[Parameter, ...]
    constants: Mapping[str, int]
    has_head_width: bool = False
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One kernel to compile."""

    kernel: Kernel
    element_type: ElementType
    head_width: int | None

    @property
    def name(self) -> str:
        """Return the name under which the launcher finds the variant."""
        width = () if self.head_width is None else (str(self.head_width),)
        return ".".join((self.kernel.name, self.element_type, *width))

    @property
    def constants(self) -> dict[str, int]:
        """Return the values of the compile-time parameters."""
        constants = dict(self.kernel.constants)
        if self.head_width is not None:
            constants["WIDTH"] = self.head_width
            if self.kernel.name == "packed_attention":
                constants["KEYS"] = 16 if self.element_type == "float32" else 32  # more would spill registers
        return constants

    @property
    def num_warps(self) -> int:
        """Return the number of warps of a program."""
        is_wide = self.kernel.name == "packed_attention" and self.head_width in (128, 256)
        return 8 if is_wide else self.kernel.num_warps

    @property
    def num_stages(self) -> int:
        """Return how many tiles are loaded ahead in shared memory, of which consumer cards have 99 KiB."""
        is_widest_float32 = self.element_type == "float32" and self.head_width == MAX_FLOAT32_HEAD_WIDTH
        return 1 if self.kernel.name == "packed_attention" and is_widest_float32 else 2

    @property
    def is_compilable(self) -> bool:
        """Return False for packed attention of heads that are too wide for float32."""
        is_too_wide = self.element_type == "float32" and (self.head_width or 0) > MAX_FLOAT32_HEAD_WIDTH
        return not (self.kernel.name == "packed_attention" and is_too_wide)

    @property
    def signature(self) -> dict[str, str]:
        """Return Triton's type of every parameter, compile-time ones included."""
        signature = {given.name: self._type(given) for given in self.kernel.parameters}
        return signature | dict.fromkeys(self.constants, "constexpr")

    def _type(self, given: Parameter) -> str:
        name = _TRITON_TYPES[self.element_type] if given.type == "element" else given.type
        return f"*{name}" if given.is_pointer else name


def _parameters(text: str) -> tuple[Parameter, ...]:
    """Parse parameters `name`, an element pointer, or `name:type`; `*` marks pointers, `!` aligned numbers."""
    return tuple(_parameter(word) for word in text.split())


def _parameter(word: str) -> Parameter:
    name, _, kind = word.partition(":")
    kind = kind or "*element"
    is_aligned = kind.endswith("!")
    kind = kind.removesuffix("!")
    return Parameter(name=name, type=kind.removeprefix("*"), is_pointer=kind.startswith("*"), is_aligned=is_aligned)


KERNELS = (
    Kernel(
        name="embed",
        module="embed",
        parameters=_parameters(
            "out tokens:*i32 positions:*i32 weight position_table rows:*i32 previous:*i32 types:*i32 type_table"
            " width:i32! scale:fp32 flags:i32"
        ),
        constants=_BLOCK,
    ),
    Kernel(
        name="add_norm",
        module="add_norm",
        parameters=_parameters("normed total x bias residual weight norm_bias width:i32! epsilon:fp32 flags:i32"),
        constants=_BLOCK,
    ),
    Kernel(
        name="activate",
        module="activate",
        parameters=_parameters("out x bias width:i32! activation:i32 flags:i32"),
        constants=_BLOCK,
    ),
    Kernel(
        name="rotary",
        module="rotary",
        parameters=_parameters("out qkv bias positions:*i32 table:*fp32 num_heads:i32 width:i32! flags:i32"),
        constants={"BLOCK": 128},
        num_warps=1,
    ),
    Kernel(
        name="packed_attention",
        module="packed_attention",
        parameters=_parameters(
            "out qkv bias offsets:*i32 tiles:*i32 bias_table:*fp32 slopes:*fp32 num_heads:i32 width:i32! reach:i32"
            " scale:fp32 flags:i32"
        ),
        constants={"QUERIES": 64},
        has_head_width=True,
    ),
    Kernel(
        name="paged_write",
        module="paged_write",
        parameters=_parameters(
            "written:*i32 cache kv bias tables:*i32 rows:*i32 positions:*i32 parts:i32 table_width:i32 num_heads:i32"
            " width:i32! num_layers:i32 layer:i32 flags:i32"
        ),
        constants={"BLOCK": 256},
        num_warps=1,
    ),
    Kernel(
        name="paged_attention",
        module="paged_attention",
        parameters=_parameters(
            "out sums:*fp32 query bias cache tables:*i32 rows:*i32 lengths:*i32 bias_table:*fp32 slopes:*fp32"
            " table_width:i32 query_stride:i32! num_heads:i32 width:i32! num_layers:i32 layer:i32 reach:i32"
            " num_splits:i32 scale:fp32 flags:i32"
        ),
        constants={"KEYS": 32},
        has_head_width=True,
    ),
    Kernel(
        name="merge_splits",
        module="paged_attention",
        parameters=_parameters("out sums:*fp32 num_heads:i32 width:i32! num_splits:i32"),
        constants={},
        has_head_width=True,
        num_warps=1,
    ),
    Kernel(
        name="pick",
        module="pick",
        parameters=_parameters("out hidden picks:*i32 width:i32!"),
        constants=_BLOCK,
    ),
    Kernel(
        name="vocabulary",
        module="vocabulary",
        parameters=_parameters(
            "parts:*fp32 values:*fp32 logits bias float_params:*fp32 int_params:*i64 edit_offsets:*i32 vocab_size:i32"
            " flags:i32"
        ),
        constants={"BLOCK": VOCABULARY_PART},
        num_warps=8,
    ),
    Kernel(
        name="sample",
        module="sample",
        parameters=_parameters(
            "token_ids:*i32 logprobs:*fp32 top_ids:*i32 top_logprobs:*fp32 top_scores:*fp32 values:*fp32 parts:*fp32"
            " logits bias positions:*i32 float_params:*fp32 int_params:*i64 edit_offsets:*i32 edit_ids:*i32"
            " edit_rounds:*i32 edit_values:*fp32 vocab_size:i32 num_parts:i32 num_candidates:i32 flags:i32"
        ),
        constants={"BLOCK": 1024, "NARROW": 512, "PARTS": MAX_PARTS},
        num_warps=8,
    ),
)


def variants() -> Iterator[Variant]:
    """Yield every kernel to compile for an architecture."""
    for kernel in KERNELS:
        for element_type in ELEMENT_TYPES:
            for head_width in HEAD_WIDTHS if kernel.has_head_width else (None,):
                variant = Variant(kernel=kernel, element_type=element_type, head_width=head_width)
                if variant.is_compilable:
                    yield variant
