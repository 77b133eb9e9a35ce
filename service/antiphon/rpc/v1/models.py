"""The models served now, by name. Selects the model of a request; does not load or unload models.

For the event loop: a change is atomic there, so a request sees the models either before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.domain.errors import LastModel, Loading, ModelExists, ModelNotFound
from antiphon.engine.remote import AnyEngine
from antiphon.observability.engine_metrics import Metrics
from antiphon.rpc.v1.servicer import InferenceServicer
from antiphon.v1 import inference_pb2 as pb

# Error messages show at most this many characters of a requested name, and this many names of served models.
_SHOWN_NAME = 80
_SHOWN_NAMES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """Served model: its RPC methods and its engine."""

    name: str
    precision: str
    servicer: InferenceServicer
    engine: AnyEngine
    description: pb.Model
    metrics: Metrics


class Models:
    """The models served, in the order in which they were loaded. The first is the default."""

    def __init__(self) -> None:
        self._models: dict[str, LoadedModel] = {}

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(tuple(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str) -> LoadedModel:
        """Return the model of a name; the default for the empty name.

        Raises ModelNotFound, which lists the served models, or Loading before the first model is served.
        """
        self.check_loaded()
        if not name:
            return next(iter(self._models.values()))
        try:
            return self._models[name]
        except KeyError:
            raise ModelNotFound(f"model {name[:_SHOWN_NAME]!r} is not served here; {self._listed()}") from None

    def check_loaded(self) -> None:
        """Raise Loading before the first model is served; afterwards there is always one."""
        if not self._models:
            raise Loading("the server is still loading its models")

    def check_free(self, name: str) -> None:
        """Raise ModelExists if a model of this name is served."""
        if name in self._models:
            raise ModelExists(f"a model {name!r} is served already; unload it first, or take another name")

    def add(self, model: LoadedModel) -> None:
        """Start to serve a model. Raises ModelExists."""
        self.check_free(model.name)
        self._models[model.name] = model

    def remove(self, name: str) -> LoadedModel:
        """Stop serving a model; its running requests continue. Raises ModelNotFound, or LastModel for the only one."""
        self.find(name or " ")  # the empty name must not find the default model
        if len(self._models) == 1:
            raise LastModel(f"model {name!r} is the only one; load another first, or stop the server")
        return self._models.pop(name)

    def _listed(self) -> str:
        names = list(self._models)
        if len(names) == 1:
            return f"{names[0]!r} is"
        rest = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        return f"{', '.join(map(repr, names[:_SHOWN_NAMES]))}{rest} are"
