"""Attention maps on request: reads the source and target, and computes the maps in a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from antiphon.service.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.service.domain.ranges import check_vocabulary
from antiphon.service.domain.request import Arrival, SamplingParams
from antiphon.service.domain.tasks import Generate
from antiphon.service.rpc.v1.answers.answers import last_of
from antiphon.service.rpc.v1.answers.attention_maps import AttentionExplainer, explain_response
from antiphon.service.rpc.v1.requests.arrivals import Arrivals, Context
from antiphon.service.rpc.v1.requests.inputs import Inputs
from antiphon.service.rpc.v1.requests.languages import RequestLanguages, languages_of
from antiphon.service.rpc.v1.served.served_model import ServedModel
from antiphon.service.rpc.v1.submission import Submission
from antiphon.v1 import inference_pb2 as pb

_KINDS = {"encoder": "an encoder-only model", "decoder": "a decoder-only model"}


class Explanations:
    """Answers the explain requests to one model. For the event loop."""

    def __init__(self, model: ServedModel, inputs: Inputs, arrivals: Arrivals, submission: Submission) -> None:
        self._model = model
        self._inputs = inputs
        self._arrivals = arrivals
        self._submission = submission
        # One thread: the memory of a forward pass (20 MB for the shipped model) stays with each thread that ran one.
        self._thread = ThreadPoolExecutor(1, "explain")

    async def explain(self, message: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Return the attention maps of a source and a target, by default the greedy answer. Raises AntiphonError."""
        explainer = self._explainer()
        arrival = self._arrivals.next(message, context)
        languages = languages_of(self._model.text, message)
        source_ids = (await self._inputs.source(message, languages)).ids
        target_ids = await self._inputs.target_ids(message, languages)
        if target_ids is None:
            target_ids = await self._greedy_answer(message, arrival, source_ids, languages)
        self._check(message, source_ids, target_ids)
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._response, explainer, source_ids, target_ids, languages.begin_id
        )

    def _explainer(self) -> AttentionExplainer:
        if (architecture := self._model.config.architecture) != "encoder-decoder":
            raise Unsupported(f"this is {_KINDS[architecture]}; attention maps need an encoder-decoder model")
        if self._model.explainer is None:
            raise Unsupported("the bundle of this model has no explain graph; export it again to add one")
        return self._model.explainer

    async def _greedy_answer(
        self, message: pb.ExplainRequest, arrival: Arrival, source_ids: tuple[int, ...], languages: RequestLanguages
    ) -> tuple[int, ...]:
        # One token fewer than the model's limit: a map has a row for the begin token too.
        params = SamplingParams(max_new_tokens=max(1, self._model.description.limits.max_target_len - 1))
        request = Generate(
            arrival=arrival,
            source_ids=source_ids,
            begin_id=languages.begin_id,
            params=languages.params(params, ()),
            is_streamed=False,
        )
        return last_of(await self._submission.collect(message, request)).token_ids

    def _check(self, message: pb.ExplainRequest, source_ids: tuple[int, ...], target_ids: tuple[int, ...]) -> None:
        limits = self._model.description.limits
        longest = {"source": limits.max_source_len, "target": limits.max_target_len - 1}  # the begin token comes first
        config = self._model.config
        vocab_sizes = {"source": config.resolved_source_vocab_size, "target": config.vocab_size}
        for side, ids in (("source", source_ids), ("target", target_ids)):
            field = message.WhichOneof(side) or side  # type: ignore[call-overload]
            check_vocabulary(field, ids, vocab_sizes[side])
            if len(ids) > longest[side]:
                raise InvalidArgument(field, InWords(f"{len(ids)} tokens long"), f"at most {longest[side]} tokens long")

    def _response(
        self,
        explainer: AttentionExplainer,
        source_ids: tuple[int, ...],
        target_ids: tuple[int, ...],
        begin_id: int | None,
    ) -> pb.ExplainResponse:
        first_id = self._model.config.bos_id if begin_id is None else begin_id
        tokenizer = self._model.tokenizer
        return explain_response(
            explainer.explain(source_ids, target_ids, begin_id),
            source_tokens=[tokenizer.source_piece(token_id) for token_id in source_ids],
            target_tokens=[tokenizer.piece(token_id) for token_id in (first_id, *target_ids)],
        )
