"""Inputs that hold a packed weight, by precision; model/antiphon/export/weights/packing.py packs the weights.

Axes: O outputs (V of an embedding), K inputs (M of an embedding); Op is O rounded up to 16, Kp is K rounded up to 64.
"""

from __future__ import annotations

from antiphon.ops.operator import Input

FLOAT32 = (Input("weight", "float", "Op / 16, K, 16", "panels of 16 outputs"),)

INT8 = (
    Input("weight", "int8", "Op / 16, Kp / 4, 16, 4", "panels of 16 outputs, four inputs of an output adjacent"),
    Input("scales", "float", "Op", "of each output: weight = integer * scale"),
    Input("column_sums", "int32", "Op", "of each output, the sum of its integers"),
)

INT4 = (
    Input("weight", "int8", "Op / 16, Kp / 8, 16, 4", "panels of 16 outputs, two inputs in a byte"),
    Input("ratios", "float16", "Op / 16, Kp / 32, 16", "scales of groups of 32 inputs, relative to the output's scale"),
    Input("scales", "float", "Op", "of each output: weight = integer * 16 * ratio * scale"),
    Input("offsets", "float", "Op", "of each output, the sum of its integer * 16 * ratio"),
)
