"""How this project's operators are declared to the exporter: one line for each schema. Knows none of them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnxscript.values import Op, Opset

DOMAIN = "antiphon"

_Schema = onnx.defs.OpSchema
_ATTRIBUTES = {int: _Schema.AttrType.INT, float: _Schema.AttrType.FLOAT, str: _Schema.AttrType.STRING}
_OPTIONAL = _Schema.FormalParameterOption.Optional
# Short names in `inputs` and `outputs`: T computes, C is what caches hold.
_KINDS = {
    "T": ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"],
    "C": ["tensor(float)", "tensor(float16)"],
    "ids": ["tensor(int64)"],
    "ints": ["tensor(int32)"],
}


def operator(name: str, inputs: str, outputs: str, **attributes: type) -> Op:
    """An operator of our domain, version 1, every attribute required.

    inputs and outputs are lists like "query:T lens?:ints"; a question mark marks what may be left out.
    """
    schema = _Schema(
        name,
        DOMAIN,
        1,
        inputs=[_parameter(text) for text in inputs.split()],
        outputs=[_parameter(text) for text in outputs.split()],
        type_constraints=[(kind, types, "") for kind, types in _used(inputs + " " + outputs).items()],
        attributes=[_Schema.Attribute(key, _ATTRIBUTES[kind], "", required=True) for key, kind in attributes.items()],
    )
    return Op(Opset(DOMAIN, 1), name, schema)


def _parameter(text: str) -> onnx.defs.OpSchema.FormalParameter:
    name, kind = text.split(":")
    if name.endswith("?"):
        return _Schema.FormalParameter(name.rstrip("?"), kind, param_option=_OPTIONAL)
    return _Schema.FormalParameter(name, kind)


def _used(ports: str) -> Mapping[str, list[str]]:
    kinds = {text.split(":")[1] for text in ports.split()}
    return {kind: types for kind, types in _KINDS.items() if kind in kinds}
