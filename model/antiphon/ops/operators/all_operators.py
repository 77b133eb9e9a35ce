"""List of all operators. The import of this module registers them with PyTorch."""

from __future__ import annotations

from antiphon.ops.operator import Operator
from antiphon.ops.operators.add_norm import ADD_NORM
from antiphon.ops.operators.disentangled_attention import DISENTANGLED_ATTENTION
from antiphon.ops.operators.embed import EMBED
from antiphon.ops.operators.fused_attention import ATTENTION, CACHED_ATTENTION
from antiphon.ops.operators.linear import LINEAR
from antiphon.ops.operators.paged_write import PAGED_WRITE
from antiphon.ops.operators.sample import SAMPLE
from antiphon.ops.operators.sublayers import (
    FEED_FORWARD_SUBLAYER,
    PACKED_ATTENTION_SUBLAYER,
    PAGED_CROSS_ATTENTION_SUBLAYER,
    PAGED_SELF_ATTENTION_SUBLAYER,
)

OPERATORS: tuple[Operator, ...] = (
    EMBED,
    LINEAR,
    ADD_NORM,
    DISENTANGLED_ATTENTION,
    PAGED_WRITE,
    SAMPLE,
    FEED_FORWARD_SUBLAYER,
    PACKED_ATTENTION_SUBLAYER,
    PAGED_SELF_ATTENTION_SUBLAYER,
    PAGED_CROSS_ATTENTION_SUBLAYER,
    ATTENTION,
    CACHED_ATTENTION,
)
