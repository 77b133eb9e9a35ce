"""Calls of the attacks: methods of every service of the port, with small requests."""

from collections import Counter
from dataclasses import dataclass

from grpc_reflection.v1alpha import reflection_pb2

from antiphon.v1 import inference_pb2 as pb

SERVICE = "antiphon.v1.InferenceService"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Method and a message that it answers. num_requests: requests in the message that are counted as calls too."""

    method: str
    message: bytes
    num_requests: int = 0

    def requests_of(self, num_calls: int) -> Counter[str]:
        """Return the most requests of this many calls that the server counts, by method."""
        return Counter({f"{self.method}:request": num_calls * self.num_requests})


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
# The answer has 256 tokens, and 20 alternatives for each: 55 KB in messages, and 800 KB as Python objects.
HEAVY_STREAM = Call(
    method=f"{SERVICE}/Generate",
    message=pb.GenerateRequest(
        text="Stop!", options=pb.GenerateOptions(max_new_tokens=256, ignore_eos=True, num_logprobs=20)
    ).SerializeToString(),
)
_NUM_OF_MANY = 8
MANY = Call(
    method=f"{SERVICE}/GenerateMany",
    message=pb.GenerateManyRequest(
        requests=[
            pb.ManyRequest(id=number, request=pb.GenerateRequest.FromString(STREAM.message))
            for number in range(_NUM_OF_MANY)
        ]
    ).SerializeToString(),
    num_requests=_NUM_OF_MANY,
)
_NUM_OF_HEAVY_MANY = 64
_HEAVY_REQUEST = pb.GenerateRequest.FromString(HEAVY_STREAM.message)
HEAVY_MANY = Call(
    method=f"{SERVICE}/GenerateMany",
    message=pb.GenerateManyRequest(
        requests=[
            pb.ManyRequest(id=number, is_whole=number % 2 == 1, request=_HEAVY_REQUEST)
            for number in range(_NUM_OF_HEAVY_MANY)
        ]
    ).SerializeToString(),
    num_requests=_NUM_OF_HEAVY_MANY,
)
HEALTH_METHOD = "grpc.health.v1.Health/Check"
REFLECTION_METHOD = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# The answer has the descriptors of all types of the service: 60 KB.
REFLECTION = Call(
    method=REFLECTION_METHOD,
    message=reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE).SerializeToString(),
)
UNKNOWN_METHOD = f"{SERVICE}/NoSuchMethod"
UNKNOWN_SERVICE_METHOD = "nobody.Nothing/Nothing"
