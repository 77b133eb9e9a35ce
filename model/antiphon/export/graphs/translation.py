"""Translations from this project's PyTorch operators to nodes of an ONNX graph, one for one.

`torch.onnx.export` takes `TRANSLATIONS` as its custom_translation_table and writes one node of domain `antiphon`
at each place where the model called an operator. A node keeps the name, operands and attributes of the call, with one
difference: an operator that returns a changed input, a cache, becomes a node that changes it in place. That node has
no such output, and readers of the changed cache read the graph's own cache. One layer never reads the part of
another, so the order of layers does not matter.

Later passes change the nodes further: packing.py packs the weights of operators that have native kernels,
contrib_lowering.py replaces those that have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from antiphon.ops.operator import Operator, onnx_operator, torch_operator
from antiphon.ops.operators import OPERATORS


def translation(operator: Operator) -> Callable[..., Any]:
    """Return the function that the exporter calls for each call of the operator in the traced graph."""
    node = onnx_operator(operator)
    flags = [attribute.name for attribute in operator.attributes if attribute.type is bool]

    def translate(*operands: Any, **attributes: Any) -> Any:
        attributes |= {name: int(attributes[name]) for name in flags}
        results = node(*operands, **attributes)
        if not operator.updated_inputs:
            return results
        outputs = results if isinstance(results, tuple | list) else (results,)
        return (*outputs, *(operands[index] for index in operator.updated_inputs))

    return translate


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch_operator(operator): translation(operator) for operator in OPERATORS
}
