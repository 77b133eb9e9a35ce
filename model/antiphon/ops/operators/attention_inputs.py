"""Inputs and attributes that the attention operators share.

Axes: N packed tokens; B sources, R rows, X width of a block table, H heads, C heads of the pool, D head width, T
positions, L layers.
"""

from __future__ import annotations

from antiphon.ops.operator import Attribute, Input

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
