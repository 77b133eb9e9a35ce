"""Attention maps on request: reads the source and target, and computes the maps in a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from antiphon.service.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.service.domain.ranges import check_vocabulary
from antiphon.service.domain.request import Arrival, SamplingParams
from antiphon.service.domain.tasks import Generate
from antiphon.service.rpc.v1.answers.answers import last_of
from antiphon.service.rpc.v1.answers.attention_maps import AttentionExplainer, explain_response
from antiphon.service.rpc.v1.requests.arrivals import Arrivals, Context
from antiphon.service.rpc.v1.requests.inputs import Inputs, Source
from antiphon.service.rpc.v1.requests.languages import RequestLanguages, languages_of
from antiphon.service.rpc.v1.requests.target_start import start_of
from antiphon.service.rpc.v1.served.served_model import ServedModel
from antiphon.service.rpc.v1.submission import Submission
from antiphon.v1 import inference_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """Tokens that the maps show: of the source as the client sent it, and all that the decoder reads."""

    source: Source
    decoder_ids: tuple[int, ...]


class Explanations:
    """Answers the explain requests to one model. For the event loop."""

    def __init__(
        self, model: ServedModel, inputs: Inputs, arrivals: Arrivals, submission: Submission, thread: Executor
    ) -> None:
        """thread: of one worker, because each thread that ran a graph keeps the memory of a forward pass."""
        self._model = model
        self._inputs = inputs
        self._arrivals = arrivals
        self._submission = submission
        self._thread = thread

    async def explain(self, message: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Return the attention maps of a source and a target, by default the greedy answer. Raises AntiphonError."""
        explainer = self._explainer()
        self._check_fields(message)
        arrival = self._arrivals.next(message, context)
        languages = languages_of(self._model.text, message)
        source = await self._inputs.source(message, languages)
        target_ids: tuple[int, ...] | None = ()
        if self._has_decoder:
            target_ids = await self._inputs.target_ids(message, languages)
        if target_ids is None:
            target_ids = await self._greedy_answer(message, arrival, source.ids, languages)
        self._check(message, source.ids, target_ids)
        tokens = _Tokens(source=source, decoder_ids=self._decoder_ids(source.ids, target_ids, languages.begin_id))
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._response, explainer, tokens)

    def _explainer(self) -> AttentionExplainer:
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
            found = message.target_text if target == "target_text" else list(message.target_token_ids.ids)
            raise InvalidArgument(target, found, "absent: an encoder-only model has no target")
        if message.HasField("text_pair") and self._has_decoder:
            raise InvalidArgument("text_pair", message.text_pair, "absent: only encoder-only models read pairs")

    async def _greedy_answer(
        self, message: pb.ExplainRequest, arrival: Arrival, source_ids: tuple[int, ...], languages: RequestLanguages
    ) -> tuple[int, ...]:
        """Return the model's answer, which ends where the maps would become too many."""
        start = start_of(self._model, source_ids, (), languages.begin_id)
        num_given = len(self._decoder_ids(source_ids, (), languages.begin_id))
        num_explained = self._explainer().longest_target(len(start.source_ids)) - num_given
        params = SamplingParams(max_new_tokens=max(1, min(num_explained, self._longest_target(num_given))))
        request = Generate(
            arrival=arrival,
            source_ids=start.source_ids,
            begin_id=start.begin_id,
            prefix_ids=start.prefix_ids,
            num_prompt_ids=start.num_prompt_ids,
            params=languages.params(params, ()),
            is_streamed=False,
        )
        return last_of(await self._submission.collect(message, request)).token_ids

    def _longest_target(self, num_given: int) -> int:
        """Return the largest number of target tokens after those that the decoder reads before them."""
        return self._model.description.limits.max_target_len - num_given

    def _check(self, message: pb.ExplainRequest, source_ids: tuple[int, ...], target_ids: tuple[int, ...]) -> None:
        config = self._model.config
        longest_target = self._longest_target(len(self._decoder_ids(source_ids, (), None)))
        longest = {"source": self._model.description.limits.max_source_len, "target": longest_target}
        vocab_sizes = {"source": config.resolved_source_vocab_size, "target": config.vocab_size}
        for side, ids in (("source", source_ids), ("target", target_ids)):
            field = message.WhichOneof(side) or side  # type: ignore[call-overload]
            check_vocabulary(field, ids, vocab_sizes[side])
            if ids and len(ids) > longest[side]:
                raise InvalidArgument(field, InWords(f"{len(ids)} tokens long"), f"at most {longest[side]} tokens long")

    def _decoder_ids(
        self, source_ids: tuple[int, ...], target_ids: tuple[int, ...], begin_id: int | None
    ) -> tuple[int, ...]:
        """Return all tokens that the decoder reads; none if there is no decoder."""
        if not self._has_decoder:
            return ()
        if self._model.is_decoder_only:
            return (*source_ids, *target_ids)
        return (self._model.config.bos_id if begin_id is None else begin_id, *target_ids)

    def _response(self, explainer: AttentionExplainer, tokens: _Tokens) -> pb.ExplainResponse:
        source, tokenizer = tokens.source, self._model.tokenizer
        encoder_ids = () if self._model.is_decoder_only else source.ids
        return explain_response(
            explainer.explain(encoder_ids, tokens.decoder_ids, source.type_ids),
            source_tokens=[tokenizer.source_piece(token_id) for token_id in source.ids],
            target_tokens=[tokenizer.piece(token_id) for token_id in tokens.decoder_ids],
        )
