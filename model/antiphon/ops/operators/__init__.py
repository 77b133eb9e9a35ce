"""Operators of this project, in groups, and the list of all. The import of this package registers them with PyTorch."""

from __future__ import annotations

from antiphon.ops.operator import Operator
from antiphon.ops.operators.attention import DISENTANGLED_ATTENTION, PAGED_WRITE
from antiphon.ops.operators.linear import LINEAR
from antiphon.ops.operators.recurrence import PAGED_AVERAGE, SSRU_SUBLAYER
from antiphon.ops.operators.rows import ADD_NORM, EMBED
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
    SSRU_SUBLAYER,
    PAGED_AVERAGE,
)
