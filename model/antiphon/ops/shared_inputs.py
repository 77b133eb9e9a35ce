"""Inputs, attributes and outputs that several operators declare alike, those for GPUs included.

Axes: N packed tokens; B sources, R rows, X width of a block table, H heads, C heads of the pool, D head width, T
positions, L layers; K samples, E edits, k candidates. Of a packed weight: O outputs (V of an embedding), K inputs (M of
an embedding); Op is O rounded up to 16, Kp is K rounded up to 64; U outliers.
"""

from __future__ import annotations

from antiphon.ops.operator import Attribute, Input, Output

QKV = Input("qkv", "float", "N, 3 H D", "queries, keys and values of each token")
SOURCE_OFFSETS = Input("offsets", "int32", "B + 1", "sequence b holds the tokens offsets[b] to offsets[b + 1] - 1")
ROW_OFFSETS = Input("offsets", "int32", "R + 1", "the new tokens of row r are offsets[r] to offsets[r + 1] - 1")
CACHE = Input(
    "cache",
    "cache",
    "num_blocks, L, 2, C, 16 * Dp",
    "the pool of cache_geometry.py; a layer uses the first H of C heads",
)
BLOCK_TABLES = Input("block_tables", "int32", "R, X", "blocks of each row, in the order of its positions")
BIAS_TABLE = Input(
    "bias_table",
    "float",
    "H, 2 * reach + 1",
    "score bias by distance key - query; the outermost entries cover larger distances (T5: Raffel et al. 2020,"
    " section 2.1)",
    optional=True,
)
SLOPES = Input(
    "slopes",
    "float",
    "H",
    "slope * the absolute distance is subtracted from scores (ALiBi: Press et al. 2022, section 3)",
    optional=True,
)
ROTARY_TABLE = Input(
    "rotary_table",
    "float",
    "P, D",
    "of each position the cosines of its D / 2 angles, then the sines; queries and keys are rotated by them (Su et al."
    " 2021, section 3.4)",
    optional=True,
)
NUM_HEADS = Attribute("num_heads", int, "H")
SCALE = Attribute("scale", float, "factor of the scores before the bias")
LAYER = Attribute("layer", int, "decoder layer whose part of the cache is used")
CAP = Attribute("cap", float, "limit of the scores: cap tanh(score / cap), before the bias; 0: none", default=0.0)
CAUSAL = Attribute("causal", bool, "each token sees itself and the tokens before it only")
NORM = (
    Attribute("epsilon", float, "added to the variance or mean square"),
    Attribute("kind", str, "`layer` or `rms`"),
)

EDITS = (
    Input("edit_offsets", "int32", "K + 1", "sample i has the edits edit_offsets[i] to edit_offsets[i + 1] - 1"),
    Input("edit_ids", "int32", "E", "token of each edit"),
    Input("edit_values", "float", "E, 3", "bias, penalty and shift of each edit; without rows: 0, 1 and 0"),
)
SAMPLES = (
    Output("token_ids", "int64", "K", "tokens; -1 where logits are not finite, -2 where every token is forbidden"),
    Output("logprobs", "float", "K", "their log-probabilities"),
    Output("top_ids", "int64", "K, k", "candidates, likeliest first; -1 beyond the last"),
    Output("top_logprobs", "float", "K, k", "log-probabilities of the candidates"),
    Output("top_scores", "float", "K, k", "log-probabilities of the candidates after the edits"),
)

SUBLAYER_INPUTS = (
    Input("x", "float", "N, M", "input of the sublayer"),
    Input("residual", "float", "N, M", "added to its result; the same as x if norms come after sums"),
)
NORM_WEIGHTS = (
    Input("norm_weight", "float", "M", "factor of the norm", optional=True),
    Input("norm_bias", "float", "M", "added to the norm", optional=True),
)
SUBLAYER_OUTPUTS = (
    Output("normed", "float", "N, M", "norm of the sum: input of the next sublayer"),
    Output("sum", "float", "N, M", "residual + result of the sublayer"),
)

# Inputs that hold a packed weight, by precision; model/antiphon/export/weights.py packs the weights.
FLOAT32_WEIGHT = (Input("weight", "float", "Op / 16, K, 16", "panels of 16 outputs"),)

INT8_WEIGHT = (
    Input("weight", "int8", "Op / 16, Kp / 4, 16, 4", "panels of 16 outputs, four inputs of an output adjacent"),
    Input("scales", "float", "Op", "of each output: weight = integer * scale"),
    Input("column_sums", "int32", "Op", "of each output, the sum of its integers"),
)

INT4_WEIGHT = (
    Input("weight", "int8", "Op / 16, Kp / 8, 16, 4", "panels of 16 outputs, two inputs in a byte"),
    Input("ratios", "float16", "Op / 16, Kp / 32, 16", "scales of groups of 32 inputs, relative to the output's scale"),
    Input("scales", "float", "Op", "of each output: weight = integer * 16 * ratio * scale"),
    Input("offsets", "float", "Op", "of each output, the sum of its integer * 16 * ratio"),
)

OUTLIERS = (
    Input(
        "outlier_inputs",
        "int32",
        "U",
        "inputs that stay float32; their activations count as 0 elsewhere",
        optional=True,
    ),
    Input("outlier_weight", "float", "Op / 16, U, 16", "the weights of these inputs", optional=True),
)
"""Of products with integer weights."""

PARTS = {"float32": FLOAT32_WEIGHT, "int8": INT8_WEIGHT, "int4": INT4_WEIGHT}
"""Of products, by precision."""
