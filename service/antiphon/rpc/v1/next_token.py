"""Distribution of the next token on request, stage by stage: reads the request, and computes in a thread.

A request is read by the code that reads requests to generate, so texts, options and languages have the same meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from antiphon.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.domain.ranges import check_tokens
from antiphon.domain.request import SamplingParams, Task
from antiphon.domain.tasks import Generate
from antiphon.engine.engine import Engine
from antiphon.engine.logits_processors import LogitsProcessors
from antiphon.ops.logits_warpers import Warp
from antiphon.ops.sampling import FLOAT_PARAMS, as_float32
from antiphon.ops.sampling_stages import Stage, StageDistribution, likeliest_ids, sampling_stages
from antiphon.rpc.v1.analysis_thread import AnalysisThread
from antiphon.rpc.v1.requests.arrivals import Context
from antiphon.rpc.v1.requests.options import prefix_field
from antiphon.rpc.v1.requests.request_reader import RequestReader
from antiphon.rpc.v1.served.served_model import ServedModel
from antiphon.runtime.next_token import Edits, NextTokenScorer
from antiphon.v1 import inference_pb2 as pb

DEFAULT_NUM_TOKENS = 20
MAX_NUM_TOKENS = 1000

_STAGES = {stage: pb.SamplingStage.Value(f"SAMPLING_STAGE_{stage.name}") for stage in Stage}


class NextTokens:
    """Answers the next-token requests to one model. For the event loop."""

    def __init__(self, model: ServedModel, engine: Engine, requests: RequestReader, thread: AnalysisThread) -> None:
        self._model = model
        self._engine = engine
        self._requests = requests
        self._thread = thread

    async def next_token(self, message: pb.NextTokenRequest, context: Context) -> pb.NextTokenResponse:
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

    def _checked_ids(self, message: pb.NextTokenRequest, request: Generate) -> tuple[int, ...]:
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

    def _source_and_prefix(self, request: Generate) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return source and prefix as the client gave them; a prompt is the source of a decoder-only model."""
        if not request.num_prompt_ids:
            return request.source_ids, request.prefix_ids
        given_ids = request.decoder_input_ids(self._model.config.bos_id)
        return given_ids[: request.num_prompt_ids], given_ids[request.num_prompt_ids :]

    def _response(
        self, scorer: NextTokenScorer, request: Generate, generated_ids: tuple[int, ...], num_tokens: int
    ) -> pb.NextTokenResponse:
        given_ids = request.decoder_input_ids(self._model.config.bos_id)
        edits = _edits(request.params, given_ids, generated_ids, self._model.config.eos_id)
        found = scorer.score(request.source_ids, (*given_ids, *generated_ids), edits)
        forced_id = None if generated_ids else request.params.forced_first_id
        stages = sampling_stages(found.logprobs, found.scores, _warp(request.params), forced_id=forced_id)
        token_ids = _reported_ids(stages, num_tokens)
        return pb.NextTokenResponse(
            token_ids=token_ids,
            pieces=[self._model.tokenizer.piece(token_id) for token_id in token_ids],
            stages=[_stage_message(stage, token_ids) for stage in stages],
        )


def _edits(params: SamplingParams, given_ids: Sequence[int], generated_ids: Sequence[int], eos_id: int) -> Edits:
    """Return the edits of the next token's logits, as a row of the engine has them after the same tokens."""
    processors = LogitsProcessors.of(params, given_ids, eos_id)
    if processors is None:
        return Edits()
    for token_id in generated_ids:
        processors.push(token_id)
    ids, values = processors.current()
    return Edits(ids=ids, values=values, is_exclusive=processors.is_exclusive)


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
