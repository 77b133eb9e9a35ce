"""ONNX schema of a declared operator, which the exporter needs to write a node. Does not list the operators."""

from __future__ import annotations

import onnx
from onnxscript.values import Op, Opset

from antiphon.ops.operator import DOMAIN, Input, Kind, Operator, Output

VERSION = 1
"""Version of the operators' domain."""

_Schema = onnx.defs.OpSchema
_ATTRIBUTES = {
    int: _Schema.AttrType.INT,
    bool: _Schema.AttrType.INT,
    float: _Schema.AttrType.FLOAT,
    str: _Schema.AttrType.STRING,
}
_TYPES: dict[Kind, list[str]] = {
    "float": ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"],
    "cache": ["tensor(float)", "tensor(float16)"],
    "int64": ["tensor(int64)"],
    "int32": ["tensor(int32)"],
}


def onnx_operator(operator: Operator) -> Op:
    """Return the operator as onnxscript calls it; every attribute is required."""
    node = operator.node()
    kinds = {given.kind for given in node.inputs} | {output.kind for output in node.outputs}
    schema = _Schema(
        node.name,
        DOMAIN,
        VERSION,
        inputs=[_parameter(port) for port in node.inputs],
        outputs=[_parameter(port) for port in node.outputs],
        type_constraints=[(kind, types, "") for kind, types in _TYPES.items() if kind in kinds],
        attributes=[
            _Schema.Attribute(each.name, _ATTRIBUTES[each.type], "", required=True) for each in node.attributes
        ],
    )
    return Op(Opset(DOMAIN, VERSION), node.name, schema)


def _parameter(port: Input | Output) -> onnx.defs.OpSchema.FormalParameter:
    if isinstance(port, Input) and port.optional:
        return _Schema.FormalParameter(port.name, port.kind, param_option=_Schema.FormalParameterOption.Optional)
    return _Schema.FormalParameter(port.name, port.kind)
