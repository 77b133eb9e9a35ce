"""`generate` of transformers with any function from a target to logits: the reference for sampling and beam search.

The model has an encoder that does nothing and a decoder that calls the function, without a cache, one row at a time. So
tests compare only the search and the logits processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

LogitsOf = Callable[[tuple[int, ...]], NDArray[np.float32]]
"""Logits [V] after a target, the begin token first."""


class _Config(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "antiphon-reference"


class _Encoder(nn.Module):
    main_input_name = "input_ids"

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return BaseModelOutput(last_hidden_state=torch.zeros(*input_ids.shape, 1))


class Reference(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A sequence-to-sequence model whose logits are the result of a function."""

    config_class = _Config
    main_input_name = "input_ids"

    def __init__(self, logits_of: LogitsOf, *, bos_id: int, eos_id: int, pad_id: int = 0) -> None:
        super().__init__(_Config(is_encoder_decoder=True))
        self._logits_of = logits_of
        self._encoder = _Encoder()
        self._unused = nn.Parameter(torch.zeros(1))
        self.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            decoder_start_token_id=bos_id, bos_token_id=bos_id, eos_token_id=eos_id, pad_token_id=pad_id
        )

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        return self._encoder

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, decoder_input_ids: Tensor, **options: Any
    ) -> dict[str, Any]:
        return {"decoder_input_ids": decoder_input_ids, "encoder_outputs": options.get("encoder_outputs")}

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> Seq2SeqLMOutput:
        rows = [torch.from_numpy(self._logits_of(tuple(row))) for row in inputs["decoder_input_ids"].tolist()]
        return Seq2SeqLMOutput(logits=torch.stack(rows)[:, None])


def search(
    reference: Reference,
    *,
    max_new_tokens: int,
    prefix: Sequence[int] = (),
    permits: Callable[[int, Any], list[int]] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    **options: Any,
) -> Any:
    """Return the object that `generate` returns for one source: sequences, scores and indices of beams.

    permits: see `prefix_allowed_tokens_fn` of transformers. processors: run after transformers' own.
    """
    asked = {"max_new_tokens": max_new_tokens, "do_sample": False} | options
    return _generate(reference, prefix, asked, prefix_allowed_tokens_fn=permits, logits_processor=processors)


def generate(
    reference: Reference, *, prefix: Sequence[int] = (), **options: Any
) -> list[tuple[list[int], float | None]]:
    """Return the result of `search`: ids after the prefix, without the end token, and scores."""
    eos_id = reference.generation_config.eos_token_id
    made = search(reference, prefix=prefix, **options)
    ends = {eos_id} if isinstance(eos_id, int) else set(eos_id)
    ends |= set(options.get("eos_token_id", ())) if not isinstance(options.get("eos_token_id"), int) else set()
    targets = [_until_end(row[1 + len(prefix) :].tolist(), ends) for row in made.sequences]
    scores = getattr(made, "sequences_scores", None)
    return list(zip(targets, [None] * len(targets) if scores is None else scores.tolist(), strict=True))


def next_scores(reference: Reference, prefix: Sequence[int], **options: Any) -> Tensor:
    """Return the scores [V] from which transformers samples the token after a prefix, after all logits processors."""
    asked = {"max_new_tokens": 2, "do_sample": True} | options  # 2: so that min_new_tokens may be 2
    made = _generate(reference, prefix, asked, logits_processor=())
    return cast(Tensor, made.scores[0][0])


def _generate(
    reference: Reference,
    prefix: Sequence[int],
    options: dict[str, Any],
    *,
    logits_processor: Sequence[LogitsProcessor],
    **arguments: Any,
) -> Any:
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **reference.generation_config.to_diff_dict()
        | {"use_cache": False, "return_dict_in_generate": True, "output_scores": True}
        | options
    )
    return cast(Any, reference).generate(
        torch.zeros(1, 1, dtype=torch.int64),
        decoder_input_ids=torch.tensor([[reference.generation_config.decoder_start_token_id, *prefix]]),
        generation_config=config,
        logits_processor=LogitsProcessorList(logits_processor),
        **arguments,
    )


def _until_end(token_ids: list[int], ends: set[int]) -> list[int]:
    return next((token_ids[:index] for index, token_id in enumerate(token_ids) if token_id in ends), token_ids)
