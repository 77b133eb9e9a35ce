"""Calls that compute beside the engine, in a thread: Explain, NextToken and GetPositions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import Part
from antiphon.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.domain.request import Arrival, Request, Task
from antiphon.domain.sampling_params import SamplingParams, check_tokens
from antiphon.engine.logits_processors import LogitsProcessors
from antiphon.engine.remote import AnyEngine
from antiphon.ops.logits_warpers import Stage, StageDistribution, Warp, likeliest_ids, sampling_stages
from antiphon.ops.sampling import FLOAT_PARAMS, as_float32
from antiphon.rpc.context import RequestContext
from antiphon.rpc.v1.inputs import Inputs, Source
from antiphon.rpc.v1.languages import RequestLanguages, languages_of
from antiphon.rpc.v1.model_info import AttentionExplainer, ModelInfo
from antiphon.rpc.v1.options import prefix_field
from antiphon.rpc.v1.requests import Arrivals, RequestReader, start_of
from antiphon.rpc.v1.responses import last_of
from antiphon.rpc.v1.streaming import Submission
from antiphon.runtime.explain import (
    Edits,
    NextTokenScorer,
    PositionEncoding,
    PositionKind,
    longest_described,
    position_encodings,
)
from antiphon.v1 import inference_pb2 as pb

DEFAULT_NUM_TOKENS = 20
MAX_NUM_TOKENS = 1000
DEFAULT_POSITIONS = 64
MAX_POSITIONS = 512

_T = TypeVar("_T")


class AnalysisThread:
    """Runs the work of one call at a time, in the order of the calls. For the event loop.

    All these calls together take one core from the engine. The memory of a forward pass stays with each thread that
    ran one (20 MB for the explain graph of the shipped model), so they share one thread.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "analysis")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of the work. Raises Unavailable while the engine drains, and every error of the work."""
        self._engine.check_accepting()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExplainInputs:
    """Request as read."""

    message: pb.ExplainRequest
    context: RequestContext
    arrival: Arrival
    languages: RequestLanguages
    source: Source
    decoder_prefix_ids: tuple[int, ...]
    """All tokens that the decoder reads before the target; none if there is no decoder."""


class Explanations:
    """Answers the explain requests to one model. For the event loop."""

    def __init__(
        self, model: ModelInfo, inputs: Inputs, arrivals: Arrivals, submission: Submission, thread: AnalysisThread
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._arrivals = arrivals
        self._submission = submission
        self._thread = thread

    async def explain(self, message: pb.ExplainRequest, context: RequestContext) -> pb.ExplainResponse:
        """Return the attention maps of a source and a target, by default the greedy answer. Raises AntiphonError."""
        explainer = self._explainer()
        self._check_fields(message)
        inputs = await self._read(message, context)
        target_ids = await self._target_ids(inputs, explainer)
        self._check_tokens(inputs, target_ids)
        return await self._thread.run(
            partial(self._response, explainer, inputs.source, (*inputs.decoder_prefix_ids, *target_ids))
        )

    def _explainer(self) -> AttentionExplainer:
        if self._model.config.module_heads is not None:
            raise Unsupported(
                "attention maps need the same number of heads in every layer; this model has module_heads"
            )
        if self._model.explainer is None:
            raise Unsupported(
                "the bundle of this model has no explain graph; export it again, or import it with --explain, to add "
                "one"
            )
        return self._model.explainer

    @property
    def _has_decoder(self) -> bool:
        return self._model.config.decoder_layers > 0

    def _check_fields(self, message: pb.ExplainRequest) -> None:
        """Raise InvalidArgument for a field that this kind of model has no use for."""
        if (target := message.WhichOneof("target")) is not None and not self._has_decoder:
            target_value = message.target_text if target == "target_text" else list(message.target_token_ids.ids)
            raise InvalidArgument(target, target_value, "absent: an encoder-only model has no target")
        if message.HasField("text_pair") and self._has_decoder:
            raise InvalidArgument("text_pair", message.text_pair, "absent: only encoder-only models read pairs")

    async def _read(self, message: pb.ExplainRequest, context: RequestContext) -> _ExplainInputs:
        arrival = self._arrivals.next(message, context)
        languages = languages_of(self._model.text, message)
        source = await self._inputs.source(message, languages, caller=context.caller)
        return _ExplainInputs(
            message=message,
            context=context,
            arrival=arrival,
            languages=languages,
            source=source,
            decoder_prefix_ids=self._decoder_prefix_ids(source, languages.begin_id),
        )

    def _decoder_prefix_ids(self, source: Source, begin_id: int | None) -> tuple[int, ...]:
        if not self._has_decoder:
            return ()
        if self._model.is_decoder_only:
            return source.ids
        return (self._model.config.bos_id if begin_id is None else begin_id,)

    async def _target_ids(self, inputs: _ExplainInputs, explainer: AttentionExplainer) -> tuple[int, ...]:
        """Return the given target, else the model's greedy answer; empty for an encoder-only model."""
        if not self._has_decoder:
            return ()
        target_ids = await self._inputs.target_ids(inputs.message, inputs.languages, caller=inputs.context.caller)
        return await self._greedy_answer(inputs, explainer) if target_ids is None else target_ids

    async def _greedy_answer(self, inputs: _ExplainInputs, explainer: AttentionExplainer) -> tuple[int, ...]:
        """Return the model's answer, which ends where the maps would become too many."""
        start = start_of(self._model, inputs.source.ids, (), inputs.languages.begin_id)
        num_explained = explainer.longest_target(len(start.source_ids)) - len(inputs.decoder_prefix_ids)
        params = SamplingParams(max_new_tokens=max(1, min(num_explained, self._longest_target(inputs))))
        request = Request(
            task=Task.GENERATE,
            arrival=inputs.arrival,
            source_ids=start.source_ids,
            begin_id=start.begin_id,
            prefix_ids=start.prefix_ids,
            num_prompt_ids=start.num_prompt_ids,
            params=inputs.languages.params(params, ()),
            is_streamed=False,
        )
        return last_of(await self._submission.collect(inputs.message, request, inputs.context.record)).token_ids

    def _longest_target(self, inputs: _ExplainInputs) -> int:
        """Return the largest number of target tokens; those that the decoder reads before them count too."""
        return self._model.description.limits.max_target_len - len(inputs.decoder_prefix_ids)

    def _check_tokens(self, inputs: _ExplainInputs, target_ids: tuple[int, ...]) -> None:
        """Raise InvalidArgument for a source or target that the model cannot read."""
        message, config = inputs.message, self._model.config
        limits, field = self._model.description.limits, message.WhichOneof("source") or "source"
        check_tokens(field, inputs.source.ids, 1, limits.max_source_len, config.resolved_source_vocab_size)
        if self._has_decoder:
            check_tokens(
                message.WhichOneof("target") or "target", target_ids, 0, self._longest_target(inputs), config.vocab_size
            )

    def _response(
        self, explainer: AttentionExplainer, source: Source, decoder_ids: tuple[int, ...]
    ) -> pb.ExplainResponse:
        tokenizer = self._model.tokenizer
        encoder_ids = () if self._model.is_decoder_only else source.ids
        return explain_response(
            explainer.explain(encoder_ids, decoder_ids, source.type_ids),
            source_tokens=[tokenizer.source_piece(token_id) for token_id in source.ids],
            target_tokens=[tokenizer.piece(token_id) for token_id in decoder_ids],
        )


def explain_response(
    weights: Mapping[str, NDArray[np.float32]], *, source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> pb.ExplainResponse:
    """Return attention weights as a message. Takes time in proportion to their number: not for an event loop."""
    return pb.ExplainResponse(
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        **{name: _maps(maps) for name, maps in weights.items()},
    )


def mean_entropies(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the entropy in nats of each query's weights, averaged over queries: [L, H] from [L, H, queries, keys]."""
    wide = weights.astype(np.float64)
    logs = np.log(wide, out=np.zeros_like(wide), where=wide > 0)
    entropies: NDArray[np.float64] = -(wide * logs).sum(axis=-1).mean(axis=-1)
    return entropies


def _maps(weights: NDArray[np.float32]) -> list[pb.AttentionMap]:
    num_layers, num_heads, rows, columns = weights.shape
    entropies = mean_entropies(weights)
    return [
        pb.AttentionMap(
            layer=layer,
            head=head,
            rows=rows,
            columns=columns,
            weights=weights[layer, head].ravel().tolist(),
            entropy=entropies[layer, head],
        )
        for layer in range(num_layers)
        for head in range(num_heads)
    ]


_STAGES = {stage: pb.SamplingStage.Value(f"SAMPLING_STAGE_{stage.name}") for stage in Stage}


class NextTokens:
    """Answers the next-token requests to one model. For the event loop.

    A request is read by the code that reads requests to generate, so texts, options and languages have the same
    meaning.
    """

    def __init__(self, model: ModelInfo, engine: AnyEngine, requests: RequestReader, thread: AnalysisThread) -> None:
        self._model = model
        self._engine = engine
        self._requests = requests
        self._thread = thread

    async def next_token(self, message: pb.NextTokenRequest, context: RequestContext) -> pb.NextTokenResponse:
        """Return the distribution of the next token after every stage. Raises AntiphonError."""
        self._engine.check_ability(Task.GENERATE)
        if self._model.scorer is None:
            raise Unsupported("this model runs on a GPU; a server on the processor gives next-token distributions")
        if message.num_tokens > MAX_NUM_TOKENS:
            raise InvalidArgument("num_tokens", message.num_tokens, f"0 to {MAX_NUM_TOKENS}")
        request, _ = await self._requests.generate(message, context, is_streamed=False)
        generated_ids = self._checked_ids(message, request)
        num_tokens = message.num_tokens or DEFAULT_NUM_TOKENS
        return await self._thread.run(partial(self._response, self._model.scorer, request, generated_ids, num_tokens))

    def _checked_ids(self, message: pb.NextTokenRequest, request: Request) -> tuple[int, ...]:
        """Return the generated tokens. Raises InvalidArgument for a source or target that Generate could not reach."""
        limits, config = self._model.description.limits, self._model.config
        source_ids, prefix_ids = self._source_and_prefix(request)
        source_field, source_vocab_size = message.WhichOneof("source") or "source", config.resolved_source_vocab_size
        check_tokens(source_field, source_ids, 1, limits.max_source_len, source_vocab_size)
        room = limits.max_target_len - 1 - request.num_prompt_ids  # the target also holds the next token
        check_tokens(prefix_field(message.options), prefix_ids, 0, room, config.vocab_size)
        generated_ids = tuple(message.generated_ids.ids)
        check_tokens("generated_ids", generated_ids, 0, room - len(prefix_ids), config.vocab_size)
        if config.eos_id in generated_ids:
            raise InvalidArgument("generated_ids", InWords(f"holding the end token {config.eos_id}"), "without it")
        return generated_ids

    def _source_and_prefix(self, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return source and prefix as the client gave them; a prompt is the source of a decoder-only model."""
        if not request.num_prompt_ids:
            return request.source_ids, request.prefix_ids
        decoder_ids = request.decoder_input_ids(self._model.config.bos_id)
        return decoder_ids[: request.num_prompt_ids], decoder_ids[request.num_prompt_ids :]

    def _response(
        self, scorer: NextTokenScorer, request: Request, generated_ids: tuple[int, ...], num_tokens: int
    ) -> pb.NextTokenResponse:
        decoder_ids = request.decoder_input_ids(self._model.config.bos_id)
        edits = _edits(request, decoder_ids, generated_ids, self._model.config.eos_id)
        score = scorer.score(request.source_ids, (*decoder_ids, *generated_ids), edits)
        forced_id = None if generated_ids else request.params.forced_first_id
        stages = sampling_stages(score.logprobs, score.scores, _warp(request.params), forced_id=forced_id)
        token_ids = _reported_ids(stages, num_tokens)
        return pb.NextTokenResponse(
            token_ids=token_ids,
            pieces=[self._model.tokenizer.piece(token_id) for token_id in token_ids],
            stages=[_stage_message(stage, token_ids) for stage in stages],
        )


def _edits(request: Request, decoder_ids: Sequence[int], generated_ids: Sequence[int], eos_id: int) -> Edits:
    """Return the edits of the next token's logits, as a row of the engine has them after the same tokens."""
    processors = LogitsProcessors.of(request.params, decoder_ids, eos_id, request.candidate_ids)
    if processors is None:
        return Edits()
    for token_id in generated_ids:
        processors.push(token_id)
    ids, values = processors.current()
    return Edits(ids=ids, values=values, restriction=processors.restriction)


def _warp(params: SamplingParams) -> Warp:
    """Return the parameters of the warpers, as a row of the engine has them."""
    return Warp(top_k=params.top_k, **{name: as_float32(getattr(params, name)) for name in FLOAT_PARAMS})


def _reported_ids(stages: Sequence[StageDistribution], num_tokens: int) -> list[int]:
    """Return the likeliest tokens of the model, then those of the last stage that are not among them."""
    ends = (stages[0].logprobs, stages[-1].logprobs)
    first, last = (likeliest_ids(logprobs.astype(np.float32), num_tokens).tolist() for logprobs in ends)
    return list(dict.fromkeys([*first, *last]))


def _stage_message(stage: StageDistribution, token_ids: Sequence[int]) -> pb.StageDistribution:
    return pb.StageDistribution(
        stage=_STAGES[stage.stage],
        logprobs=stage.logprobs[token_ids].tolist(),
        num_kept=stage.num_kept,
        entropy=stage.entropy,
    )


_PARTS: dict[Part, pb.Architecture.ValueType] = {
    "encoder": pb.ARCHITECTURE_ENCODER,
    "decoder": pb.ARCHITECTURE_DECODER,
}
_KINDS: dict[PositionKind, pb.PositionKind.ValueType] = {
    "none": pb.POSITION_KIND_NONE,
    "sinusoidal": pb.POSITION_KIND_SINUSOIDAL,
    "learned": pb.POSITION_KIND_LEARNED,
    "relative": pb.POSITION_KIND_RELATIVE,
    "rotary": pb.POSITION_KIND_ROTARY,
    "alibi": pb.POSITION_KIND_ALIBI,
    "disentangled": pb.POSITION_KIND_DISENTANGLED,
}


class Positions:
    """Describes the positions of one model. For the event loop."""

    def __init__(self, model: ModelInfo, thread: AnalysisThread) -> None:
        self._model = model
        self._thread = thread

    async def get(self, message: pb.GetPositionsRequest) -> pb.GetPositionsResponse:
        """Return the table of each part's positions, and the effect of distance. Raises AntiphonError."""
        most = min(MAX_POSITIONS, longest_described(self._model.config))
        if message.num_positions > most:
            raise InvalidArgument("num_positions", message.num_positions, f"0 to {most}")
        num_positions = message.num_positions or min(DEFAULT_POSITIONS, most)
        return await self._thread.run(partial(self._response, num_positions))

    def _response(self, num_positions: int) -> pb.GetPositionsResponse:
        read = self._model.read_position_tables
        encodings = position_encodings(self._model.config, num_positions, {} if read is None else read())
        return pb.GetPositionsResponse(encodings=map(_message, encodings))


def _message(encoding: PositionEncoding) -> pb.PositionEncoding:
    rows, columns = encoding.table.shape
    return pb.PositionEncoding(
        part=_PARTS[encoding.part],
        kind=_KINDS[encoding.kind],
        rows=rows,
        columns=columns,
        values=encoding.table.ravel().tolist(),
        decay=encoding.decay.tolist(),
    )
