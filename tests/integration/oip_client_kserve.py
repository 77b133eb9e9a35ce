"""Ask a server through the published kserve client, unchanged, and print the answers as JSON.

test_oip_clients.py runs this file with the Python of .venv-oip-clients. Arguments: TARGET MODEL. Standard input: texts
as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest
from kserve.protocol.grpc import grpc_predict_v2_pb2

OPTIONS = {"max_new_tokens": 12, "beam_width": 4}


def texts_input(texts: list[str], *, is_raw: bool) -> Any:
    tensor = InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_), binary_data=is_raw)
    return tensor


def ids_input(ids: list[int], *, is_raw: bool) -> Any:
    tensor = InferInput("input_ids", [1, len(ids)], "INT64")
    tensor.set_data_from_numpy(np.array([ids], dtype=np.int64), binary_data=is_raw)
    return tensor


def output(response: Any, name: str) -> Any:
    (found,) = [output.as_numpy() for output in response.outputs if output.name == name]
    return found


def texts_of(response: Any) -> list[str]:
    return [text.decode() if isinstance(text, bytes) else text for text in output(response, "text_output").tolist()]


async def ask(target: str, model: str, texts: list[str], ids: list[int]) -> dict[str, Any]:
    async with InferenceGRPCClient(url=target, channel_args=[("grpc.enable_retries", 0)]) as client:
        report: dict[str, Any] = {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model_ready": await client.is_model_ready(model),
        }
        for kind, is_raw in (("raw", True), ("typed", False)):
            batch = await client.infer(InferRequest(model, [texts_input(texts, is_raw=is_raw)], request_id=kind))
            by_ids = await client.infer(InferRequest(model, [ids_input(ids, is_raw=is_raw)]))
            report[kind] = [batch.id, texts_of(batch), output(by_ids, "output_ids")[0].tolist()]
        asked = InferRequest(model, [texts_input(texts, is_raw=True)], parameters=OPTIONS)
        report["beams"] = texts_of(await client.infer(asked))
        try:
            await client.infer(InferRequest("other", [texts_input(texts, is_raw=True)]))
        except grpc.RpcError as error:
            report["refusal"] = error.code().name
    return report


def main() -> None:
    target, model = sys.argv[1:]
    given = json.load(sys.stdin)
    report = asyncio.run(ask(target, model, given["texts"], given["ids"]))
    report["fields"] = {
        f"{message.full_name}.{field.name}": field.number
        for message in grpc_predict_v2_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
