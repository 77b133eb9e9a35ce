"""Facts of a loaded model: its description for clients, its tokenizer and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import Architecture, ModelConfig
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import Bundle, GenerationDefaults
from antiphon.rpc.v1.options import NO_DEFAULTS, default_options
from antiphon.runtime.explain import NextTokenScorer
from antiphon.runtime.lanes import AnyRunner
from antiphon.text.format import TextFormat
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb


class AttentionExplainer(Protocol):
    """Computes attention maps, one call at a time. Blocks."""

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> Mapping[str, NDArray[np.float32]]:
        """Return the maps for the tokens that the encoder and the decoder read, end and begin token included.

        By name: encoder_self [L, H, S, S], decoder_self [L, H, T, T] and cross [L, H, T, S] float32; an attention that
        the model lacks has no entry.
        type_ids: token types of the source; empty if all are 0. Raises Unsupported if there are too many weights.
        """

    def longest_target(self, source_len: int) -> int:
        """Return the largest number of decoder tokens whose maps, with those of a source, are not too many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Facts of a model that its servicer reads."""

    description: pb.Model
    """Message that clients get."""
    tokenizer: Tokenizer
    text: TextFormat
    """Conversion of texts to the model's ids."""
    config: ModelConfig
    explainer: AttentionExplainer | None = None
    """Computes attention maps; None if the bundle has no graph for them."""
    scorer: NextTokenScorer | None = None
    """Scores next tokens; None for encoder-only models and on a GPU."""
    read_position_tables: Callable[[], Mapping[str, NDArray[np.float32]]] | None = None
    """Reads the learned tables of positions by name, see antiphon.bundle.position_tables; None if there are none."""
    generation: GenerationDefaults = NO_DEFAULTS
    """Defaults of generation options."""
    shortlist: Shortlist | None = None
    """Likely target tokens of source tokens; None if the bundle has none, or no kernel reads it."""

    @property
    def is_decoder_only(self) -> bool:
        """True for a decoder-only model, whose source is a prompt."""
        return self.config.architecture == "decoder"


_PRECISIONS = {
    "float32": pb.PRECISION_FLOAT32,
    "int8": pb.PRECISION_INT8,
    "int4": pb.PRECISION_INT4,
    "bfloat16": pb.PRECISION_BFLOAT16,
    "float16": pb.PRECISION_FLOAT16,
}
_ARCHITECTURES: dict[Architecture, pb.Architecture.ValueType] = {
    "encoder-decoder": pb.ARCHITECTURE_ENCODER_DECODER,
    "encoder": pb.ARCHITECTURE_ENCODER,
    "decoder": pb.ARCHITECTURE_DECODER,
}
_TASKS: dict[Task, pb.Task.ValueType] = {
    "fill_mask": pb.TASK_FILL_MASK,
    "classify": pb.TASK_CLASSIFY,
    "tag": pb.TASK_TAG,
    "next_sentence": pb.TASK_NEXT_SENTENCE,
    "pool": pb.TASK_POOL,
}


def describe(
    bundle: Bundle,
    runner: AnyRunner,
    tokenizer: Tokenizer,
    *,
    max_source_len: int,
    max_message_bytes: int,
    max_text_bytes: int,
) -> pb.Model:
    """Return the description of a model that this runner serves. Raises InvalidArgument for invalid bundle defaults.

    max_source_len: length of the longest source that the server accepts, which may be below the runner's limit.
    """
    manifest = bundle.manifest
    config, text = manifest.model, manifest.text
    model = pb.Model(
        name=manifest.name,
        precision=_PRECISIONS[runner.facts.precision],
        vocabulary_size=config.vocab_size,
        limits=pb.Limits(
            max_source_len=max_source_len,
            max_target_len=runner.facts.max_target_len,
            max_message_bytes=max_message_bytes,
            max_text_bytes=max_text_bytes,
        ),
        device=pb.DEVICE_CUDA if runner.facts.lowering == "cuda" else pb.DEVICE_CPU,
        architecture=_ARCHITECTURES[config.architecture],
        tasks=[
            pb.TaskDescription(task=_TASKS[head.task], labels=head.labels)
            for head in config.heads
            if head.task in _TASKS  # the head for embed is a part of Embed
        ],
        languages=sorted(text.languages),
        mask_token="" if text.mask_id is None else tokenizer.piece(text.mask_id),
    )
    if runner.facts.has_decoder:
        model.default_options.CopyFrom(default_options(manifest.generation))
        model.cache.block_tokens = runner.facts.block_size
        model.cache.target_block_tokens = runner.facts.target_block_size
        model.cache.block_bytes = runner.facts.block_size * runner.facts.cache_bytes_per_token
        model.cache.num_blocks = runner.facts.num_blocks
    if manifest.provenance is not None:
        model.provenance.source = manifest.provenance.source
        model.provenance.licence = manifest.provenance.licence
        model.provenance.attribution = manifest.provenance.attribution
    return model
