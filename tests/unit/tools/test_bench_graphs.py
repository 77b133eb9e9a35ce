"""Section `graphs`: the multiply-adds that it compares runs with."""

import pytest
from torch import nn

from antiphon.architecture.config import preset
from antiphon.tools.bench.graphs import Work
from antiphon.transformer.random_model import random_transformer


@pytest.mark.parametrize("is_gated", [False, True])
def test_work_counts_every_weight_of_the_model_once(is_gated: bool) -> None:
    """Keys and values of sources are made once."""
    config = preset("tiny", encoder_layers=2, decoder_layers=3, gated=is_gated, head_dim=24, vocab_size=90)
    model = random_transformer(config)
    assert model.encoder is not None
    encoder, whole = (
        sum(module.weight.numel() for module in part.modules() if isinstance(module, nn.Linear))
        for part in (model.encoder, model)
    )
    work = Work.of(config)
    cross_keys = config.decoder_layers * 2 * config.d_model * config.attention_width
    assert work.source == encoder + cross_keys
    assert work.target == whole - encoder - cross_keys
