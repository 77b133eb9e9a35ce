"""Start of the target of a request that runs the decoder, by the kind of model."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.rpc.v1.served.served_model import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetStart:
    """Source of a request that runs the decoder, and the start of its target.

    A decoder-only model has no source: its prompt is the begin token and the first prefix_ids.
    """

    source_ids: tuple[int, ...]
    begin_id: int | None
    prefix_ids: tuple[int, ...]
    num_prompt_ids: int = 0


def start_of(
    model: ServedModel, source_ids: tuple[int, ...], prefix_ids: tuple[int, ...], begin_id: int | None
) -> TargetStart:
    """Return the start of a target after a source and a prefix. begin_id: None is the model's begin token."""
    if not model.is_decoder_only:
        return TargetStart(source_ids=source_ids, begin_id=begin_id, prefix_ids=prefix_ids)
    first_id, *rest = source_ids
    num_prompt_ids = len(source_ids)
    return TargetStart(source_ids=(), begin_id=first_id, prefix_ids=(*rest, *prefix_ids), num_prompt_ids=num_prompt_ids)
