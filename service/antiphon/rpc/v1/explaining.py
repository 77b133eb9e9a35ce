"""Attention maps on request: reads the source and target, and computes the maps in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.domain.ranges import check_tokens
from antiphon.domain.request import Arrival, SamplingParams
from antiphon.domain.tasks import Generate
from antiphon.rpc.v1.analysis_thread import AnalysisThread
from antiphon.rpc.v1.answers.answers import last_of
from antiphon.rpc.v1.answers.attention_maps import AttentionExplainer, explain_response
from antiphon.rpc.v1.requests.arrivals import Arrivals, Context
from antiphon.rpc.v1.requests.inputs import Inputs, Source
from antiphon.rpc.v1.requests.languages import RequestLanguages, languages_of
from antiphon.rpc.v1.requests.target_start import start_of
from antiphon.rpc.v1.served.served_model import ServedModel
from antiphon.rpc.v1.submission import Submission
from antiphon.v1 import inference_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Request as read. given_ids: all tokens that the decoder reads before the target; none if there is no decoder."""

    message: pb.ExplainRequest
    arrival: Arrival
    languages: RequestLanguages
    source: Source
    given_ids: tuple[int, ...]


class Explanations:
    """Answers the explain requests to one model. For the event loop."""

    def __init__(
        self, model: ServedModel, inputs: Inputs, arrivals: Arrivals, submission: Submission, thread: AnalysisThread
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._arrivals = arrivals
        self._submission = submission
        self._thread = thread

    async def explain(self, message: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Return the attention maps of a source and a target, by default the greedy answer. Raises AntiphonError."""
        explainer = self._explainer()
        self._check_fields(message)
        asked = await self._read(message, context)
        target_ids = await self._target_ids(asked, explainer)
        self._check_tokens(asked, target_ids)
        return await self._thread.run(partial(self._response, explainer, asked.source, (*asked.given_ids, *target_ids)))

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
            found = message.target_text if target == "target_text" else list(message.target_token_ids.ids)
            raise InvalidArgument(target, found, "absent: an encoder-only model has no target")
        if message.HasField("text_pair") and self._has_decoder:
            raise InvalidArgument("text_pair", message.text_pair, "absent: only encoder-only models read pairs")

    async def _read(self, message: pb.ExplainRequest, context: Context) -> _Asked:
        arrival = self._arrivals.next(message, context)
        languages = languages_of(self._model.text, message)
        source = await self._inputs.source(message, languages)
        return _Asked(
            message=message,
            arrival=arrival,
            languages=languages,
            source=source,
            given_ids=self._given_ids(source, languages.begin_id),
        )

    def _given_ids(self, source: Source, begin_id: int | None) -> tuple[int, ...]:
        if not self._has_decoder:
            return ()
        if self._model.is_decoder_only:
            return source.ids
        return (self._model.config.bos_id if begin_id is None else begin_id,)

    async def _target_ids(self, asked: _Asked, explainer: AttentionExplainer) -> tuple[int, ...]:
        """Return the given target, else the model's greedy answer; empty for an encoder-only model."""
        if not self._has_decoder:
            return ()
        given = await self._inputs.target_ids(asked.message, asked.languages)
        return await self._greedy_answer(asked, explainer) if given is None else given

    async def _greedy_answer(self, asked: _Asked, explainer: AttentionExplainer) -> tuple[int, ...]:
        """Return the model's answer, which ends where the maps would become too many."""
        start = start_of(self._model, asked.source.ids, (), asked.languages.begin_id)
        num_explained = explainer.longest_target(len(start.source_ids)) - len(asked.given_ids)
        params = SamplingParams(max_new_tokens=max(1, min(num_explained, self._longest_target(asked))))
        request = Generate(
            arrival=asked.arrival,
            source_ids=start.source_ids,
            begin_id=start.begin_id,
            prefix_ids=start.prefix_ids,
            num_prompt_ids=start.num_prompt_ids,
            params=asked.languages.params(params, ()),
            is_streamed=False,
        )
        return last_of(await self._submission.collect(asked.message, request)).token_ids

    def _longest_target(self, asked: _Asked) -> int:
        """Return the largest number of target tokens; those that the decoder reads before them count too."""
        return self._model.description.limits.max_target_len - len(asked.given_ids)

    def _check_tokens(self, asked: _Asked, target_ids: tuple[int, ...]) -> None:
        """Raise InvalidArgument for a source or target that the model cannot read."""
        message, config = asked.message, self._model.config
        limits, field = self._model.description.limits, message.WhichOneof("source") or "source"
        check_tokens(field, asked.source.ids, 1, limits.max_source_len, config.resolved_source_vocab_size)
        if self._has_decoder:
            check_tokens(
                message.WhichOneof("target") or "target", target_ids, 0, self._longest_target(asked), config.vocab_size
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
