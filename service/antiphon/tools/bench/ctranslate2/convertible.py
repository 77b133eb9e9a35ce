"""Models that can be converted to CTranslate2. Needs neither torch nor CTranslate2, so that a bench asks it first."""

from __future__ import annotations

from antiphon.architecture.config import ModelConfig

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
"""Names of activations in CTranslate2's enumeration, by ours."""

_CONVERTIBLE: dict[str, tuple[str, ...]] = {
    "architecture": ("encoder-decoder",),
    "positions": ("sinusoidal", "learned", "t5_relative", "rope"),
    "activation": tuple(ACTIVATIONS),
}


def obstacle(config: ModelConfig) -> str | None:
    """Return the reason why a model cannot be converted, with field, value and convertible values; None if it can."""
    for field, values in _CONVERTIBLE.items():
        if (value := getattr(config, field)) not in values:
            return f"{field}={value!r} cannot be converted to CTranslate2; {' and '.join(map(repr, values))} can"
    if config.rope_scaling is not None:
        return "rope_scaling cannot be converted to CTranslate2"
    if config.module_heads is not None:
        return "module_heads cannot be converted to CTranslate2, where all attention modules have num_heads heads"
    return None
