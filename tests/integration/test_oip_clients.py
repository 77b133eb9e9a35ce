"""Published clients of the Open Inference Protocol receive the same answers from a server as antiphon.client.

They run unchanged, in .venv-oip-clients, which `make oip-clients` makes from requirements/oip-clients.lock.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.client import Client, Options
from antiphon.oip import inference_pb2
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import Tokenizer
from tests.integration.process import PATIENCE_S, ServerProcess, environment, is_idle

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-oip-clients" / "bin" / "python"
TEXTS = ["How are you?", "The house is small.", "We are going home now."]

pytestmark = pytest.mark.skipif(
    not (PYTHON.exists() and (PYTHON.parents[1] / ".installed").exists()),
    reason="the published clients are not installed; run `make oip-clients` with a Python before 3.14",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(SHIPPED_BUNDLE) as process:
        yield process


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> dict[str, Any]:
    """Return the answers that antiphon.client receives."""
    beams = Options(max_new_tokens=12, beam_width=4)
    tokenizer = Tokenizer.load(SHIPPED_BUNDLE / "tokenizer.json")
    with Client(server.target) as client:
        return {
            "greedy": [client.generate_text(text).text for text in TEXTS],
            "beams": [client.generate_text(text, beams).text for text in TEXTS],
            "ids": list(tokenizer.encode(TEXTS[0])),
            "answer_ids": list(client.generate_text(TEXTS[0]).token_ids),
        }


def report_of(script: str, server: ServerProcess, ids: list[int]) -> dict[str, Any]:
    """Run a script with the Python of the published clients and return its report."""
    done = subprocess.run(
        [PYTHON, HERE / script, server.target, server.model],
        input=json.dumps({"texts": TEXTS, "ids": ids}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def triton(server: ServerProcess, expected: dict[str, Any]) -> dict[str, Any]:
    return report_of("oip_client_triton.py", server, expected["ids"])


@pytest.fixture(scope="module")
def kserve(server: ServerProcess, expected: dict[str, Any]) -> dict[str, Any]:
    return report_of("oip_client_kserve.py", server, expected["ids"])


def test_tritonclient_receives_the_same_answers_as_our_client(triton: dict[str, Any], expected: dict[str, Any]) -> None:
    unary = triton["unary"]
    assert unary["batch"] == unary["async"] == triton["aio"]["batch"] == expected["greedy"]
    assert unary["beams"] == expected["beams"]
    assert (unary["by_ids"], unary["id"]) == (expected["answer_ids"], "batch")


def test_tritonclient_streams_deltas_that_join_to_the_answers(triton: dict[str, Any], expected: dict[str, Any]) -> None:
    stream = triton["stream"]
    assert ["".join(deltas) for deltas in stream["deltas"]] == expected["greedy"]
    assert triton["aio"]["stream"] == expected["greedy"]


def test_tritonclient_receives_status_and_message_of_a_refusal(triton: dict[str, Any]) -> None:
    (range_status, range_message), (model_status, model_message) = triton["unary"]["refusals"]
    assert (range_status, model_status) == ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
    assert range_message.startswith("parameters.top_p is 2.0")
    assert "'other' is not served" in model_message
    assert triton["stream"]["errors"] == [range_message]
    assert triton["stream"]["status"] == "StatusCode.INVALID_ARGUMENT"


def test_tritonclient_reads_metadata_of_server_and_model(triton: dict[str, Any], server: ServerProcess) -> None:
    described = triton["described"]
    assert (described["live"], described["ready"], described["model_ready"], described["other_ready"]) == (
        True, True, True, False,
    )  # fmt: skip
    assert (described["server"], described["config"]) == ("antiphon", [server.model, 0, True])
    assert described["inputs"][:2] == ["text_input", "input_ids"]
    assert described["outputs"].items() >= {"text_output": "BYTES", "output_ids": "INT32"}.items()
    assert described["index"] == [[server.model, "READY"]]
    assert triton["counted"][0] >= 5 * len(TEXTS)


def test_cancelled_tritonclient_stream_frees_its_sequence(triton: dict[str, Any], server: ServerProcess) -> None:
    assert is_idle(server.wait_for_metrics(is_idle))
    metrics = server.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("antiphon_cancellations_total")) >= 1


def test_kserve_receives_the_same_answers_as_our_client(kserve: dict[str, Any], expected: dict[str, Any]) -> None:
    assert kserve["raw"] == ["raw", expected["greedy"], expected["answer_ids"]]
    assert kserve["typed"] == ["typed", expected["greedy"], expected["answer_ids"]]
    assert kserve["beams"] == expected["beams"]
    assert (kserve["live"], kserve["ready"], kserve["model_ready"]) == (True, True, True)
    assert kserve["refusal"] == "NOT_FOUND"


def test_contract_has_the_published_names_and_numbers(triton: dict[str, Any], kserve: dict[str, Any]) -> None:
    published = triton["descriptors"]
    messages: list[Any] = list(inference_pb2.DESCRIPTOR.message_types_by_name.values())
    while messages:
        message = messages.pop()
        messages += message.nested_types
        ours = {
            field.name: [field.number, field.type, field.is_repeated, getattr(field.message_type, "full_name", "")]
            for field in message.fields
        }
        assert ours.items() <= published[message.full_name].items()
        for name, (number, *_) in ours.items():
            assert kserve["fields"].get(f"{message.full_name}.{name}", number) == number
    (service,) = inference_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        types = [method.input_type.full_name, method.output_type.full_name]
        assert published[service.full_name][method.name] == types
