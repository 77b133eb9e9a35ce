"""Settings of rotary positions in a Llama's config.json, in all places where transformers reads them."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from antiphon.checkpoints.families.decoder_only import LLAMA
from antiphon.errors import SourceError
from antiphon.transformer.positions import rotary_rates

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, hidden_act="silu",
    rms_norm_eps=1e-6, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3: dict[str, Any] = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(rope_theta=5e5),
        dict(rope_theta=5e5, rope_scaling=None),
        dict(rope_parameters=dict(rope_type="default", rope_theta=3e4)),
        dict(rope_theta=5e5, rope_parameters=dict(rope_type="default")),
        dict(rope_theta=3e4, rope_scaling=dict(type="linear", factor=2)),
        dict(rope_theta=3e4, rope_scaling=dict(rope_type="linear", type="dynamic", factor=2.5)),
        dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="default", rope_theta=3e4)),
        dict(rope_parameters={**LLAMA3, "rope_theta": 1e2, LENGTH: 64}),
        dict(rope_theta=1e2, rope_scaling={**LLAMA3, LENGTH: 64}),
        {"rope_theta": 1e2, "rope_scaling": {**LLAMA3, LENGTH: 64}, LENGTH: 32},
        {"rope_theta": 1e2, "rope_scaling": LLAMA3},
    ],
    ids=str,
)
def test_rotary_settings_are_read_as_by_transformers(settings: dict[str, Any]) -> None:
    """Each place of a value gives different rates here, for head width 8 and lengths of 32, 64 and 128."""
    config: Any = LlamaConfig.from_dict(copy.deepcopy(SIZES | settings))
    found = LLAMA.configure(SIZES | settings)
    rates = rotary_rates(8, found.rope_theta, found.rope_scaling, torch.device("cpu"))
    torch.testing.assert_close(rates, LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(rope_scaling=dict(type="yarn", factor=2.0)),
            "of type 'yarn'; supported are 'default', 'linear', 'llama3'",
        ),
        (dict(rope_scaling=dict(rope_type=None, type="linear")), "of type None"),
        (dict(rope_scaling=dict(rope_type=["linear"])), r"of type \['linear'\]"),
        (dict(rope_scaling=8.0), "rope_scaling or rope_parameters is 8.0, expected an object"),
        (dict(rope_scaling=dict(type="linear")), r"rope_scaling\.linear\.factor: Field required"),
        (dict(rope_scaling=dict(type="linear", factor="2")), r"rope_scaling\.linear\.factor: .*valid number"),
        (dict(rope_scaling={**LLAMA3, "factor": 0}), r"rope_scaling\.llama3\.factor: .*greater than or equal to 1"),
        (
            dict(rope_scaling={**LLAMA3, "high_freq_factor": 1}),
            r"high_freq_factor=1\.0 must be above low_freq_factor=1",
        ),
        (dict(rope_scaling={**LLAMA3, LENGTH: 64.5}), rf"rope_scaling\.llama3\.{LENGTH}: .*valid integer"),
        (dict(rope_theta=5e5, rope_parameters=dict(rope_theta="many")), "rope_theta: .*valid number"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; only 1.0"),
    ],
    ids=str,
)
def test_unsupported_rotary_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=f"^config.json.*{message}"):
        LLAMA.configure(SIZES | settings)
