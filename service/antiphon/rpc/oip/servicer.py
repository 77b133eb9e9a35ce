"""inference.GRPCInferenceService: the methods of the Open Inference Protocol."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Sequence

import grpc

from antiphon.domain.errors import AntiphonError
from antiphon.oip import inference_pb2 as pb
from antiphon.rpc.context import RequestContext
from antiphon.rpc.endpoints import Method
from antiphon.rpc.middleware import CallMiddleware, handlers_of
from antiphon.rpc.oip.answering import Answering
from antiphon.rpc.oip.inference import TEXT, VERSION, TensorSpec, is_encoder, tensors_of
from antiphon.rpc.oip.stream import Conversation
from antiphon.rpc.standard_services import HealthServicer
from antiphon.rpc.v1.models import Models

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE_NAME = SERVICE.full_name

# Names of Triton, which supports model_stream_infer without a name.
EXTENSIONS = ("model_configuration", "model_stream_infer", "parameters", "schedule_policy", "statistics")
_PLATFORM = "antiphon"
# Method name of a stream's requests in metrics and log lines.
_STREAMED = f"{SERVICE_NAME}/ModelStreamInfer:request"
_CONFIG_TYPES = {"BYTES": pb.TYPE_STRING, "INT32": pb.TYPE_INT32, "INT64": pb.TYPE_INT64, "FP32": pb.TYPE_FP32}


class OpenInferenceServicer:
    """RPC methods for every model. They raise AntiphonError; `middleware.py` converts it to a status."""

    def __init__(self, models: Models, middleware: CallMiddleware, health: HealthServicer) -> None:
        self._answering = Answering(models)
        self._middleware = middleware
        self._health = health

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers of every method of the service, for `add_generic_rpc_handlers`."""
        methods: dict[str, Method] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
            "ModelStreamInfer": self.model_stream_infer,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
        }
        self._middleware.expect(_STREAMED)
        return handlers_of(SERVICE, methods, self._middleware)

    async def server_live(self, message: pb.ServerLiveRequest, context: RequestContext) -> pb.ServerLiveResponse:
        """Return whether the process is alive."""
        return pb.ServerLiveResponse(live=self._health.is_live)

    async def server_ready(self, message: pb.ServerReadyRequest, context: RequestContext) -> pb.ServerReadyResponse:
        """Return whether the server accepts requests."""
        return pb.ServerReadyResponse(ready=self._health.is_ready)

    async def model_ready(self, message: pb.ModelReadyRequest, context: RequestContext) -> pb.ModelReadyResponse:
        """Return whether a model accepts requests; False for a model that is not served."""
        try:
            self._answering.find(message.name, message.version)
        except AntiphonError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._health.is_ready)

    async def server_metadata(
        self, message: pb.ServerMetadataRequest, context: RequestContext
    ) -> pb.ServerMetadataResponse:
        """Describe the server."""
        return pb.ServerMetadataResponse(name=_PLATFORM, version=_version(), extensions=EXTENSIONS)

    async def model_metadata(
        self, message: pb.ModelMetadataRequest, context: RequestContext
    ) -> pb.ModelMetadataResponse:
        """Describe a model's tensors."""
        model = self._answering.find(message.name, message.version)
        inputs, outputs = tensors_of(model)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform=_PLATFORM,
            inputs=_metadata(inputs),
            outputs=_metadata(outputs),
        )

    async def model_infer(self, message: pb.ModelInferRequest, context: RequestContext) -> pb.ModelInferResponse:
        """Return the complete answer to one request."""
        return await self._answering.infer(self._answering.read(message, context), context)

    async def model_stream_infer(self, requests: AsyncIterator[pb.ModelInferRequest], context: RequestContext) -> None:
        """Answer the requests of a stream."""
        await Conversation(_STREAMED, self._answering, self._middleware, context).run(requests)

    async def model_config(self, message: pb.ModelConfigRequest, context: RequestContext) -> pb.ModelConfigResponse:
        """Describe a model in the form of Triton's configurations."""
        model = self._answering.find(message.name, message.version)
        inputs, outputs = tensors_of(model)
        config = pb.ModelConfig(
            name=model.name,
            backend=_PLATFORM,
            input=[
                pb.ModelInput(
                    name=tensor.name,
                    data_type=_CONFIG_TYPES[tensor.datatype],
                    dims=tensor.shape,
                    optional=tensor is not TEXT,
                )
                for tensor in inputs
            ],
            output=[
                pb.ModelOutput(name=tensor.name, data_type=_CONFIG_TYPES[tensor.datatype], dims=tensor.shape)
                for tensor in outputs
            ],
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=not is_encoder(model)),
        )
        return pb.ModelConfigResponse(config=config)

    async def model_statistics(
        self, message: pb.ModelStatisticsRequest, context: RequestContext
    ) -> pb.ModelStatisticsResponse:
        """Return the statistics of this service's requests, for one model or for all."""
        answering = self._answering
        models = [answering.find(message.name, message.version)] if message.name else list(answering.models)
        return pb.ModelStatisticsResponse(
            model_stats=[answering.counts_of(model).message(model.name) for model in models]
        )

    async def repository_index(
        self, message: pb.RepositoryIndexRequest, context: RequestContext
    ) -> pb.RepositoryIndexResponse:
        """List the models."""
        kind = pb.RepositoryIndexResponse.ModelIndex
        models = [kind(name=model.name, version=VERSION, state="READY") for model in self._answering.models]
        return pb.RepositoryIndexResponse(models=models)


def _metadata(tensors: Sequence[TensorSpec]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    kind = pb.ModelMetadataResponse.TensorMetadata
    return [kind(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape) for tensor in tensors]


def _version() -> str:
    try:
        return importlib.metadata.version("antiphon")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
