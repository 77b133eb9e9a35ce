"""antiphon.v1.InferenceService: protobuf in, domain objects out, and back. Decides nothing.

Here a message becomes a Request, events become messages, and a client that hangs up becomes a cancellation. What may
be asked is checked by `options.py` and by the engine's admission; texts are read by `inputs.py`, answers worded by
`answers.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc.aio

from antiphon.model.bundle.manifest import GenerationDefaults
from antiphon.model.config import ModelConfig
from antiphon.model.text.format import TextFormat
from antiphon.model.text.tokenizer import Tokenizer
from antiphon.service.domain.caller import caller_of
from antiphon.service.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.service.domain.ranges import check_vocabulary
from antiphon.service.domain.request import (
    Pooling,
    Priority,
    Readout,
    Request,
    SamplingParams,
    Task,
    TokenEvent,
    head_of,
)
from antiphon.service.engine.engine import Engine
from antiphon.service.engine.stream import OutputStream
from antiphon.service.observability.call import current_call
from antiphon.service.rpc.calls.deadline import remaining_s
from antiphon.service.rpc.v1.answers import Answer, Wording, last_of, logprobs, timing, usage
from antiphon.service.rpc.v1.attention_maps import Explains, explain_response
from antiphon.service.rpc.v1.encoder_answers import label_scores, masked_places, tagged_spans, tagged_tokens
from antiphon.service.rpc.v1.inputs import HasSource, Inputs, Source
from antiphon.service.rpc.v1.languages import RequestLanguages, languages_of, source_languages
from antiphon.service.rpc.v1.long_texts import LongTexts
from antiphon.service.rpc.v1.model_defaults import NO_DEFAULTS
from antiphon.service.rpc.v1.options import as_option, read_options
from antiphon.service.rpc.v1.pacing import Pacing
from antiphon.service.rpc.v1.reading import reading
from antiphon.v1 import inference_pb2 as pb

_Context = grpc.aio.ServicerContext[Any, Any]
_GenerateRequest = pb.GenerateRequest | pb.GenerateUnaryRequest
Asked = HasSource | pb.TagRequest

_POOLING = {
    pb.POOLING_UNSPECIFIED: Pooling.MEAN,
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
_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BATCH: Priority.BATCH,
}
_ALONE = {"encoder": "an encoder alone", "decoder": "a decoder alone"}
DEFAULT_FILLINGS = 5
MAX_FILLINGS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What the servicer tells of the model, the tokenizer it reads and writes with, and what explains its attention.

    text, config: how texts become the model's ids, and what it is.
    explainer: None where the bundle has no graph for it. generation: what options take that a request leaves out.
    """

    description: pb.Model
    tokenizer: Tokenizer
    text: TextFormat
    config: ModelConfig
    explainer: Explains | None = None
    generation: GenerationDefaults = NO_DEFAULTS


class InferenceServicer:
    """The RPC methods of one model and its engine, for requests that name it.

    Methods raise AntiphonError; `rpc.py` tells the client.
    """

    def __init__(self, model: ServedModel, engine: Engine, pacing: Pacing, long_texts: LongTexts) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._inputs = Inputs(model.tokenizer, model.text, model.config, model.description.limits, long_texts)
        self._engine = engine
        self._pacing = pacing
        self._is_decoder = model.config.architecture == "decoder"
        self._ids = itertools.count()
        # One thread: what a run takes (20 MB for the shipped model) stays with each thread that ever ran one.
        self._explaining = ThreadPoolExecutor(1, "explain")

    async def generate(self, message: pb.GenerateRequest, context: _Context) -> None:
        """Stream the outputs in deltas."""
        request, wording = await self._generation(message, context)
        answer = Answer(request, wording)
        stream = self._submit(message, request)
        writer = self._pacing.writer(context)
        with self._pacing.stream(), reading(self._engine, request, stream):
            async for event in stream:
                response = answer.delta(event)
                if response is not None:
                    await writer.write(response)

    async def generate_unary(self, message: pb.GenerateUnaryRequest, context: _Context) -> pb.GenerateUnaryResponse:
        """Return the outputs whole."""
        request, wording = await self._generation(message, context)
        return Answer(request, wording).whole(await self._collect(message, request))

    async def score(self, message: pb.ScoreRequest, context: _Context) -> pb.ScoreResponse:
        """Return the log-probability of each token of a given target."""
        self._engine.check_ability(Task.SCORE)
        arrival = self._arrival(message, context)
        languages = languages_of(self._model.text, message)
        request = Request(
            **arrival,
            **self._given((await self._inputs.source(message, languages)).ids, (), languages),
            target_ids=await self._inputs.ended_target_ids(message, languages),
            task=Task.SCORE,
            params=_scoring(message.num_alternatives),
            is_streamed=False,
        )
        event = last_of(await self._collect(message, request))
        return pb.ScoreResponse(
            logprobs=logprobs(event.logprobs),
            score=event.score or 0.0,
            usage=pb.Usage(source_tokens=request.num_source_tokens),
            timing=timing(event.timing),
        )

    async def embed(self, message: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        """Return a source's encoder states, pooled or as they are."""
        pooling = _POOLING.get(message.pooling)
        if pooling is None:
            raise InvalidArgument("pooling", message.pooling, "one of the values of Pooling")
        self._engine.check_ability(Task.EMBED, pooling)
        arrival = self._arrival(message, context)
        source = await self._inputs.source(message, source_languages(self._model.text, message.source_language))
        picks = (0,) if pooling is Pooling.MODEL else ()
        asked = dict(task=Task.EMBED, picks=picks, pooling=pooling, normalize=message.normalize)
        readout, about = await self._read(message, source, arrival | asked)
        return pb.EmbedResponse(embedding=readout.values.ravel().tolist(), **about)

    async def classify(self, message: pb.ClassifyRequest, context: _Context) -> pb.ClassifyResponse:
        """Return the labels of a text or a pair."""
        task = _CLASSIFYING.get(message.task)
        if task is None:
            raise InvalidArgument("task", message.task, "TASK_CLASSIFY or TASK_NEXT_SENTENCE")
        self._engine.check_ability(task)
        if task is Task.NEXT_SENTENCE and not message.HasField("text_pair"):
            raise InvalidArgument("text_pair", None, "set where task is TASK_NEXT_SENTENCE")
        arrival = self._arrival(message, context)
        source = await self._inputs.source(message)
        readout, about = await self._read(message, source, arrival | dict(task=task, picks=(0,)))
        return pb.ClassifyResponse(labels=label_scores(readout, self._labels(task), message.top_k), **about)

    async def tag(self, message: pb.TagRequest, context: _Context) -> pb.TagResponse:
        """Return the label of every token of a text, and the spans they form."""
        self._engine.check_ability(Task.TAG)
        arrival = self._arrival(message, context)
        source = await self._inputs.text_source(message.text)
        picks = tuple(range(source.first, source.first + len(source.offsets)))
        readout, about = await self._read(message, source, arrival | dict(task=Task.TAG, picks=picks))
        ids = source.ids[picks[0] : picks[-1] + 1]
        tokens = tagged_tokens(readout, self._labels(Task.TAG), ids, source.offsets)
        return pb.TagResponse(tokens=tokens, spans=tagged_spans(message.text, tokens), **about)

    async def fill_mask(self, message: pb.FillMaskRequest, context: _Context) -> pb.FillMaskResponse:
        """Return the likeliest tokens of every masked place."""
        self._engine.check_ability(Task.FILL_MASK)
        if message.top_k > MAX_FILLINGS:
            raise InvalidArgument("top_k", message.top_k, f"0 to {MAX_FILLINGS}")
        arrival = self._arrival(message, context)
        source = await self._inputs.source(message)
        mask_id = self._model.text.mask_id
        picks = tuple(position for position, token_id in enumerate(source.ids) if token_id == mask_id)
        if not picks:
            given, token = message.WhichOneof("source") or "source", self._model.description.mask_token
            raise InvalidArgument(
                given, InWords("without a mask token"), f"with {token}, token id {mask_id}, once at least"
            )
        asked = dict(task=Task.FILL_MASK, picks=picks, num_fillings=message.top_k or DEFAULT_FILLINGS)
        readout, about = await self._read(message, source, arrival | asked)
        return pb.FillMaskResponse(places=masked_places(readout, picks, self._tokenizer), **about)

    async def explain(self, message: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        """Return the attention maps of a source and a target, which is the greedy answer where none is given."""
        if (architecture := self._model.config.architecture) != "encoder-decoder":
            raise Unsupported(f"this model is {_ALONE[architecture]}; attention maps are of a source and its target")
        explainer = self._model.explainer
        if explainer is None:
            raise Unsupported("this model's bundle holds no graph that shows attention; export it again to add one")
        arrival = self._arrival(message, context)
        languages = languages_of(self._model.text, message)
        source_ids = (await self._inputs.source(message, languages)).ids
        target_ids = await self._inputs.target_ids(message, languages)
        if target_ids is None:
            target_ids = await self._greedy_answer(message, arrival, source_ids, languages)
        self._check_explainable(message, source_ids, target_ids)
        explaining = asyncio.get_running_loop().run_in_executor(
            self._explaining, self._explain, explainer, source_ids, target_ids, languages.begin_id
        )
        return await explaining

    async def tokenize(self, message: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Return a text's token ids and its normalised form."""
        token_ids, normalized = await self._inputs.tokenized(message.text)
        return pb.TokenizeResponse(token_ids=token_ids, normalized_text=normalized)

    async def detokenize(self, message: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        return pb.DetokenizeResponse(text=await self._inputs.detokenized(message.token_ids))

    async def get_model(self, message: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        """Describe the model."""
        return pb.GetModelResponse(model=self._model.description)

    async def _generation(self, message: _GenerateRequest, context: _Context) -> tuple[Request, Wording]:
        self._engine.check_ability(Task.GENERATE)
        arrival = self._arrival(message, context)
        languages = languages_of(self._model.text, message)
        controls = read_options(message.options, self._model.config.vocab_size, self._model.generation)
        prefix_ids = await self._inputs.prefix_ids(controls, languages)
        source_ids = (await self._inputs.source(message, languages)).ids
        # The text of a decoder alone continues its prompt as well.
        read_ids = (*source_ids, *prefix_ids) if self._is_decoder else prefix_ids
        read_text = controls.prefix_text or (message.text if self._is_decoder and not prefix_ids else "")
        wording = Wording(
            self._tokenizer, prefix_ids=read_ids, prefix_text=read_text, stop_strings=controls.stop_strings
        )
        request = Request(
            **arrival,
            **self._given(source_ids, prefix_ids, languages),
            params=languages.params(controls.params, prefix_ids),
            stop_matcher=wording.matcher if controls.stop_strings else None,
            is_streamed=isinstance(message, pb.GenerateRequest),
        )
        return request, wording

    def _given(
        self, source_ids: tuple[int, ...], prefix_ids: tuple[int, ...], languages: RequestLanguages
    ) -> dict[str, Any]:
        """A Request's source and what begins its target: of a decoder alone the source itself, as its prompt."""
        if not self._is_decoder:
            return {"source_ids": source_ids, "begin_id": languages.begin_id, "prefix_ids": prefix_ids}
        begin_id, *rest = source_ids
        given_ids = (*rest, *prefix_ids)
        return {"source_ids": (), "begin_id": begin_id, "prefix_ids": given_ids, "num_prompt_ids": len(source_ids)}

    async def _read(self, message: Asked, source: Source, asked: dict[str, Any]) -> tuple[Readout, dict[str, Any]]:
        """What a source's states came to, and the answer's usage and timing. asked: the other fields of the Request."""
        request = Request(
            **asked, source_ids=source.ids, type_ids=source.type_ids, params=SamplingParams(), is_streamed=False
        )
        event = last_of(await self._collect(message, request))
        assert event.readout is not None
        return event.readout, {"usage": usage(request, event), "timing": timing(event.timing)}

    def _labels(self, task: Task) -> tuple[str, ...]:
        return next(head.labels for head in self._model.config.heads if head.task == head_of(task))

    def _arrival(self, message: Asked | pb.ExplainRequest, context: _Context) -> dict[str, Any]:
        """Whose request this is, its id, arrival and deadline; to be taken before anything is tokenised."""
        priority = _PRIORITIES.get(message.priority)
        if priority is None:
            raise InvalidArgument("priority", message.priority, "PRIORITY_INTERACTIVE or PRIORITY_BATCH")
        call = current_call()
        client = caller_of(context) if call is None else call.caller
        self._engine.check_room(client, priority)
        arrival_s = self._engine.clock()
        left_s = remaining_s(context)
        deadline_s = None if left_s is None else arrival_s + left_s
        return {
            # The client's ids need not be different from each other.
            "request_id": f"{call.request_id if call else ''}/{next(self._ids)}",
            "trace_id": call.trace_id if call else "",
            "arrival_s": arrival_s,
            "deadline_s": deadline_s,
            "client": client,
            "priority": priority,
        }

    def _submit(self, message: Asked, request: Request) -> OutputStream:
        stream = OutputStream(request.request_id, coalesce_s=self._pacing.window_s)
        try:
            self._engine.submit(request, stream)
        except InvalidArgument as error:
            raise _in_terms_of(message, error) from None
        return stream

    async def _collect(self, message: Asked, request: Request) -> Sequence[TokenEvent]:
        stream = self._submit(message, request)
        with reading(self._engine, request, stream):
            return await stream.collect()

    async def _greedy_answer(
        self,
        message: pb.ExplainRequest,
        arrival: dict[str, Any],
        source_ids: tuple[int, ...],
        languages: RequestLanguages,
    ) -> tuple[int, ...]:
        # One token less than the model could: a map has a row for the begin token too.
        params = SamplingParams(max_new_tokens=max(1, self._model.description.limits.max_target_len - 1))
        request = Request(
            **arrival,
            source_ids=source_ids,
            begin_id=languages.begin_id,
            params=languages.params(params, ()),
            is_streamed=False,
        )
        return last_of(await self._collect(message, request)).token_ids

    def _check_explainable(
        self, message: pb.ExplainRequest, source_ids: tuple[int, ...], target_ids: tuple[int, ...]
    ) -> None:
        limits = self._model.description.limits
        longest = {"source": limits.max_source_len, "target": limits.max_target_len - 1}  # the begin token comes first
        config = self._model.config
        vocab_sizes = {"source": config.resolved_source_vocab_size, "target": config.vocab_size}
        for side, ids in (("source", source_ids), ("target", target_ids)):
            field = message.WhichOneof(side) or side  # type: ignore[call-overload]
            check_vocabulary(field, ids, vocab_sizes[side])
            if len(ids) > longest[side]:
                raise InvalidArgument(field, InWords(f"{len(ids)} tokens long"), f"at most {longest[side]} tokens long")

    def _explain(
        self, explainer: Explains, source_ids: tuple[int, ...], target_ids: tuple[int, ...], begin_id: int | None
    ) -> pb.ExplainResponse:
        first_id = self._model.config.bos_id if begin_id is None else begin_id
        return explain_response(
            explainer.explain(source_ids, target_ids, begin_id),
            source_tokens=[self._tokenizer.source_piece(token_id) for token_id in source_ids],
            target_tokens=[self._tokenizer.piece(token_id) for token_id in (first_id, *target_ids)],
        )


def _scoring(num_alternatives: int) -> SamplingParams:
    try:
        return SamplingParams(num_logprobs=num_alternatives)
    except InvalidArgument as error:
        raise InvalidArgument("num_alternatives", error.value, error.allowed) from None


def _in_terms_of(message: Asked, error: InvalidArgument) -> InvalidArgument:
    """The engine's complaint with the field named as the client knows it."""
    if error.field == "source":
        given = "text" if isinstance(message, pb.TagRequest) else message.WhichOneof("source")
        return InvalidArgument(given or error.field, error.value, error.allowed)
    if error.field == "target" and isinstance(message, pb.ScoreRequest):
        return InvalidArgument(message.WhichOneof("target") or error.field, error.value, error.allowed)
    if error.field == "prefix" and isinstance(message, _GenerateRequest):
        field = "prefix_text" if message.options.HasField("prefix_text") else "prefix_ids"
        return InvalidArgument(f"options.{field}", error.value, error.allowed)
    return as_option(error) if isinstance(message, _GenerateRequest) else error
