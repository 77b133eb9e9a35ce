"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from functools import partial

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_only
from antiphon.checkpoints.families.architectures.encoder_only import EncoderNames, HeadNames
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings

_NAMES = EncoderNames(
    prefix="bert.",
    heads=(
        HeadNames(
            task="fill_mask",
            transform="cls.predictions.transform.dense",
            norm="cls.predictions.transform.LayerNorm",
            output="cls.predictions.decoder",
            output_biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
        HeadNames(
            task="next_sentence",
            transform="pooler.dense",
            activation="tanh",
            output="cls.seq_relationship",
            labels=("is_next", "not_next"),
        ),
        HeadNames(task="classify", transform="pooler.dense", activation="tanh", output="classifier"),
        HeadNames(task="tag", output="classifier"),
        HeadNames(task="pool", transform="pooler.dense", activation="tanh"),
    ),
)


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: learned positions and token types, a norm after the embeddings, post-norm layers."""
    return encoder_only.configure(settings, _NAMES, **encoder_only.bert_fields(settings))


FAMILY = Family(
    name="BERT",
    model_types=("bert",),
    configure=configure,
    resolve=partial(encoder_only.resolve, names=_NAMES),
    load=partial(encoder_only.load, names=_NAMES),
    text=lambda folder, settings, config: encoder_only.text(folder, config, "[MASK]"),
    reference="AutoModel",
)
