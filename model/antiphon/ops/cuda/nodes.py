"""Nodes of the graphs that run on an NVIDIA GPU: the one place that lists their inputs, attributes and outputs.

The lowering writes these nodes, and the native library launches their kernels (docs/GPU.md). Products are ONNX `Gemm`
without a bias, because a bias costs a further kernel of ONNX Runtime: the node that reads a product adds the bias.
Torch-free.

Axes: N packed tokens, R rows or sources, X width of a block table, H heads, D head width, M model width, F inner width,
B sources, W tiles of queries, P positions, L layers, V vocabulary; K samples, E edits, k candidates; S splits, C parts
of the vocabulary.

The pool is `cache [num_blocks, L, 2, H, 16, D]`: keys and values of one position lie side by side, unlike the pool of
the CPU operators, so that threads read whole vectors.
"""

from __future__ import annotations

from antiphon.ops.operator import Attribute, Input, Node, Output
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS

PADDING = -1
"""Position of a token that pads a batch to the size of its bucket: nothing is written for it."""
PREVIOUS = -1
"""Token id that stands for the token that the row sampled in the step before, which is on the device only."""
TILE = 64
"""Number of queries that one program of packed attention computes."""
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh")
"""Names of activations; kernels know them by their index."""

_HEADS = Attribute("num_heads", int, "H")
_SCALE = Attribute("scale", float, "factor of the scores before the bias")
_LAYER = Attribute("layer", int, "decoder layer whose part of the cache is used")
_CACHE = Input("cache", "cache", "num_blocks, L, 2, H, 16, D", "the pool")
_TABLES = Input("tables", "int32", "R, X", "blocks of each row, in the order of its positions")
_BIAS_TABLE = Input(
    "bias_table",
    "float32",
    "H, 2 * reach + 1",
    "score bias by distance key - query; the outermost entries cover larger distances",
    optional=True,
)
_SLOPES = Input("slopes", "float32", "H", "slope * the absolute distance is subtracted from scores", optional=True)
_ROWS = Input("rows", "int32", "N", "row of each token")
_POSITIONS = Input("positions", "int32", "N", "position of each token in its row; -1 for padding")


def _bias(axes: str) -> Input:
    return Input("bias", "float", axes, "bias of the product that computed the first input", optional=True)


EMBED = Node(
    name="CudaEmbed",
    inputs=(
        Input("tokens", "int32", "N", "token ids; -1 stands for the row's token of the step before"),
        _POSITIONS,
        Input("weight", "float", "V, M", "vector of each token of the vocabulary"),
        Input("position_table", "float", "P, M", "vector of each position", optional=True),
        Input("rows", "int32", "N", "row of each token, where a token id may be -1", optional=True),
        Input("previous", "int32", "R", "token that each row sampled in the step before", optional=True),
        Input("types", "int32", "N", "type of each token", optional=True),
        Input("type_table", "float", "types, M", "vector of each type", optional=True),
    ),
    attributes=(Attribute("scale", float, "factor of the token vectors"),),
    outputs=(Output("out", "float", "N, M", "embedded tokens"),),
)

ADD_NORM = Node(
    name="CudaAddNorm",
    inputs=(
        Input("x", "float", "N, M", "output of a sublayer"),
        _bias("M"),
        Input("residual", "float", "N, M", "added to x", optional=True),
        Input("weight", "float", "M", "factors after the norm", optional=True),
        Input("norm_bias", "float", "M", "added after the norm", optional=True),
    ),
    attributes=(
        Attribute("epsilon", float, "added to the variance or mean square"),
        Attribute("kind", str, "`layer` or `rms`"),
    ),
    outputs=(
        Output("normed", "float", "N, M", "norm of the sum"),
        Output("sum", "float", "N, M", "x + bias + residual"),
    ),
)

ACTIVATE = Node(
    name="CudaActivate",
    inputs=(Input("x", "float", "N, F (gated: 2 F)", "a product"), _bias("F (gated: 2 F)")),
    attributes=(
        Attribute("activation", str, f"one of {', '.join(ACTIVATIONS)}"),
        Attribute("gated", bool, "the second half of a row is multiplied by its activated first half"),
    ),
    outputs=(Output("out", "float", "N, F", "activated product"),),
)

ROTARY = Node(
    name="CudaRotary",
    inputs=(
        Input("qkv", "float", "N, 3 H D", "queries, keys and values of each token"),
        _bias("3 H D"),
        _POSITIONS,
        Input("table", "float32", "P, D", "of each position the cosines of its D / 2 angles, then the sines"),
    ),
    attributes=(_HEADS,),
    outputs=(Output("out", "float", "N, 3 H D", "queries and keys rotated; values with their bias only"),),
)

PACKED_ATTENTION = Node(
    name="CudaPackedAttention",
    inputs=(
        Input("qkv", "float", "N, 3 H D", "queries, keys and values of each token"),
        _bias("3 H D"),
        Input("offsets", "int32", "B + 1", "sequence b holds the tokens offsets[b] to offsets[b + 1] - 1"),
        Input(
            "tiles", "int32", "W, 2", f"of each tile of {TILE} queries its sequence, -1 for padding, and first query"
        ),
        _BIAS_TABLE,
        _SLOPES,
    ),
    attributes=(_HEADS, _SCALE, Attribute("causal", bool, "each token sees itself and the tokens before it only")),
    outputs=(Output("out", "float", "N, H D", "weighted sums of values"),),
)

PAGED_WRITE = Node(
    name="CudaPagedWrite",
    inputs=(
        Input("kv", "float", "N, 2 H D or 3 H D", "keys and values of each token, behind its queries where they are"),
        _bias("as wide as kv"),
        _CACHE,
        _TABLES,
        _ROWS,
        _POSITIONS,
    ),
    attributes=(_HEADS, _LAYER),
    outputs=(Output("written", "int32", "1", "1; readers of the cache take it as an input, so that they run later"),),
)

PAGED_ATTENTION = Node(
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
    attributes=(_HEADS, _SCALE, _LAYER),
    outputs=(
        Output("out", "float", "N, H D", "weighted sums of values"),
        Output("sums", "float32", "N, H, S, D + 2", "workspace: sums, largest score and weight of each split"),
    ),
)

PICK = Node(
    name="CudaPick",
    inputs=(
        Input("hidden", "float", "N, M", "states of the tokens"),
        Input("picks", "int32", "K", "the token that each sample follows, by index"),
    ),
    attributes=(),
    outputs=(Output("out", "float", "K, M", "states of the picked tokens"),),
)

SAMPLE = Node(
    name="CudaSample",
    inputs=(
        Input("logits", "float", "K, V", "product over the vocabulary of each picked state"),
        _bias("V"),
        Input("positions", "int32", "K", "positions of the picked tokens, counters of the random numbers"),
        Input("float_params", "float32", f"K, {len(FLOAT_PARAMS)}", "of each sample: " + ", ".join(FLOAT_PARAMS)),
        Input("int_params", "int64", f"K, {len(INT_PARAMS)}", "of each sample: " + ", ".join(INT_PARAMS)),
        Input("edit_offsets", "int32", "K + 1", "sample i has the edits edit_offsets[i] to edit_offsets[i + 1] - 1"),
        Input("edit_ids", "int32", "E", "token of each edit"),
        Input("edit_rounds", "int32", "E", "number of earlier edits of the same sample and token"),
        Input("edit_values", "float32", "E, 3", "bias, penalty and shift of each edit"),
        Input("candidates", "int32", "k", "its size is the number of candidates; the values are not read"),
    ),
    attributes=(),
    outputs=(
        Output("token_ids", "int32", "K", "tokens; -1 where logits are not finite, -2 where every token is forbidden"),
        Output("logprobs", "float32", "K", "their log-probabilities"),
        Output("top_ids", "int32", "K, k", "candidates, likeliest first; -1 beyond the last"),
        Output("top_logprobs", "float32", "K, k", "log-probabilities of the candidates"),
        Output("top_scores", "float32", "K, k", "log-probabilities of the candidates after the edits"),
        Output("values", "float32", "K, V", "workspace: edited values of samples that are not plain argmax"),
        Output("parts", "float32", "K, C, 3", "workspace: of each part largest logit, its token, sum of exp"),
    ),
)

NODES = (
    EMBED,
    ADD_NORM,
    ACTIVATE,
    ROTARY,
    PACKED_ATTENTION,
    PAGED_WRITE,
    PAGED_ATTENTION,
    PICK,
    SAMPLE,
)
