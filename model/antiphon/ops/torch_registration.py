"""Registration of a declared operator with PyTorch: its schema, its eager function and its fake."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from antiphon.ops.operator import DOMAIN, Operator, Output, Shape


def register(operator: Operator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the operator's eager implementation, and derive its fake.

    The function takes the inputs by position, the attributes by keyword, all under their declared names, and returns
    the outputs as contiguous tensors that share no memory with the inputs. It has no gradient: training uses another
    backend. Raises TypeError when its parameters differ from the declaration.
    """

    def decorate(eager: Callable[..., Any]) -> Callable[..., Any]:
        _check_parameters(operator, eager)
        name, schema = f"{DOMAIN}::{operator.name}", torch_schema(operator)
        registered = torch.library.custom_op(name, eager, mutates_args=(), schema=schema)
        registered.register_fake(_fake(operator))
        return registered

    return decorate


def torch_schema(operator: Operator) -> str:
    """Return the signature in PyTorch's schema language."""
    inputs = [f"Tensor{'?' if given.optional else ''} {given.name}" for given in operator.inputs]
    attributes = [f"{attribute.type.__name__} {attribute.name}" for attribute in operator.attributes]
    parameters = [*inputs, "*", *attributes] if attributes else inputs
    outputs = ", ".join("Tensor" for _ in operator.outputs)
    return f"({', '.join(parameters)}) -> {outputs if len(operator.outputs) == 1 else f'({outputs})'}"


def torch_operator(operator: Operator) -> torch._ops.OpOverload:
    """Return the registered operator as it appears in a traced graph."""
    packet = getattr(getattr(torch.ops, DOMAIN), operator.name)
    overload: torch._ops.OpOverload = packet.default
    return overload


def _check_parameters(operator: Operator, eager: Callable[..., Any]) -> None:
    parameters = inspect.signature(eager).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    inputs = [given.name for given in operator.inputs]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):  # it receives all further inputs
        inputs = inputs[: len(names)]
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    attributes = [attribute.name for attribute in operator.attributes]
    if (names, keywords) != (inputs, attributes):
        raise TypeError(
            f"{operator.name}: its function takes {names} and keywords {keywords}; it must take {inputs} and keywords"
            f" {attributes}, as declared"
        )


def _fake(operator: Operator) -> Callable[..., Any]:
    """Return the function that PyTorch calls for shapes and types while it traces."""
    names = [given.name for given in operator.inputs]

    def infer(*operands: Tensor | None, **_attributes: object) -> Tensor | tuple[Tensor, ...]:
        given = dict(zip(names, operands, strict=True))
        shapes = operator.shapes(given)
        results = [_empty(operator, given, *pair) for pair in zip(operator.outputs, shapes, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    return infer


def _empty(operator: Operator, given: Mapping[str, Tensor | None], output: Output, shape: Shape) -> Tensor:
    """Return a tensor of the type of the first input of the output's kind."""
    like = next(given[each.name] for each in operator.inputs if each.kind == output.kind)
    assert like is not None, f"{operator.name}: the first input of kind {output.kind} must not be optional"
    return like.new_empty(tuple(shape))
