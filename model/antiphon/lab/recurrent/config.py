"""Validated shape of the LSTM encoder-decoder."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RecurrentConfig(BaseModel):
    """Shape of the LSTM encoder-decoder. Raises pydantic.ValidationError naming the wrong field.

    d_model: width of embeddings, of the decoder's state and of the memory; each direction of the encoder has half.
    Lengths are in tokens and include begin and end tokens; they limit only the data, because the model has no
    positions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: Literal["lstm"] = "lstm"
    vocab_size: int = Field(ge=4, le=1_000_000)
    d_model: int = Field(ge=8, le=16384, multiple_of=2)
    encoder_layers: int = Field(default=1, ge=1, le=128)
    decoder_layers: int = Field(default=1, ge=1, le=128)
    dropout: float = Field(default=0.1, ge=0, lt=1, description="On embeddings, between layers and before the output.")
    max_source_len: int = Field(default=256, ge=1, le=65536)
    max_target_len: int = Field(default=256, ge=1, le=65536)
    pad_id: int = Field(default=0, ge=0)
    bos_id: int = Field(default=1, ge=0, description="First decoder input.")
    eos_id: int = Field(default=2, ge=0)
    unk_id: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} must be below vocab_size={self.vocab_size}")
        return self
