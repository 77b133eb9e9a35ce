"""Recorder of a Transformer's attention weights, for entropies in training and for the explain graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from antiphon.ops.attention import attention_weights
from antiphon.transformer.layers import CrossAttention, SelfAttention

Kind = Literal["encoder_self", "decoder_self", "decoder_cross"]
Record = Callable[[Kind, Tensor], None]


def record_weights(model: nn.Module, record: Record) -> Callable[[], None]:
    """Make every attention module of a model pass its weights [B, H, T, S] to `record` at each forward pass.

    Modules call in the order of execution; their outputs do not change. Returns a function that ends the recording.
    """
    replaced: list[tuple[SelfAttention | CrossAttention, Callable[..., Tensor]]] = []
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention | CrossAttention):
            replaced.append((module, module.attend))
            module.attend = partial(_recorded, module.attend, partial(record, _kind(name)))

    def end() -> None:
        for module, attend in replaced:
            module.attend = attend

    return end


def _kind(name: str) -> Kind:
    if name.endswith("cross_attention"):
        return "decoder_cross"
    return "decoder_self" if ".decoder." in f".{name}." else "encoder_self"


def _recorded(
    attend: Callable[..., Tensor],
    record: Callable[[Tensor], None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    **settings: Any,
) -> Tensor:
    record(attention_weights(query, key, key_lens, bias, **settings))
    return attend(query, key, value, key_lens, bias, **settings)
