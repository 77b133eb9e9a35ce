"""Bare grpc.aio server that answers every call at once with the same message: what a call costs without any work.

    python -m antiphon.tools.bench.processes.echo

Prints `echo: ready on HOST:PORT`, and ends with its parent's SIGTERM.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import uvloop

from antiphon.v1 import inference_pb2 as pb

_WHOLE = pb.GenerateUnaryResponse(
    outputs=[pb.Output(text="Wie geht es dir?", token_ids=range(8), finish_reason=pb.FINISH_REASON_STOP)]
)
_LAST = pb.GenerateResponse(
    text_delta="Wie geht es dir?", token_ids=range(8), finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage()
)


async def _unary(request: pb.GenerateUnaryRequest, context: Any) -> pb.GenerateUnaryResponse:
    return _WHOLE


async def _stream(request: pb.GenerateRequest, context: Any) -> None:
    await context.write(_LAST)


async def _model(request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
    return pb.GetModelResponse()


async def _serve() -> None:
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GenerateUnary": grpc.unary_unary_rpc_method_handler(
            _unary, pb.GenerateUnaryRequest.FromString, pb.GenerateUnaryResponse.SerializeToString
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            _stream, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            _model, pb.GetModelRequest.FromString, pb.GetModelResponse.SerializeToString
        ),
    }
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("antiphon.v1.InferenceService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"echo: ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve())
