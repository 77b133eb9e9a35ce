"""Encoder-only models over the Open Inference Protocol: the answers of antiphon.v1 as tensors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc.aio
import pytest

from antiphon.oip import inference_pb2 as oip
from antiphon.oip.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.bundle_serving import ServedBundle
from tests.oip import infer_request, tensors, text_request
from tests.parity.head_bundles import Imported, import_heads, serving
from tests.parity.test_heads_served import TEXTS
from tests.serving import details_of

MASKED = ("the [MASK] sat on the mat", "a [MASK] dog ran on [MASK]")


@pytest.fixture(scope="module")
def bundles() -> dict[str, Imported]:
    return import_heads()


async def infer(served: ServedBundle, request: oip.ModelInferRequest) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(served.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        return tensors(await stub.ModelInfer(request))


async def described(served: ServedBundle) -> tuple[list[str], bool]:
    """Return the output names, the main one first, and whether streams have several responses for a request."""
    async with grpc.aio.insecure_channel(served.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        metadata = await stub.ModelMetadata(oip.ModelMetadataRequest())
        config = (await stub.ModelConfig(oip.ModelConfigRequest())).config
    return [tensor.name for tensor in metadata.outputs], config.model_transaction_policy.decoupled


async def test_labels_and_scores_are_returned_for_a_batch(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "classify") as served:
        alone = await asyncio.gather(*(served.client.classify(text) for text in TEXTS))
        found = await infer(served, text_request(*TEXTS))
        pair = await served.client.classify(TEXTS[0], pair=TEXTS[1], top_k=1)
        inputs = {"text_input": [TEXTS[0]], "text_pair": [TEXTS[1]]}
        given = {name: ("BYTES", (1,), [text.encode() for text in texts]) for name, texts in inputs.items()}
        paired = await infer(served, infer_request(given, parameters={"top_k": 1}))
        assert await described(served) == (["labels", "scores", "embedding"], False)
    assert found["labels"] == [[one.label for one in answer.labels] for answer in alone]
    assert found["scores"] == [[one.score for one in answer.labels] for answer in alone]
    assert (paired["labels"], paired["scores"]) == ([[pair.labels[0].label]], [[pair.labels[0].score]])


async def test_tags_are_returned_as_json(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "tag") as served:
        alone = await asyncio.gather(*(served.client.tag(text) for text in TEXTS))
        found = await infer(served, text_request(*TEXTS))
        assert await described(served) == (["tags", "embedding"], False)
    for text, answer in zip(found["tags"], alone, strict=True):
        tagged = json.loads(text)
        assert [(one["start"], one["end"], one["label"]) for one in tagged["tokens"]] == [
            (one.start, one.end, one.label) for one in answer.tokens
        ]
        assert [(one["start"], one["end"], one["label"]) for one in tagged["spans"]] == [
            (one.start, one.end, one.label) for one in answer.spans
        ]


async def test_fill_mask_next_sentence_and_embeddings_are_returned(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "pretraining") as served:
        filled = await asyncio.gather(*(served.client.fill_mask(text, top_k=4) for text in MASKED))
        found = await infer(served, text_request(*MASKED, parameters={"top_k": 4}))
        following = await served.client.classify(TEXTS[0], pair=TEXTS[2], next_sentence=True)
        pair = {"text_input": ("BYTES", (1,), [TEXTS[0].encode()]), "text_pair": ("BYTES", (1,), [TEXTS[2].encode()])}
        next_sentence = await infer(served, infer_request(pair, ["labels"], parameters={"task": "next_sentence"}))
        vectors = await asyncio.gather(*(served.client.embed(text, pooling="max", normalize=True) for text in TEXTS))
        options = {"pooling": "max", "normalize": True}
        embedded = await infer(served, text_request(*TEXTS, outputs=["embedding"], parameters=options))
        assert (await described(served))[0] == ["fillings", "labels", "scores", "embedding"]
    for text, answer in zip(found["fillings"], filled, strict=True):
        places = json.loads(text)["places"]
        shown = [[(one["token_id"], one["text"]) for one in place["fillings"]] for place in places]
        assert shown == [[(one.token_id, one.text) for one in place.fillings] for place in answer.places]
        assert [place["position"] for place in places] == [place.position for place in answer.places]
    assert next_sentence["labels"] == [[one.label for one in following.labels]]
    assert embedded["embedding"] == [list(one.vector) for one in vectors]


async def test_stream_answers_each_request_once_and_in_order(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "classify") as served:
        requests = [text_request(text, text, id=str(index)) for index, text in enumerate(TEXTS * 3)]
        requests[4].parameters["top_k"].string_param = "none"
        async with grpc.aio.insecure_channel(served.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            responses = [response async for response in stub.ModelStreamInfer(iter(requests))]
        whole = await infer(served, text_request(TEXTS[0], TEXTS[0]))
    assert [response.infer_response.id for response in responses] == [request.id for request in requests]
    assert [bool(response.error_message) for response in responses] == [index == 4 for index in range(len(requests))]
    assert all(response.infer_response.parameters["triton_final_response"].bool_param for response in responses)
    assert tensors(responses[0].infer_response) == whole


async def test_embeddings_of_every_token_are_refused_when_lengths_differ(bundles: dict[str, Imported]) -> None:
    async with serving(bundles, "classify") as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer(
                served, text_request("a dog", "the cat sat", outputs=["embedding"], parameters={"pooling": "none"})
            )
        alone = await infer(served, text_request("a dog", outputs=["embedding"], parameters={"pooling": "none"}))
        states = await served.client.embed("a dog", pooling="none")
    assert details_of(caught.value).field == "parameters.pooling"
    assert alone["embedding"] == [[value for row in states.per_token for value in row]]
