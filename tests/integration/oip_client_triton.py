"""Ask a server through the published tritonclient, unchanged, and print the answers as JSON.

test_oip_clients.py runs this file with the Python of .venv-oip-clients. Arguments: TARGET MODEL. Standard input: texts
as JSON.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

OPTIONS = {"max_new_tokens": 12, "beam_width": 4}


def texts_input(module: Any, texts: list[str]) -> Any:
    tensor = module.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    return tensor


def ids_input(ids: list[int]) -> Any:
    tensor = triton.InferInput("input_ids", [1, len(ids)], "INT64")
    tensor.set_data_from_numpy(np.array([ids], dtype=np.int64))
    return tensor


def texts_of(result: Any, name: str = "text_output") -> list[str]:
    return [text.decode() for text in result.as_numpy(name)]


def described(client: Any, model: str) -> dict[str, Any]:
    """Return the metadata of the server and the model."""
    metadata = client.get_model_metadata(model)
    config = client.get_model_config(model).config
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata().name,
        "inputs": [tensor.name for tensor in metadata.inputs],
        "outputs": {tensor.name: tensor.datatype for tensor in metadata.outputs},
        "config": [config.name, config.max_batch_size, config.model_transaction_policy.decoupled],
        "index": [[entry.name, entry.state] for entry in client.get_model_repository_index().models],
    }


def unary(client: Any, model: str, texts: list[str], ids: list[int]) -> dict[str, Any]:
    """Return complete answers, and the errors of invalid requests."""
    batch = client.infer(model, [texts_input(triton, texts)], request_id="batch", priority=2, timeout=60_000_000)
    wanted = [triton.InferRequestedOutput("text_output")]
    beams = client.infer(model, [texts_input(triton, texts)], outputs=wanted, parameters=OPTIONS)
    by_ids = client.infer(model, [ids_input(ids)])
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, [texts_input(triton, texts)], lambda result, error: done.put((result, error)))
    result, error = done.get(timeout=60)
    assert error is None, error
    return {
        "batch": texts_of(batch),
        "id": batch.get_response().id,
        "beams": texts_of(beams),
        "async": texts_of(result),
        "by_ids": by_ids.as_numpy("output_ids")[0].tolist(),
        "refusals": [
            refusal(client, model, [texts_input(triton, ["x"])], parameters={"top_p": 2.0}),
            refusal(client, "other", [texts_input(triton, ["x"])]),
        ],
    }


def refusal(client: Any, model: str, inputs: list[Any], **options: Any) -> list[str]:
    try:
        client.infer(model, inputs, **options)
    except InferenceServerException as error:
        return [error.status(), error.message()]
    raise AssertionError("it was answered")


def streamed(client: Any, model: str, texts: list[str]) -> dict[str, Any]:
    """Send every text on one stream; return its deltas, its end and its errors."""
    responses: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: responses.put((result, error)))
    for index, text in enumerate(texts):
        inputs = [texts_input(triton, [text])]
        client.async_stream_infer(model, inputs, request_id=str(index), enable_empty_final_response=True)
    client.async_stream_infer(model, [texts_input(triton, ["x"])], request_id="bad", parameters={"top_p": 2.0})
    deltas: dict[str, list[str]] = {str(index): [] for index in range(len(texts))}
    num_final, errors = 0, list[str]()
    while num_final < len(texts) or not errors:
        result, error = responses.get(timeout=60)
        if error is not None:
            errors.append(error.message())
            continue
        response = result.get_response()
        deltas[response.id] += texts_of(result)
        num_final += response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    client.start_stream(lambda result, error: responses.put((result, error)), headers={"triton_grpc_error": "true"})
    client.async_stream_infer(model, [texts_input(triton, ["x"])], parameters={"top_p": 2.0})
    _, error = responses.get(timeout=60)
    client.stop_stream()
    client.start_stream(callback=lambda result, error: responses.put((result, error)))
    client.async_stream_infer(model, [texts_input(triton, texts[:1])], parameters={"ignore_eos": True})
    responses.get(timeout=60)
    client.stop_stream(cancel_requests=True)
    return {"deltas": list(deltas.values()), "errors": errors, "status": error.status()}


async def with_asyncio(target: str, model: str, texts: list[str]) -> dict[str, Any]:
    """Use the asyncio client for a batch, and for a stream for each text."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index, text in enumerate(texts):
            yield {"model_name": model, "inputs": [texts_input(triton_aio, [text])], "request_id": str(index)}

    async with triton_aio.InferenceServerClient(target) as client:
        batch = await client.infer(model, [texts_input(triton_aio, texts)])
        joined = [""] * len(texts)
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            joined[int(result.get_response().id)] += texts_of(result)[0]
        return {"batch": texts_of(batch), "stream": joined, "ready": await client.is_server_ready()}


def shape_of(field: Any) -> list[Any]:
    kind = field.message_type.full_name if field.message_type else ""
    return [field.number, field.type, field.label == field.LABEL_REPEATED, kind]


def descriptors(file: Any) -> dict[str, dict[str, list[Any]]]:
    """Return number, type and label of every field of every message, and the message types of the methods."""
    found: dict[str, dict[str, list[Any]]] = {}
    messages = list(file.message_types_by_name.values())
    while messages:
        message = messages.pop()
        messages += message.nested_types
        found[message.full_name] = {field.name: shape_of(field) for field in message.fields}
    for service in file.services_by_name.values():
        found[service.full_name] = {
            method.name: [method.input_type.full_name, method.output_type.full_name] for method in service.methods
        }
    return found


def main() -> None:
    target, model = sys.argv[1:]
    given = json.load(sys.stdin)
    texts, ids = given["texts"], given["ids"]
    with triton.InferenceServerClient(target) as client:
        report: dict[str, Any] = {
            "described": described(client, model),
            "unary": unary(client, model, texts, ids),
            "stream": streamed(client, model, texts),
            "aio": asyncio.run(with_asyncio(target, model, texts)),
            "descriptors": descriptors(service_pb2.DESCRIPTOR) | descriptors(model_config_pb2.DESCRIPTOR),
        }
        statistics = client.get_inference_statistics(model).model_stats[0]
        report["counted"] = [statistics.inference_count, statistics.inference_stats.fail.count]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
