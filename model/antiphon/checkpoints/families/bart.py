"""BART (Lewis et al. 2020)."""

from __future__ import annotations

from pathlib import Path

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_decoder
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.text.format import TextFormat

_UNKNOWN_ID = 3


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: learned positions from row 2 on, a norm after the embeddings, post-norm layers."""
    ids = encoder_decoder.special_ids(settings, pad=1, begin=2, eos=2, unk=_UNKNOWN_ID)
    return encoder_decoder.configure(
        settings, **ids, positions="learned", positions_offset=2, embedding_norm=True, output_bias=True
    )


def text(folder: Path, _: Settings, __: ModelConfig) -> TextFormat:
    """Return the text format of tokenizer.json: begin token, text, end token."""
    return tokenizers_format(folder)


FAMILY = Family(
    name="BART",
    model_types=("bart",),
    configure=configure,
    resolve=encoder_decoder.resolve_ties,
    load=encoder_decoder.load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
