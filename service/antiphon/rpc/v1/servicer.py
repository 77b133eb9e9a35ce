"""RPC methods of antiphon.v1.InferenceService for one model.

Reads a message into a typed request, submits it, and writes its events as messages. `requests.py` reads,
`streaming.py` submits, `responses.py` writes the answers.
"""

from __future__ import annotations

from antiphon.domain.request import EncoderOutputs, Request, Task, TokenEvent, head_of
from antiphon.engine.remote import AnyEngine
from antiphon.rpc.context import RequestContext
from antiphon.rpc.v1.analysis import AnalysisThread, Explanations, NextTokens, Positions
from antiphon.rpc.v1.inputs import Inputs, LongTexts
from antiphon.rpc.v1.model_info import ModelInfo
from antiphon.rpc.v1.requests import Arrivals, EngineMessage, RequestReader
from antiphon.rpc.v1.responses import (
    Answer,
    label_scores,
    last_of,
    logprobs,
    masked_places,
    tagged_spans,
    tagged_tokens,
    timing,
    usage,
)
from antiphon.rpc.v1.streaming import Pacing, Submission, Submitted
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb


class InferenceServicer:
    """RPC methods of one model and its engine, for requests that name it.

    Methods raise AntiphonError; `middleware.py` converts it to a status.
    """

    def __init__(self, model: ModelInfo, engine: AnyEngine, pacing: Pacing, long_texts: LongTexts) -> None:
        self._model = model
        self._inputs = Inputs(model.tokenizer, model.text, model.config, model.description.limits, long_texts)
        arrivals = Arrivals(engine)
        self._requests = RequestReader(model, engine, self._inputs, arrivals)
        self._submission = Submission(engine, pacing)
        thread = AnalysisThread(engine)
        self._explanations = Explanations(model, self._inputs, arrivals, self._submission, thread)
        self._positions = Positions(model, thread)
        self._next_tokens = NextTokens(model, engine, self._requests, thread)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self._model.tokenizer

    async def generate(self, message: pb.GenerateRequest, context: RequestContext) -> None:
        """Stream the outputs in deltas."""
        request, detokenizer = await self._requests.generate(message, context, is_streamed=True)
        answer = Answer(request, detokenizer)
        with self._submission.stream(message, request, context.record) as stream:
            writer = context.writer(lambda: stream.unread_bytes)
            async for event in stream:
                data = answer.serialized_delta(event)
                del event  # its objects take ten times the memory of the message, which may wait for its client
                if data:
                    await writer.write(data)

    async def generate_unary(
        self, message: pb.GenerateUnaryRequest, context: RequestContext
    ) -> pb.GenerateUnaryResponse:
        """Return the complete outputs."""
        request, detokenizer = await self._requests.generate(message, context, is_streamed=False)
        return Answer(request, detokenizer).whole(await self._submission.collect(message, request, context.record))

    async def submit(self, message: pb.GenerateRequest, context: RequestContext, *, is_streamed: bool) -> Submitted:
        """Pass one request of a call of many to the engine. is_streamed: False if its answer is read once."""
        request, detokenizer = await self._requests.generate(message, context, is_streamed=is_streamed)
        return self._submission.open(message, request, context.record, Answer(request, detokenizer))

    async def score(self, message: pb.ScoreRequest, context: RequestContext) -> pb.ScoreResponse:
        """Return the log-probability of each token of a given target."""
        request = await self._requests.score(message, context)
        event = last_of(await self._submission.collect(message, request, context.record))
        return pb.ScoreResponse(
            logprobs=logprobs(event.logprobs),
            score=event.score or 0.0,
            usage=usage(request, event),
            timing=timing(event.timing),
        )

    async def embed(self, message: pb.EmbedRequest, context: RequestContext) -> pb.EmbedResponse:
        """Return a source's encoder states, pooled or unpooled."""
        request = await self._requests.embed(message, context)
        outputs, event = await self._read(message, request, context)
        embedding = outputs.values.ravel().tolist()
        return pb.EmbedResponse(embedding=embedding, usage=usage(request, event), timing=timing(event.timing))

    async def classify(self, message: pb.ClassifyRequest, context: RequestContext) -> pb.ClassifyResponse:
        """Return the labels of a text or a pair."""
        request = await self._requests.classify(message, context)
        outputs, event = await self._read(message, request, context)
        labels = label_scores(outputs, self._labels(request.task), message.top_k)
        return pb.ClassifyResponse(labels=labels, usage=usage(request, event), timing=timing(event.timing))

    async def tag(self, message: pb.TagRequest, context: RequestContext) -> pb.TagResponse:
        """Return the label of every token of a text, and the spans they form."""
        request, source = await self._requests.tag(message, context)
        outputs, event = await self._read(message, request, context)
        ids = source.ids[request.picks[0] : request.picks[-1] + 1]
        tokens = tagged_tokens(outputs, self._labels(Task.TAG), ids, source.offsets)
        return pb.TagResponse(
            tokens=tokens,
            spans=tagged_spans(message.text, tokens),
            usage=usage(request, event),
            timing=timing(event.timing),
        )

    async def fill_mask(self, message: pb.FillMaskRequest, context: RequestContext) -> pb.FillMaskResponse:
        """Return the likeliest tokens of every masked position."""
        request = await self._requests.fill_mask(message, context)
        outputs, event = await self._read(message, request, context)
        places = masked_places(outputs, request.picks, self._model.tokenizer)
        return pb.FillMaskResponse(places=places, usage=usage(request, event), timing=timing(event.timing))

    async def explain(self, message: pb.ExplainRequest, context: RequestContext) -> pb.ExplainResponse:
        """Return the attention maps of a source and a target, by default the greedy answer."""
        return await self._explanations.explain(message, context)

    async def next_token(self, message: pb.NextTokenRequest, context: RequestContext) -> pb.NextTokenResponse:
        """Return the distribution of a target's next token after every stage of its sampling."""
        return await self._next_tokens.next_token(message, context)

    async def get_positions(self, message: pb.GetPositionsRequest, context: RequestContext) -> pb.GetPositionsResponse:
        """Return the representation of positions of each part of the model."""
        return await self._positions.get(message)

    async def tokenize(self, message: pb.TokenizeRequest, context: RequestContext) -> pb.TokenizeResponse:
        """Return a text's token ids and its normalised form."""
        token_ids, normalized = await self._inputs.tokenized(message.text, caller=context.caller)
        return pb.TokenizeResponse(token_ids=token_ids, normalized_text=normalized)

    async def detokenize(self, message: pb.DetokenizeRequest, context: RequestContext) -> pb.DetokenizeResponse:
        """Return the text of token ids, and the piece of each."""
        text, pieces = await self._inputs.detokenized(message.token_ids, caller=context.caller)
        return pb.DetokenizeResponse(text=text, pieces=pieces)

    async def get_model(self, message: pb.GetModelRequest, context: RequestContext) -> pb.GetModelResponse:
        """Describe the model."""
        return pb.GetModelResponse(model=self._model.description)

    async def _read(
        self, message: EngineMessage, request: Request, context: RequestContext
    ) -> tuple[EncoderOutputs, TokenEvent]:
        """Run a request for encoder outputs. Return them and the last event."""
        event = last_of(await self._submission.collect(message, request, context.record))
        assert event.encoder_outputs is not None
        return event.encoder_outputs, event

    def _labels(self, task: Task) -> tuple[str, ...]:
        return next(head.labels for head in self._model.config.heads if head.task == head_of(task))
