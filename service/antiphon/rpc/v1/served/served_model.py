"""Description of a served model: its facts for clients, its tokenizer and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import GenerationDefaults
from antiphon.rpc.v1.answers.attention_maps import AttentionExplainer
from antiphon.rpc.v1.served.model_defaults import NO_DEFAULTS
from antiphon.runtime.next_token import NextTokenScorer
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Parts of a model that its servicer reads.

    description: message that clients get. text: conversion of texts to the model's ids.
    explainer: computes attention maps; None if the bundle has no graph for them.
    scorer: scores next tokens; None for encoder-only models and on a GPU.
    read_position_tables: reads the learned tables of positions by name, see antiphon.bundle.position_tables; None if
    the bundle has none. generation: defaults of generation options.
    """

    description: pb.Model
    tokenizer: Tokenizer
    text: TextFormat
    config: ModelConfig
    explainer: AttentionExplainer | None = None
    scorer: NextTokenScorer | None = None
    read_position_tables: Callable[[], Mapping[str, NDArray[np.float32]]] | None = None
    generation: GenerationDefaults = NO_DEFAULTS

    @property
    def is_decoder_only(self) -> bool:
        """True for a decoder-only model, whose source is a prompt."""
        return self.config.architecture == "decoder"
