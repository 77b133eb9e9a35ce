"""Calls of the attacks: methods of every service of the port, with small requests."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.v1 import inference_pb2 as pb

SERVICE = "antiphon.v1.InferenceService"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Method and a request that it answers."""

    method: str
    message: bytes


UNARY = Call(method=f"{SERVICE}/Tokenize", message=pb.TokenizeRequest(text="How are you?").SerializeToString())
# The answer has about 4,000 bytes, so that few answers fill a connection's window.
LONG_UNARY = Call(
    method=f"{SERVICE}/Tokenize", message=pb.TokenizeRequest(text="How are you? " * 120).SerializeToString()
)
# The answer has tens of kilobytes, so that few answers fill the buffers of a socket.
HEAVY_UNARY = Call(
    method=f"{SERVICE}/Embed",
    message=pb.EmbedRequest(
        text="I don't know. " * 12, pooling=pb.POOLING_NONE, priority=pb.PRIORITY_BATCH
    ).SerializeToString(),
)
STREAM = Call(
    method=f"{SERVICE}/Generate",
    message=pb.GenerateRequest(
        text="Stop!", options=pb.GenerateOptions(max_new_tokens=8, ignore_eos=True)
    ).SerializeToString(),
)
HEALTH_METHOD = "grpc.health.v1.Health/Check"
REFLECTION_METHOD = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNKNOWN_METHOD = f"{SERVICE}/NoSuchMethod"
UNKNOWN_SERVICE_METHOD = "nobody.Nothing/Nothing"
