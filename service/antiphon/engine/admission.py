"""Admission of requests: refuses those that can never run here, and computes the blocks of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from antiphon.architecture.heads import HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import TARGET_TASKS, Pooling, Request, Task, head_of
from antiphon.domain.sampling_params import check_tokens
from antiphon.engine.kv_cache import first_blocks, may_run_short
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.stream import RequestStream
from antiphon.ops.cache_geometry import blocks_for
from antiphon.runtime.runner import ModelFacts, Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Limits of the engine and of the model."""

    engine: EngineLimits
    facts: ModelFacts
    """Facts of the runner, with the longest source that the engine accepts, and only the heads that are tasks."""
    may_run_short: bool
    """Requests of one row take their blocks when they need them."""


def limits_of(runner: Runner, engine: EngineLimits) -> AdmissionLimits:
    """Return the limits of an engine with this runner; the longest source is one that the encode budget allows."""
    facts, max_source_len = runner.facts, runner.facts.max_source_len
    if engine.encode_budget is not None and facts.has_encoder:
        max_source_len = engine.encode_budget.longest_source(max_source_len)
    # The head for embed is a part of the vector that a model declares, and no task.
    heads: dict[HeadTask, HeadConfig] = {task: head for task, head in facts.heads.items() if task != "embed"}
    return AdmissionLimits(
        engine=engine,
        facts=replace(facts, max_source_len=max_source_len, heads=heads),
        may_run_short=may_run_short(runner, engine.max_num_seqs),
    )


def admit(request: Request, stream: RequestStream, limits: AdmissionLimits) -> SequenceGroup:
    """Build the waiting group of a request, with the number of blocks of its source and of its targets.

    Raises InvalidArgument for a request that could not run even alone, Unsupported for one that the graphs cannot run.
    """
    facts = limits.facts
    check_ability(request.task, request.pooling, limits)
    _check_source(request, limits)
    _check_rows(request, limits)
    num_rows, num_slots, max_new_tokens = _needs(request, limits)
    num_self_blocks = blocks_for(num_slots, facts.target_block_size)
    grows = limits.may_run_short and request.task is Task.GENERATE and num_rows == 1
    num_fed = 1 + len(request.prefix_ids)
    group = SequenceGroup(
        request=request,
        stream=stream,
        max_new_tokens=max_new_tokens,
        num_rows=num_rows,
        num_self_blocks=num_self_blocks,
        num_cross_blocks=blocks_for(len(request.source_ids), facts.block_size) if facts.has_decoder else 0,
        num_first_blocks=first_blocks(num_fed, num_self_blocks, facts.target_block_size) if grows else num_self_blocks,
        grows=grows,
        can_pause=request.task is Task.GENERATE and request.params.beam_width == 1,
    )
    if group.max_blocks > facts.num_blocks:
        raise _too_large(group, limits)
    return group


def check_ability(task: Task, pooling: Pooling, limits: AdmissionLimits) -> None:
    """Raise Unsupported if the model can never do this task; the error names the tasks that it can do."""
    if task in TARGET_TASKS:
        if not limits.facts.has_decoder:
            raise Unsupported(
                f"this is an encoder-only model, which generates nothing; it gives embeddings{_listed(limits)}"
            )
        return
    if not limits.facts.has_encoder:
        raise Unsupported("this is a decoder-only model, which encodes nothing; it generates and scores")
    head = head_of(task, pooling)
    if head is not None and head not in limits.facts.heads:
        raise Unsupported(f"this model has no {head} head; it gives embeddings{_listed(limits)}")


def _listed(limits: AdmissionLimits) -> str:
    return f" and has the heads {', '.join(sorted(limits.facts.heads))}" if limits.facts.heads else " and has no heads"


def _check_source(request: Request, limits: AdmissionLimits) -> None:
    if limits.facts.has_encoder:
        check_tokens("source", request.source_ids, 1, limits.facts.max_source_len, limits.facts.source_vocab_size)
        return
    prompt_ids = request.decoder_input_ids(0)[: request.num_prompt_ids]
    check_tokens("source", prompt_ids, 1, limits.facts.max_source_len, limits.facts.source_vocab_size)


def _needs(request: Request, limits: AdmissionLimits) -> tuple[int, int, int]:
    """Return the request's number of rows, and the target positions and the maximum of new tokens of each row."""
    if not request.has_target:
        return 0, 0, 0
    # A prompt counts as part of the target; the begin token of an encoder-decoder does not.
    num_given = len(request.prefix_ids) if limits.facts.has_encoder else 1 + len(request.prefix_ids)
    if request.task is Task.SCORE:
        # The last token is scored and never fed, so a target of the maximum length has room for the begin token.
        room = limits.facts.max_target_len - num_given
        check_tokens("target", request.target_ids, 1, room, limits.facts.vocab_size)
        return 1, len(request.prefix_ids) + len(request.target_ids), 1
    # There must be room for at least one generated token.
    prefix_ids = request.prefix_ids[max(0, request.num_prompt_ids - 1) :]
    longest = limits.facts.max_target_len - 1 - (num_given - len(prefix_ids))
    check_tokens("prefix", prefix_ids, 0, longest, limits.facts.vocab_size)
    room = limits.facts.max_target_len - num_given
    max_new_tokens = min(request.params.max_new_tokens or room, room)
    num_slots = min(1 + len(request.prefix_ids) + max_new_tokens, limits.facts.max_target_len)
    return request.params.num_rows, num_slots, max_new_tokens


def _check_rows(request: Request, limits: AdmissionLimits) -> None:
    params = request.params
    if request.task is not Task.GENERATE or params.num_rows == 1:
        return
    field = "beam_width" if params.beam_width > 1 else "num_return_sequences"
    if params.num_rows > limits.engine.max_num_seqs:
        raise InvalidArgument(field, params.num_rows, f"at most {limits.engine.max_num_seqs}, the rows of a batch")


def _too_large(group: SequenceGroup, limits: AdmissionLimits) -> InvalidArgument:
    request, rows = group.request, max(1, group.num_rows)
    prefix_len = len(request.prefix_ids) - max(0, request.num_prompt_ids - 1)
    room_blocks = (limits.facts.num_blocks - group.num_cross_blocks) // rows
    room = room_blocks * limits.facts.block_size - 1 - len(request.prefix_ids)
    asked_len = InWords(f"{request.num_source_tokens} tokens long")
    if room_blocks < 1:
        longest = (limits.facts.num_blocks - rows) * limits.facts.block_size
        return InvalidArgument("source", asked_len, f"at most {longest} tokens long")
    if request.num_prompt_ids and room + prefix_len < 1:
        return InvalidArgument("source", asked_len, f"at most {room_blocks * limits.facts.block_size - 1} tokens long")
    if request.task is Task.SCORE:
        target_len = len(request.target_ids)
        return InvalidArgument("target", InWords(f"{target_len} tokens long"), f"at most {room + 1} tokens long")
    if room < 1:
        return InvalidArgument(
            "prefix", InWords(f"{prefix_len} tokens long"), f"at most {prefix_len + room - 1} tokens long"
        )
    asked = request.params.max_new_tokens
    return InvalidArgument("max_new_tokens", asked, f"at most {room} for a source of this length and {rows} rows")
