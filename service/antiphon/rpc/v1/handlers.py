"""Binds the servicers' methods to RPC names, and routes each request to the model that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from antiphon.client.connection import WORKER_KEY
from antiphon.domain.errors import AntiphonError
from antiphon.domain.request import Priority
from antiphon.observability.call import CallRecord
from antiphon.rpc.context import RequestContext
from antiphon.rpc.endpoints import Method
from antiphon.rpc.middleware import CallMiddleware, handlers_of
from antiphon.rpc.v1.generate_many import Conversation
from antiphon.rpc.v1.models import Models
from antiphon.rpc.v1.servicer import InferenceServicer
from antiphon.rpc.v1.streaming import Pacing
from antiphon.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE_NAME = SERVICE.full_name
_REQUEST_OF_MANY = f"{SERVICE_NAME}/GenerateMany:request"

# Every RPC whose request names a model.
_METHODS: dict[str, Callable[[InferenceServicer, Any, RequestContext], Awaitable[Any]]] = {
    "Generate": InferenceServicer.generate,
    "GenerateUnary": InferenceServicer.generate_unary,
    "Score": InferenceServicer.score,
    "Embed": InferenceServicer.embed,
    "Classify": InferenceServicer.classify,
    "Tag": InferenceServicer.tag,
    "FillMask": InferenceServicer.fill_mask,
    "Explain": InferenceServicer.explain,
    "NextToken": InferenceServicer.next_token,
    "GetPositions": InferenceServicer.get_positions,
    "Tokenize": InferenceServicer.tokenize,
    "Detokenize": InferenceServicer.detokenize,
    "GetModel": InferenceServicer.get_model,
}


class Handlers:
    """Handlers of antiphon.v1.InferenceService for all models, within the middlewares of its port."""

    def __init__(
        self,
        models: Models,
        middleware: CallMiddleware,
        pacing: Pacing,
        place: str | None = None,
    ) -> None:
        """place: index of this process and number of those that share the port, such as 0/2; None if it is alone."""
        self.models = models
        self._place = place
        self._pacing = pacing
        self.middleware = middleware

    async def wait_until_idle(self) -> None:
        """Return when no RPC is in flight."""
        await self.middleware.wait_until_idle()

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers of every method of the service, for `add_generic_rpc_handlers`."""
        methods = {name: self._routed(method) for name, method in _METHODS.items()}
        self.middleware.expect(_REQUEST_OF_MANY)
        own: dict[str, Method] = {"GenerateMany": self._generate_many, "ListModels": self._list_models}
        checks = dict.fromkeys(("Generate", "GenerateUnary"), self._check_room)
        return handlers_of(SERVICE, methods | own, self.middleware, checks)

    def _check_room(self, call: CallRecord) -> None:
        """Raise QueueFull if no request of this caller could wait, whatever it is.

        Under overload most calls are refused, and reading their requests would take most of the time. With several
        models the request must be read to know which model it names.
        """
        if len(self.models) != 1:
            return
        (model,) = self.models
        try:
            model.engine.check_room(call.caller, Priority.INTERACTIVE)  # has the most room
        except AntiphonError:
            call.routed(model.name, model.metrics)
            raise

    def _routed(self, method: Callable[[InferenceServicer, Any, RequestContext], Awaitable[Any]]) -> Method:
        async def routed(request: Any, context: RequestContext) -> Any:
            model = self.models.find(request.model)
            context.record.routed(model.name, model.metrics)
            return await method(model.servicer, request, context)

        return routed

    async def _generate_many(self, messages: AsyncIterator[pb.GenerateManyRequest], context: RequestContext) -> None:
        """Answer the requests of a call, each by the model that it names. A trailer says which process has answered."""
        if self._place is not None:
            context.record.trailers.append((WORKER_KEY, self._place))
        await Conversation(_REQUEST_OF_MANY, self.models, self.middleware, self._pacing, context).run(messages)

    async def _list_models(self, message: pb.ListModelsRequest, context: RequestContext) -> pb.ListModelsResponse:
        """Describe every model, the default first."""
        self.models.check_loaded()
        return pb.ListModelsResponse(models=[model.description for model in self.models])
