"""Reads messages of the contract into typed requests of the engine.

Checks every field, tokenises the texts, and takes the arrival of a request before it reads a text. The field checks of
generation options are in `options.py`, those of texts and ids in `inputs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.errors import InvalidArgument, InWords
from antiphon.domain.request import Arrival, Pooling, Priority, Request, Task
from antiphon.domain.sampling_params import Controls, SamplingParams
from antiphon.engine.remote import AnyEngine
from antiphon.rpc.context import RequestContext
from antiphon.rpc.v1.inputs import HasSource, Inputs, Source
from antiphon.rpc.v1.languages import HasOptions, languages_of, source_languages
from antiphon.rpc.v1.model_info import ModelInfo
from antiphon.rpc.v1.options import OptionReader
from antiphon.rpc.v1.responses import Detokenizer
from antiphon.v1 import inference_pb2 as pb

EngineMessage = HasSource | pb.TagRequest
"""Messages whose requests run on the engine."""

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BATCH: Priority.BATCH,
}


class Arrivals:
    """Gives arrivals to the requests of one engine. For the event loop."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    def next(self, message: EngineMessage, context: RequestContext) -> Arrival:
        """Return the arrival of a request. Raises InvalidArgument, or QueueFull if full."""
        priority = _PRIORITIES.get(message.priority)
        if priority is None:
            raise InvalidArgument("priority", message.priority, "PRIORITY_INTERACTIVE or PRIORITY_BATCH")
        self._engine.check_room(context.caller, priority)
        arrival_s = self._engine.clock()
        left_s = context.remaining_s()
        return Arrival(
            # The number makes the id unique: clients may send the same id twice.
            request_id=f"{context.request_id}/{next(self._engine.request_numbers)}",
            arrival_s=arrival_s,
            deadline_s=None if left_s is None else arrival_s + left_s,
            client=context.caller,
            priority=priority,
            trace_id=context.record.trace_id,
        )


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
    model: ModelInfo, source_ids: tuple[int, ...], prefix_ids: tuple[int, ...], begin_id: int | None
) -> TargetStart:
    """Return the start of a target after a source and a prefix. begin_id: None is the model's begin token."""
    if not model.is_decoder_only:
        return TargetStart(source_ids=source_ids, begin_id=begin_id, prefix_ids=prefix_ids)
    first_id, *rest = source_ids
    num_prompt_ids = len(source_ids)
    return TargetStart(source_ids=(), begin_id=first_id, prefix_ids=(*rest, *prefix_ids), num_prompt_ids=num_prompt_ids)


_POOLING = {
    pb.POOLING_MEAN: Pooling.MEAN,
    pb.POOLING_MAX: Pooling.MAX,
    pb.POOLING_FIRST: Pooling.FIRST,
    pb.POOLING_MODEL: Pooling.MODEL,
    pb.POOLING_NONE: Pooling.NONE,
}
_CLASSIFYING = {
    pb.TASK_UNSPECIFIED: Task.CLASSIFY,
    pb.TASK_CLASSIFY: Task.CLASSIFY,
    pb.TASK_NEXT_SENTENCE: Task.NEXT_SENTENCE,
}
DEFAULT_FILLINGS = 5
MAX_FILLINGS = 100


class RequestReader:
    """Reads the messages to one model. For the event loop."""

    def __init__(self, model: ModelInfo, engine: AnyEngine, inputs: Inputs, arrivals: Arrivals) -> None:
        self._model = model
        self._options = OptionReader(model.config.vocab_size, model.generation)
        self._engine = engine
        self._inputs = inputs
        self._arrivals = arrivals

    async def generate(
        self, message: HasOptions, context: RequestContext, *, is_streamed: bool
    ) -> tuple[Request, Detokenizer]:
        """Read a request to generate, and the detokenizer of its answer. Raises AntiphonError."""
        self._engine.check_ability(Task.GENERATE)
        arrival = self._arrivals.next(message, context)
        languages = languages_of(self._model.text, message)
        controls = self._options.read(message.options)
        prefix_ids = await self._inputs.prefix_ids(controls, languages, caller=context.caller)
        source_ids = (await self._inputs.source(message, languages, caller=context.caller)).ids
        detokenizer = self._detokenizer(message, controls, source_ids, prefix_ids)
        params = languages.params(controls.params, prefix_ids)
        start = start_of(self._model, source_ids, prefix_ids, languages.begin_id)
        request = Request(
            task=Task.GENERATE,
            arrival=arrival,
            source_ids=start.source_ids,
            begin_id=start.begin_id,
            prefix_ids=start.prefix_ids,
            num_prompt_ids=start.num_prompt_ids,
            params=params,
            candidate_ids=self._candidate_ids(params, source_ids),
            stop_matcher=detokenizer.matcher if controls.stop_strings else None,
            is_streamed=is_streamed,
            reports_beam_steps=_reports_beam_steps(message, controls),
        )
        return request, detokenizer

    async def score(self, message: pb.ScoreRequest, context: RequestContext) -> Request:
        """Read a request to score a target. Raises AntiphonError."""
        self._engine.check_ability(Task.SCORE)
        arrival = self._arrivals.next(message, context)
        languages = languages_of(self._model.text, message)
        source = await self._inputs.source(message, languages, caller=context.caller)
        start = start_of(self._model, source.ids, (), languages.begin_id)
        return Request(
            task=Task.SCORE,
            arrival=arrival,
            source_ids=start.source_ids,
            begin_id=start.begin_id,
            prefix_ids=start.prefix_ids,
            num_prompt_ids=start.num_prompt_ids,
            target_ids=await self._inputs.ended_target_ids(message, languages, caller=context.caller),
            num_alternatives=message.num_alternatives,
        )

    async def embed(self, message: pb.EmbedRequest, context: RequestContext) -> Request:
        """Read a request for a source's encoder states. Raises AntiphonError.

        Without a pooling it asks for the vector that the model declares, or for the mean if it declares none.
        """
        declared = self._model.config.embedding
        default = Pooling.MEAN if declared is None else Pooling.DECLARED
        pooling = _POOLING.get(message.pooling) if message.pooling else default
        if pooling is None:
            raise InvalidArgument("pooling", message.pooling, "one of the values of Pooling")
        self._engine.check_ability(Task.EMBED, pooling)
        arrival = self._arrivals.next(message, context)
        if declared is not None and declared.prompt and pooling is Pooling.DECLARED:
            message = _prompted(message, declared.prompt)
        source = await self._inputs.source(
            message, source_languages(self._model.text, message.source_language), caller=context.caller
        )
        return Request(
            task=Task.EMBED,
            arrival=arrival,
            source_ids=source.ids,
            type_ids=source.type_ids,
            pooling=pooling,
            normalize=message.normalize,
        )

    async def classify(self, message: pb.ClassifyRequest, context: RequestContext) -> Request:
        """Read a request for the labels of a text or a pair. Raises AntiphonError."""
        task = _CLASSIFYING.get(message.task)
        if task is None:
            raise InvalidArgument("task", message.task, "TASK_CLASSIFY or TASK_NEXT_SENTENCE")
        self._engine.check_ability(task)
        if task is Task.NEXT_SENTENCE and not message.HasField("text_pair"):
            raise InvalidArgument("text_pair", None, "set if task is TASK_NEXT_SENTENCE")
        arrival = self._arrivals.next(message, context)
        source = await self._inputs.source(message, caller=context.caller)
        return Request(arrival=arrival, task=task, source_ids=source.ids, type_ids=source.type_ids, picks=(0,))

    async def tag(self, message: pb.TagRequest, context: RequestContext) -> tuple[Request, Source]:
        """Read a request for the label of every token of a text, and its source. Raises AntiphonError."""
        self._engine.check_ability(Task.TAG)
        arrival = self._arrivals.next(message, context)
        source = await self._inputs.text_source(message.text, caller=context.caller)
        picks = tuple(range(source.first, source.first + len(source.offsets)))
        request = Request(arrival=arrival, task=Task.TAG, source_ids=source.ids, type_ids=source.type_ids, picks=picks)
        return request, source

    async def fill_mask(self, message: pb.FillMaskRequest, context: RequestContext) -> Request:
        """Read a request for the likeliest tokens of every masked position. Raises AntiphonError."""
        self._engine.check_ability(Task.FILL_MASK)
        if message.top_k > MAX_FILLINGS:
            raise InvalidArgument("top_k", message.top_k, f"0 to {MAX_FILLINGS}")
        arrival = self._arrivals.next(message, context)
        source = await self._inputs.source(message, caller=context.caller)
        return Request(
            arrival=arrival,
            task=Task.FILL_MASK,
            source_ids=source.ids,
            type_ids=source.type_ids,
            picks=self._masked_positions(message, source),
            num_fillings=message.top_k or DEFAULT_FILLINGS,
        )

    def _candidate_ids(self, params: SamplingParams, source_ids: tuple[int, ...]) -> NDArray[np.int32] | None:
        """Return the candidates for a source by the model's shortlist, or None if it is not asked for."""
        if not params.use_shortlist:
            return None
        shortlist = self._model.shortlist
        if shortlist is None:
            raise InvalidArgument("options.use_shortlist", True, "false: the model has no shortlist, or is on a GPU")
        forced = () if params.forced_first_id is None else (params.forced_first_id,)
        return np.union1d(shortlist.candidates(source_ids), (self._model.config.eos_id, *forced)).astype(np.int32)

    def _detokenizer(
        self, message: HasOptions, controls: Controls, source_ids: tuple[int, ...], prefix_ids: tuple[int, ...]
    ) -> Detokenizer:
        """Return the decoder of the answer. The text of a decoder-only model continues its prompt too."""
        prefix_text = controls.prefix_text or ""
        if self._model.is_decoder_only:
            prefix_text = prefix_text or ("" if prefix_ids else message.text)
            prefix_ids = (*source_ids, *prefix_ids)
        return Detokenizer(
            self._model.tokenizer, prefix_ids=prefix_ids, prefix_text=prefix_text, stop_strings=controls.stop_strings
        )

    def _masked_positions(self, message: HasSource, source: Source) -> tuple[int, ...]:
        mask_id = self._model.text.mask_id
        positions = tuple(position for position, token_id in enumerate(source.ids) if token_id == mask_id)
        if not positions:
            field, token = message.WhichOneof("source") or "source", self._model.description.mask_token
            value, allowed = InWords("without a mask token"), f"with {token}, token id {mask_id}, once at least"
            raise InvalidArgument(field, value, allowed)
        return positions


def _prompted(message: pb.EmbedRequest, prompt: str) -> pb.EmbedRequest:
    """Return a request with the prompt before its text; token ids stay as they are."""
    if not message.HasField("text"):
        return message
    prompted = pb.EmbedRequest()
    prompted.CopyFrom(message)
    prompted.text = prompt + message.text
    return prompted


def _reports_beam_steps(message: HasOptions, controls: Controls) -> bool:
    """Return whether a request asks for the steps of its beam search. Raises InvalidArgument if it has none."""
    if isinstance(message, pb.NextTokenRequest) or not message.report_beam_steps:
        return False
    if controls.params.beam_width == 1:
        allowed = "false if options.beam_width is 1: without beams there are no steps to report"
        raise InvalidArgument("report_beam_steps", True, allowed)
    return True
