"""PEGASUS (Zhang et al. 2020)."""

from __future__ import annotations

from pathlib import Path

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_decoder
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.text.format import TextFormat

# Padding, end, two mask tokens and 99 unused tokens come before the pieces of the SentencePiece model.
_OFFSET = 103
_UNKNOWN_ID = _OFFSET + 2


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: sinusoids "halves", pre-norm layers."""
    ids = encoder_decoder.special_ids(settings, pad=0, begin=0, eos=1, unk=0)
    fields = encoder_decoder.common_fields(settings)
    ids["unk_id"] = min(_UNKNOWN_ID, fields["vocab_size"] - 1)
    return encoder_decoder.configure(settings, **ids, sinusoids="halves", norm_placement="pre", output_bias=True)


def text(folder: Path, _: Settings, __: ModelConfig) -> TextFormat:
    """Return the text format of tokenizer.json: text, end token."""
    return tokenizers_format(folder)


FAMILY = Family(
    name="PEGASUS",
    model_types=("pegasus",),
    configure=configure,
    resolve=encoder_decoder.resolve_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
