"""RoBERTa (Liu et al. 2019), CamemBERT (Martin et al. 2020) and XLM-R (Conneau et al. 2020)."""

from __future__ import annotations

from functools import partial

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_only
from antiphon.checkpoints.families.architectures.encoder_only import EncoderNames, HeadNames
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, setting

_PAD_ID = 1
_NAMES = EncoderNames(
    prefix="roberta.",
    heads=(
        HeadNames(
            task="fill_mask",
            transform="lm_head.dense",
            activation="gelu",
            norm="lm_head.layer_norm",
            output="lm_head.decoder",
            output_biases=("lm_head.decoder.bias", "lm_head.bias"),
        ),
        HeadNames(task="classify", transform="classifier.dense", activation="tanh", output="classifier.out_proj"),
        HeadNames(task="tag", output="classifier"),
        HeadNames(task="pool", transform="pooler.dense", activation="tanh"),
    ),
)


def configure(settings: Settings) -> ModelConfig:
    """Return BERT's shape; the first position is the row after the padding id, which is -1 if there is no padding."""
    pad = setting(settings, "pad_token_id", int, default=_PAD_ID)
    fields = encoder_only.bert_fields(settings)
    return encoder_only.configure(settings, _NAMES, **fields, pad_id=max(pad, 0), positions_offset=pad + 1)


FAMILY = Family(
    name="RoBERTa",
    model_types=("roberta", "xlm-roberta", "camembert"),
    configure=configure,
    resolve=partial(encoder_only.resolve, names=_NAMES),
    load=partial(encoder_only.load, names=_NAMES),
    text=lambda folder, settings, config: encoder_only.text(folder, config, "<mask>"),
    reference="AutoModel",
)
