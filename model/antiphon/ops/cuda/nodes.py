"""Nodes of the graphs that run on an NVIDIA GPU, and their kernels: the one place that declares them.

A declaration lists what a node takes, returns and refuses, and the parameters of its kernels. These parts are derived
from it: the nodes that the lowering writes (export/cuda_lowering.py), the ports, checks of sizes and launches of
the native library (node_header.py), the signatures and variants that are compiled (compile_kernels.py), and the
launches of the tests. References are in references.py.

Products are ONNX `Gemm` without a bias, because a bias costs a further kernel of ONNX Runtime: the node that reads a
product adds the bias. Imports only declarations: neither torch, NumPy nor Triton.

Axes: N packed tokens, R rows or sources, X width of a block table, H heads, D head width, M model width, F inner width,
B sources, W tiles of queries, P positions, L layers, V vocabulary; K samples, E edits, k candidates; S splits, C parts
of the vocabulary. An axis with the same text has the same size in all inputs of a node; a product of letters is the
product of their sizes. The native library refuses other inputs.

The pool is `cache [num_blocks, L, 2, H, 16, D]`: keys and values of one position lie side by side, unlike the pool of
the CPU operators, so that threads read whole vectors. Where the decoder has a recurrence, the states of a row are in
its first block, as cache_geometry.py says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from antiphon.ops.cuda import TILE
from antiphon.ops.operator import Attribute, Input, Node, Output
from antiphon.ops.shared_inputs import (
    BIAS_TABLE,
    BLOCK_TABLES,
    CAUSAL,
    EDITS,
    LAYER,
    NORM,
    NUM_HEADS,
    QKV,
    SAMPLES,
    SCALE,
    SLOPES,
    SOURCE_OFFSETS,
)

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "gelu_sigmoid")
"""Names of activations; kernels know them by their index."""

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
BLOCK = 1024
"""Number of columns that a program of most kernels reads at once."""

_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel of a node: function `name` of the module kernels/`module`.py.

    parameters: names in the order of the function. The name of an input or output of the node is its address; that of
    an attribute that is a number is its value; any other is an int32. `!` marks numbers that are multiples of 16,
    which the compiler uses for wide loads; addresses are always aligned to 16 bytes.
    flags: the bits of the parameter `flags`, lowest first: optional inputs that are given (`a&b`: both), attributes
    that are true, `attribute=value`.
    constants: compile-time parameters.
    """

    name: str
    module: str
    parameters: str
    flags: tuple[str, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    has_head_width: bool = False
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Run-time parameter of a kernel. port: the input or output that it is the address of. type: of a number."""

    name: str
    port: Input | Output | None
    type: Literal["i32", "fp32"]
    is_aligned: bool

    @property
    def letter(self) -> str:
        """Return the letter of its kind: p address, i int32, a int32 that is a multiple of 16, f float32."""
        if self.port is not None:
            return "p"
        return "f" if self.type == "fp32" else "a" if self.is_aligned else "i"


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaNode(Node):
    """A node for GPUs.

    kernels: in the order of their launches. num_workspace: number of outputs at the end that no other node reads.
    """

    kernels: tuple[Kernel, ...]
    num_workspace: int = 0

    @property
    def results(self) -> tuple[Output, ...]:
        """Return the outputs that are not workspace."""
        return self.outputs[: len(self.outputs) - self.num_workspace]

    def parameters(self, kernel: Kernel) -> tuple[Parameter, ...]:
        """Return the run-time parameters of one of its kernels."""
        declared: tuple[Input | Output, ...] = (*self.inputs, *self.outputs)
        ports = {port.name: port for port in declared}
        floats = {attribute.name for attribute in self.attributes if attribute.type is float}
        return tuple(
            Parameter(
                name=name,
                port=ports.get(name),
                type="fp32" if name in floats else "i32",
                is_aligned=word.endswith("!") or name in ports,
            )
            for word in kernel.parameters.split()
            for name in [word.removesuffix("!")]
        )

    def signature(self, kernel: Kernel) -> str:
        """Return the parameters of one of its kernels as words `name:kind`."""
        return " ".join(f"{parameter.name}:{parameter.letter}" for parameter in self.parameters(kernel))


_CACHE = Input("cache", "cache", "num_blocks, L, 2, H, 16, D", "the pool")
_TABLES = replace(BLOCK_TABLES, name="tables")
_BIAS_TABLE = replace(BIAS_TABLE, kind="float32")
_SLOPES = replace(SLOPES, kind="float32")
_EDIT_OFFSETS, _EDIT_IDS, _EDIT_VALUES = EDITS
_ROWS = Input("rows", "int32", "N", "row of each token")
_POSITIONS = Input("positions", "int32", "N", "position of each token in its row; -1 for padding")


def _bias(axes: str) -> Input:
    return Input("bias", "float", axes, "bias of the product that computed the first input", optional=True)


EMBED = CudaNode(
    name="CudaEmbed",
    inputs=(
        Input("tokens", "int32", "N", "token ids; -1 - r stands for the token of row r of the step before"),
        _POSITIONS,
        Input("weight", "float", "V, M", "vector of each token of the vocabulary"),
        Input("position_table", "float", "P, M", "vector of each position", optional=True),
        Input("previous", "int32", "R", "token that each row sampled in the step before", optional=True),
        Input("types", "int32", "N", "type of each token", optional=True),
        Input("type_table", "float", "types, M", "vector of each type", optional=True),
    ),
    attributes=(Attribute("scale", float, "factor of the token vectors"),),
    outputs=(Output("out", "float", "N, M", "embedded tokens"),),
    kernels=(
        Kernel(
            name="embed",
            module="rows",
            parameters=("out tokens positions weight position_table previous types type_table width! scale flags"),
            flags=("position_table", "previous", "types&type_table"),
            constants={"BLOCK": BLOCK},
        ),
    ),
)

ADD_NORM = CudaNode(
    name="CudaAddNorm",
    inputs=(
        Input("x", "float", "N, M", "output of a sublayer"),
        _bias("M"),
        Input("residual", "float", "N, M", "added to x", optional=True),
        Input("weight", "float", "M", "factors after the norm", optional=True),
        Input("norm_bias", "float", "M", "added after the norm", optional=True),
    ),
    attributes=NORM,
    outputs=(
        Output("normed", "float", "N, M", "norm of the sum"),
        Output("total", "float", "N, M", "x + bias + residual"),
    ),
    kernels=(
        Kernel(
            name="add_norm",
            module="rows",
            parameters="normed total x bias residual weight norm_bias width! epsilon flags",
            flags=("bias", "residual", "weight", "norm_bias", "kind=rms"),
            constants={"BLOCK": BLOCK},
        ),
    ),
)

ACTIVATE = CudaNode(
    name="CudaActivate",
    inputs=(Input("x", "float", "N, F (gated: 2 F)", "a product"), _bias("F (gated: 2 F)")),
    attributes=(
        Attribute("activation", str, f"one of {', '.join(ACTIVATIONS)}"),
        Attribute("gated", bool, "the second half of a row is multiplied by its activated first half"),
    ),
    outputs=(Output("out", "float", "N, F", "activated product"),),
    kernels=(
        Kernel(
            name="activate",
            module="rows",
            parameters="out x bias width! activation flags",
            flags=("bias", "gated"),
            constants={"BLOCK": BLOCK},
        ),
    ),
)

ROTARY = CudaNode(
    name="CudaRotary",
    inputs=(
        QKV,
        _bias("3 H D"),
        _POSITIONS,
        Input("table", "float32", "P, D", "of each position the cosines of its D / 2 angles, then the sines"),
    ),
    attributes=(NUM_HEADS,),
    outputs=(Output("out", "float", "N, 3 H D", "queries and keys rotated; values with their bias only"),),
    kernels=(
        Kernel(
            name="rotary",
            module="rows",
            parameters="out qkv bias positions table num_heads width! flags",
            flags=("bias",),
            constants={"BLOCK": 128},
            num_warps=1,
        ),
    ),
)

PACKED_ATTENTION = CudaNode(
    name="CudaPackedAttention",
    inputs=(
        QKV,
        _bias("3 H D"),
        SOURCE_OFFSETS,
        Input(
            "tiles", "int32", "W, 2", f"of each tile of {TILE} queries its sequence, -1 for padding, and first query"
        ),
        _BIAS_TABLE,
        _SLOPES,
    ),
    attributes=(NUM_HEADS, SCALE, CAUSAL),
    outputs=(Output("out", "float", "N, H D", "weighted sums of values"),),
    kernels=(
        Kernel(
            name="packed_attention",
            module="attention",
            parameters="out qkv bias offsets tiles bias_table slopes num_heads width! reach scale flags",
            flags=("bias", "bias_table", "slopes", "causal"),
            constants={"QUERIES": TILE},
            has_head_width=True,
        ),
    ),
)

PAGED_WRITE = CudaNode(
    name="CudaPagedWrite",
    inputs=(
        Input(
            "kv",
            "float",
            "N, Z H D",
            "keys and values of each token, behind its queries where Z is 3, not 2",
        ),
        _bias("Z H D"),
        _CACHE,
        _TABLES,
        _ROWS,
        _POSITIONS,
    ),
    attributes=(NUM_HEADS, LAYER),
    outputs=(Output("written", "int32", "1", "1; readers of the cache take it as an input, so that they run later"),),
    kernels=(
        Kernel(
            name="paged_write",
            module="attention",
            parameters=(
                "written cache kv bias tables rows positions parts table_width num_heads width! num_layers layer flags"
            ),
            flags=("bias",),
            constants={"BLOCK": 256},
            num_warps=1,
        ),
    ),
)

PAGED_ATTENTION = CudaNode(
    name="CudaPagedAttention",
    inputs=(
        Input("query", "float", "N, H D or 3 H D", "queries of each token, first in its row"),
        _bias("at least H D"),
        _CACHE,
        _TABLES,
        _ROWS,
        Input("lengths", "int32", "N", "positions of its row that each token sees; 0 for padding, whose output is 0"),
        Input("written", "int32", "1", "output of the write that must run first; the value is not read", optional=True),
        _BIAS_TABLE,
        _SLOPES,
    ),
    attributes=(NUM_HEADS, SCALE, LAYER),
    outputs=(
        Output("out", "float", "N, H D", "weighted sums of values"),
        Output("sums", "float32", "N, H, S, D + 2", "workspace: sums, largest score and weight of each split"),
    ),
    kernels=(
        Kernel(
            name="paged_attention",
            module="attention",
            parameters=(
                "out sums query bias cache tables rows lengths bias_table slopes table_width query_stride! num_heads"
                " width! num_layers layer reach num_splits scale flags"
            ),
            flags=("bias", "bias_table", "slopes"),
            constants={"KEYS": 32},
            has_head_width=True,
        ),
        Kernel(
            name="merge_splits",
            module="attention",
            parameters="out sums num_heads width! num_splits",
            has_head_width=True,
            num_warps=1,
        ),
    ),
    num_workspace=1,
)

_STATE_PORTS = (
    replace(_CACHE, meaning="the pool; the layer's part of a block begins with two states"),
    replace(_TABLES, meaning="blocks of each row; only the first is read"),
    replace(_ROWS, meaning="row of each token; the tokens of a row are neighbours, in the order of their positions"),
    replace(_POSITIONS, meaning="position of each token in its row; -1 for padding, whose output is 0"),
)

SSRU = CudaNode(
    name="CudaSsru",
    inputs=(Input("gates", "float", "N, 2 M", "W x, then F x, of ssru_sublayer"), _bias("2 M"), *_STATE_PORTS),
    attributes=(LAYER,),
    outputs=(Output("out", "float", "N, M", "relu of the state after each token"),),
    kernels=(
        Kernel(
            name="ssru",
            module="recurrence",
            parameters="out cache gates bias tables rows positions table_width width! part! num_layers layer flags",
            flags=("bias",),
            constants={"BLOCK": BLOCK},
        ),
    ),
)

PAGED_AVERAGE = CudaNode(
    name="CudaPagedAverage",
    inputs=(Input("x", "float", "N, M", "states"), *_STATE_PORTS),
    attributes=(LAYER,),
    outputs=(Output("out", "float", "N, M", "average of each token and all tokens of its row before it"),),
    kernels=(
        Kernel(
            name="paged_average",
            module="recurrence",
            parameters="out cache x tables rows positions table_width width! part! num_layers layer",
            constants={"BLOCK": BLOCK},
        ),
    ),
)

GATED_SUM = CudaNode(
    name="CudaGatedSum",
    inputs=(
        Input("x", "float", "N, M", "first term"),
        Input("x_gate", "float", "N, M", "a product; its sigmoid is the factor of x"),
        Input("x_bias", "float", "M", "bias of the product x_gate", optional=True),
        Input("y", "float", "N, M", "second term"),
        Input("y_gate", "float", "N, M", "a product; its sigmoid is the factor of y"),
        Input("y_bias", "float", "M", "bias of the product y_gate", optional=True),
    ),
    attributes=(),
    outputs=(Output("out", "float", "N, M", "the sum"),),
    kernels=(
        Kernel(
            name="gated_sum",
            module="rows",
            parameters="out x x_gate x_bias y y_gate y_bias width! flags",
            flags=("x_bias", "y_bias"),
            constants={"BLOCK": BLOCK},
        ),
    ),
)

PICK = CudaNode(
    name="CudaPick",
    inputs=(
        Input("hidden", "float", "N, M", "states of the tokens"),
        Input("picks", "int32", "K", "the token that each sample follows, by index"),
    ),
    attributes=(),
    outputs=(Output("out", "float", "K, M", "states of the picked tokens"),),
    kernels=(Kernel(name="pick", module="rows", parameters="out hidden picks width!", constants={"BLOCK": BLOCK}),),
)

SAMPLE = CudaNode(
    name="CudaSample",
    inputs=(
        Input("logits", "float", "K, V", "product over the vocabulary of each picked state"),
        _bias("V"),
        Input("positions", "int32", "K", "positions of the picked tokens, counters of the random numbers"),
        Input("float_params", "float32", "K, 4", "of each sample: FLOAT_PARAMS of sampling.py"),
        Input("int_params", "int64", "K, 6", "of each sample: INT_PARAMS of sampling.py"),
        _EDIT_OFFSETS,
        _EDIT_IDS,
        Input("edit_rounds", "int32", "E", "number of earlier edits of the same sample and token"),
        replace(_EDIT_VALUES, kind="float32"),
        Input("candidates", "int32", "k", "its size is the number of candidates; the values are not read"),
    ),
    attributes=(),
    outputs=(
        *(replace(output, kind="int32" if output.kind == "int64" else "float32") for output in SAMPLES),
        Output("values", "float32", "K, V", "workspace: edited values of samples that are not plain argmax"),
        Output("parts", "float32", "K, C, 3", "workspace: of each part largest logit, its token, sum of exp"),
    ),
    kernels=(
        Kernel(
            name="vocabulary",
            module="sampling",
            parameters="parts values logits bias float_params int_params edit_offsets vocab_size flags",
            flags=("bias",),
            constants={"BLOCK": VOCABULARY_PART},
            num_warps=8,
        ),
        Kernel(
            name="sample",
            module="sampling",
            parameters=(
                "token_ids logprobs top_ids top_logprobs top_scores values parts logits bias positions float_params"
                " int_params edit_offsets edit_ids edit_rounds edit_values vocab_size num_parts num_candidates flags"
            ),
            flags=("bias",),
            constants={"BLOCK": BLOCK, "NARROW": 512, "PARTS": MAX_PARTS},
            num_warps=8,
        ),
    ),
    num_workspace=2,
)

NODES = (
    EMBED,
    ADD_NORM,
    ACTIVATE,
    ROTARY,
    PACKED_ATTENTION,
    PAGED_WRITE,
    PAGED_ATTENTION,
    SSRU,
    PAGED_AVERAGE,
    GATED_SUM,
    PICK,
    SAMPLE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One kernel to compile."""

    node: CudaNode
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
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the run-time parameters."""
        return self.node.parameters(self.kernel)

    @property
    def signature(self) -> dict[str, str]:
        """Return Triton's type of every parameter, compile-time ones included."""
        return {parameter.name: self._type(parameter) for parameter in self.parameters} | dict.fromkeys(
            self.constants, "constexpr"
        )

    def _type(self, parameter: Parameter) -> str:
        if parameter.port is None:
            return parameter.type
        kind = parameter.port.kind
        return "*" + _TRITON_TYPES[self.element_type if kind in ("float", "cache") else kind]


def variants() -> Iterator[Variant]:
    """Yield every kernel to compile for an architecture."""
    for node in NODES:
        for kernel in node.kernels:
            for element_type in ELEMENT_TYPES:
                for head_width in HEAD_WIDTHS if kernel.has_head_width else (None,):
                    variant = Variant(node=node, kernel=kernel, element_type=element_type, head_width=head_width)
                    if variant.is_compilable:
                        yield variant
