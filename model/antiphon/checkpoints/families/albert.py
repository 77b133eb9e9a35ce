"""ALBERT (Lan et al. 2020): BERT with narrow embeddings and one set of weights for all layers."""

from __future__ import annotations

from functools import partial

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_only
from antiphon.checkpoints.families.architectures.encoder_only import EncoderNames, HeadNames
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, refuse_unless, setting

_NAMES = EncoderNames(
    prefix="albert.",
    widen="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.0.albert_layers.{index}",
    qkv=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    inner="ffn",
    outer="ffn_output",
    norm="full_layer_layer_norm",
    heads=(
        HeadNames(
            task="fill_mask",
            transform="predictions.dense",
            norm="predictions.LayerNorm",
            output="predictions.decoder",
            output_biases=("predictions.decoder.bias", "predictions.bias"),
        ),
        # Sentence order prediction (section 3.1): are two texts in their original order or swapped? BERT's task is to
        # recognise unrelated texts.
        HeadNames(
            task="next_sentence",
            transform="pooler",
            activation="tanh",
            output="sop_classifier.classifier",
            labels=("in_order", "swapped"),
        ),
        HeadNames(task="classify", transform="pooler", activation="tanh", output="classifier"),
        HeadNames(task="tag", output="classifier"),
        HeadNames(task="pool", transform="pooler", activation="tanh"),
    ),
)


def configure(settings: Settings) -> ModelConfig:
    """Return BERT's shape with shared layers. More than one group of layers is refused; no published model has it."""
    for name in ("num_hidden_groups", "inner_group_num"):
        refuse_unless(settings, name, only=1, default=1)
    return encoder_only.configure(
        settings,
        _NAMES,
        **encoder_only.bert_fields(settings),
        embedding_width=setting(settings, "embedding_size", int),
        share_layers=True,
    )


FAMILY = Family(
    name="ALBERT",
    model_types=("albert",),
    configure=configure,
    resolve=partial(encoder_only.resolve, names=_NAMES),
    load=partial(encoder_only.load, names=_NAMES),
    text=lambda folder, settings, config: encoder_only.text(folder, config, "[MASK]"),
    reference="AutoModel",
)
