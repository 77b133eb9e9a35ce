"""Selection of a request's model: by its name, or the default, on every RPC."""

from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from antiphon.domain.errors import LastModel, Loading, ModelExists, ModelNotFound
from antiphon.rpc.v1.handlers import SERVICE
from antiphon.rpc.v1.models import LoadedModel, Models
from tests.serving import details_of, refusal, serving, stub_of


class Named:
    """Fields of a model that Models reads."""

    def __init__(self, name: str) -> None:
        self.name = name


def models_of(*names: str) -> Models:
    models = Models()
    for name in names:
        served: Any = Named(name)
        models.add(served)
    return models


def names(models: Models) -> list[str]:
    return [served.name for served in models]


def test_find_returns_the_first_model_for_no_name_and_the_next_after_its_removal() -> None:
    models = models_of("b", "a", "c")
    assert [models.find(name).name for name in ("", "a", "c")] == ["b", "a", "c"]
    removed: LoadedModel = models.remove("b")
    assert (removed.name, models.find("").name, names(models)) == ("b", "a", ["a", "c"])


@pytest.mark.parametrize(
    ("count", "listed"),
    [(1, "'m0' is"), (2, "'m0', 'm1' are"), (100, "'m0', 'm1', 'm2', 'm3', 'm4', 'm5', 'm6', 'm7' and 92 more are")],
)
def test_find_lists_the_served_models_in_a_message_of_bounded_length(count: int, listed: str) -> None:
    models = models_of(*(f"m{index}" for index in range(count)))
    with pytest.raises(ModelNotFound) as caught:
        models.find("x" * 5000)
    assert str(caught.value) == f"model {'x' * 80!r} is not served here; {listed}"


def test_find_refuses_as_unavailable_before_a_model_is_served() -> None:
    for name in ("", "a"):
        with pytest.raises(Loading):
            Models().find(name)


def test_add_and_remove_refuse_without_a_change() -> None:
    models = models_of("a")
    with pytest.raises(ModelExists):
        models_of("a", "b", "a")
    with pytest.raises(LastModel):
        models.remove("a")
    for name in ("", "b"):
        with pytest.raises(ModelNotFound):
            models.remove(name)
    assert names(models) == ["a"]


async def test_every_rpc_that_names_a_model_refuses_an_unknown_one() -> None:
    async with serving() as served:
        stub = stub_of(served)
        asked = []
        for method in SERVICE.methods:
            kind = GetMessageClass(method.input_type)
            if "model" in kind.DESCRIPTOR.fields_by_name:
                error = await refusal(getattr(stub, method.name)(kind(model="nobody")))
                assert (error.code(), details_of(error).reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
                asked.append(method.name)
    assert {method.name for method in SERVICE.methods} - set(asked) == {
        "ListModels",
        "GenerateMany",
    }  # a request of many names it
