"""Several models in one real server: each answers as alone, and models are loaded and unloaded while others run."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.client import AsyncClient, Client, Options, ServerError
from antiphon.client.admin_client import AdminClient, Limits
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.busy import repeated
from tests.integration.conftest import SENTENCES
from tests.integration.process import PATIENCE_S, ServerProcess, antiphon
from tests.kept_models import kept_model
from tests.real_weights import firefox_model, smollm2
from tests.serving import details_of

LIMIT_BYTES = 900_000_000
TEXTS = ["How are you?", "A cold morning.", *SENTENCES[:4]]
MIXED = [
    "The weather is nice today.", "Where is the nearest station?", "She bought three books and a newspaper.",
    "In 1984 the old bridge over the river was replaced.", "Please send me the invoice by e-mail.", "I lost my keys.",
]  # fmt: skip
LONG = Options(max_new_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def both(bundle: Path) -> Iterator[ServerProcess]:
    """Serve the tiny model, which is the default, and the shipped one, with an admin port and a budget."""
    models = ("--model", f"tiny={bundle}", "--model", f"de={SHIPPED_BUNDLE}")
    with ServerProcess(None, [*models, "--admin-port", "0", "--memory-limit-bytes", str(LIMIT_BYTES)]) as process:
        yield process


def answers(target: str, models: dict[str, str]) -> dict[str, list[str]]:
    """Send the texts to all models at once; return the answers by model name."""

    async def ask() -> dict[str, list[str]]:
        clients = {name: AsyncClient(target, model=model) for name, model in models.items()}
        calls = [
            client.generate_text(text, Options(max_new_tokens=40)) for client in clients.values() for text in TEXTS
        ]
        texts = [generation.text for generation in await asyncio.gather(*calls)]
        for client in clients.values():
            await client.close()
        return {name: texts[index * len(TEXTS) :][: len(TEXTS)] for index, name in enumerate(clients)}

    return asyncio.run(ask())


def test_models_served_together_answer_as_alone(both: ServerProcess, bundle: Path) -> None:
    alone: dict[str, list[str]] = {}
    for name, path in (("tiny", bundle), ("de", SHIPPED_BUNDLE)):
        with ServerProcess(path) as server:
            alone |= answers(server.target, {name: ""})
    assert answers(both.target, {"tiny": "tiny", "de": "de"}) == alone
    assert answers(both.target, {"tiny": ""}) == {"tiny": alone["tiny"]}


def imported(name: str, source: Path, *flags: str) -> Path:
    """Import a trained model of others, and return its bundle."""

    def write(folder: Path) -> None:
        quick = ("--no-verify", "--no-explain")
        done = antiphon("import", str(source), str(folder / "bundle"), *quick, *flags, timeout_s=4 * PATIENCE_S)
        assert done.returncode == 0, done.stderr.decode()

    return kept_model(name, write) / "bundle"


def drawn_requests(models: Sequence[str], number: int) -> list[tuple[str, str, Options]]:
    """Return model, text and options of requests at random: greedy, in beams, or sampled with a seed."""
    dice = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"beam_width": 1, "num_logprobs": 2},
        {"beam_width": 3, "num_return_sequences": 2},
        {"temperature": 0.9, "top_p": 0.95, "num_return_sequences": 2, "num_logprobs": 2},
    ]
    requests = []
    for _ in range(number):
        model, kind = dice.choice(models), dice.choice(kinds)
        has_shortlist = model == "en-pt" and "temperature" not in kind and dice.random() < 0.5
        options = Options(
            max_new_tokens=dice.randrange(4, 24),
            seed=dice.randrange(1000) if "temperature" in kind else None,
            use_shortlist=has_shortlist or None,
            **kind,
        )
        requests.append((model, " ".join(dice.sample(MIXED, dice.randrange(1, 4))), options))
    return requests


def outputs_of(target: str, requests: Sequence[tuple[str, str, Options]], *, together: int) -> list[list[Any]]:
    """Return text, ids, log-probabilities and scores of the outputs of each request, `together` at any time."""

    async def ask() -> list[list[Any]]:
        async with AsyncClient(target) as client:
            turns = asyncio.Semaphore(together)

            async def answer(model: str, text: str, options: Options) -> list[Any]:
                async with turns:
                    outputs = await client.with_model(model).generate_outputs(text, options)
                return [(one.text, one.token_ids, one.logprobs, one.score) for one in outputs]

            return await asyncio.gather(*(answer(*request) for request in requests))

    return asyncio.run(ask())


@pytest.mark.combinations
def test_trained_models_of_three_kinds_served_together_answer_as_alone() -> None:
    """An encoder-decoder with attention, one with an SSRU decoder and a decoder-only model: bit for bit."""
    models = {
        "en-de": SHIPPED_BUNDLE,
        "en-pt": imported("firefox-en-pt", firefox_model("enpt"), "--precision", "int8"),
        "smol": imported("smollm2", smollm2(), "--precision", "float32", "--max-target-len", "256"),
    }
    requests = drawn_requests(list(models), 60)
    alone: dict[int, list[Any]] = {}
    for name, path in models.items():
        own = {index: request for index, request in enumerate(requests) if request[0] == name}
        with ServerProcess(None, ["--model", f"{name}={path}"]) as server:
            alone |= zip(own, outputs_of(server.target, list(own.values()), together=1), strict=True)
    flags = [flag for name, path in models.items() for flag in ("--model", f"{name}={path}")]
    with ServerProcess(None, flags) as server:
        assert outputs_of(server.target, requests, together=20) == [alone[index] for index in range(len(requests))]


@pytest.mark.combinations
def test_ready_line_and_list_contain_every_model_with_the_default_first(both: ServerProcess) -> None:
    assert "ready: tiny (int8), de (int8) on " in both.ready_line
    with Client(both.target) as client:
        assert [model.name for model in client.list_models()] == ["tiny", "de"]
        assert client.get_model().name == "tiny"
    with Client(both.target, model="de") as client:
        assert client.get_model().limits.max_source_len == 256


async def test_an_unknown_model_is_refused_with_the_names_of_those_served(both: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(both.target) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(model="x" * 500, text="a"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(caught.value).reason == "MODEL_NOT_FOUND"
    message = caught.value.details() or ""
    assert message.endswith("'tiny', 'de' are")
    assert len(message) < 200
    result = antiphon("generate", "--target", both.target, "--model", "fr", "Hello.")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr == b"antiphon generate: model 'fr' is not served here; 'tiny', 'de' are\n"


@pytest.mark.combinations
async def test_model_is_loaded_and_unloaded_and_its_stream_finishes(both: ServerProcess, bundle: Path) -> None:
    with AdminClient(both.admin_target) as admin, Client(both.target, model="tiny") as tiny:
        described = admin.load_model("guest", str(bundle), Limits(max_num_seqs=4, max_queued_requests=7))
        assert described.name == "guest"
        expected = tiny.generate_text(SENTENCES[0], LONG)
        async with AsyncClient(both.target, model="guest") as guest:
            stream = guest.generate(SENTENCES[0], LONG)
            first = await anext(stream)
            unloading = asyncio.ensure_future(asyncio.to_thread(admin.unload_model, "guest"))
            await left(both, "guest")
            with pytest.raises(ServerError) as caught:
                await guest.generate_text(SENTENCES[0])
            assert caught.value.code is grpc.StatusCode.NOT_FOUND
            text = first.text + "".join([delta.text async for delta in stream])
        assert await unloading
        assert text == expected.text
        assert {model.name for model in admin.get_memory().models} == {"tiny", "de"}
    assert not any("guest" in sample for sample in both.metrics())


async def left(server: ServerProcess, model: str) -> None:
    """Return when a model's health is NOT_SERVING."""
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=f"antiphon.v1.InferenceService/{model}")
        async for answer in stub.Watch(request):
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return


def test_metrics_have_a_label_for_the_model(both: ServerProcess) -> None:
    before = both.metrics()
    with Client(both.target, model="de") as client:
        generated = client.generate_text("How are you?").usage.generated_tokens
    name = "antiphon_generation_tokens_total"
    after = both.wait_for_metrics(
        lambda metrics: metrics[f"{name}{{model_name=de}}"] > before[f"{name}{{model_name=de}}"]
    )
    assert after[f"{name}{{model_name=de}}"] - before[f"{name}{{model_name=de}}"] == generated
    assert after[name] == before[name]  # of the first model
    assert after["antiphon_memory_budget_bytes"] == LIMIT_BYTES
    held = [value for sample, value in after.items() if sample.startswith("antiphon_model_memory_bytes")]
    with AdminClient(both.admin_target) as admin:
        memory = admin.get_memory()
    assert memory.budget_bytes == LIMIT_BYTES
    assert sum(held) == sum(m.weight_bytes + m.cache_bytes + m.workspace_bytes for m in memory.models)


@pytest.mark.combinations
def test_caches_of_all_models_or_of_one_are_reported(both: ServerProcess) -> None:
    with Client(both.target) as client, AdminClient(both.admin_target) as admin:
        described = {model.name: model.cache for model in client.list_models()}
        memory = {model.name: model.cache_bytes for model in admin.get_memory().models}
        caches = admin.get_cache().caches
        assert [cache.model for cache in caches] == ["de", "tiny"]
        for cache in caches:
            assert cache.num_blocks == described[cache.model].num_blocks > 0
            assert cache.num_blocks * described[cache.model].block_bytes == memory[cache.model]
            assert cache.worker == 0
        assert [cache.model for cache in admin.get_cache("tiny").caches] == ["tiny"]
        with pytest.raises(ServerError, match="'fr' is not served here") as caught:
            admin.get_cache("fr")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


BAD_LOADS: dict[str, tuple[dict[str, Any], grpc.StatusCode, str, str | None]] = {
    "name": ({"name": "a/b"}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "name"),
    "no name": ({"name": ""}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "name"),
    "relative": ({"path": "model/antiphon/bundles"}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "path"),
    "no path": ({"path": ""}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "path"),
    "no directory": ({"path": "/nowhere"}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_BUNDLE", None),
    "no bundle": ({"path": "/"}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_BUNDLE", None),
    "limit": ({"threads": 0}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "limits.threads"),
    "too large": ({"max_num_seqs": 4096}, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVER_MEMORY_BUDGET", None),
    "taken": ({"name": "tiny"}, grpc.StatusCode.ALREADY_EXISTS, "MODEL_EXISTS", None),
}


@pytest.mark.combinations
@pytest.mark.parametrize("case", BAD_LOADS)
async def test_a_load_is_refused_with_the_reason_and_the_field(both: ServerProcess, case: str) -> None:
    changes, code, reason, field = BAD_LOADS[case]
    given = {"name": "more", "path": str(SHIPPED_BUNDLE.resolve())} | changes
    limits = {name: given.pop(name) for name in ("threads", "max_num_seqs") if name in given}
    request = admin_pb2.LoadModelRequest(**given, limits=admin_pb2.ModelLimits(**limits))
    async with grpc.aio.insecure_channel(both.admin_target) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.LoadModel(request)
        assert [model.name for model in (await stub.GetMemory(admin_pb2.GetMemoryRequest())).models] == ["de", "tiny"]
    assert (caught.value.code(), details_of(caught.value).reason) == (code, reason)
    assert details_of(caught.value).field == field


@pytest.mark.combinations
@pytest.mark.parametrize("grace_s", [-1.0, 1e6])
def test_an_unload_is_refused_when_its_grace_is_out_of_range(both: ServerProcess, grace_s: float) -> None:
    with (
        AdminClient(both.admin_target) as admin,
        pytest.raises(ServerError, match=r"grace is .*; it must be 0 to 3600"),
    ):
        admin.unload_model("de", grace_s=grace_s)


@pytest.mark.combinations
async def test_admin_port_is_off_by_default(server: ServerProcess, both: ServerProcess) -> None:
    assert server.admin_target is None
    for target in (server.target, both.target):  # nor is it on the port of the others
        async with grpc.aio.insecure_channel(target) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetMemory(admin_pb2.GetMemoryRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.combinations
async def test_channelz_shows_the_connections_on_the_admin_port_only(both: ServerProcess) -> None:
    async with (
        grpc.aio.insecure_channel(both.target) as channel,
        grpc.aio.insecure_channel(both.admin_target or "") as admin,
    ):
        asked: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        shown = channelz_pb2_grpc.ChannelzStub(admin)

        async def num_succeeded() -> int:
            """Return the successful calls on the models' port, whose server is created before the admin service's."""
            servers = (await shown.GetServers(channelz_pb2.GetServersRequest())).server
            assert len(servers) == 2
            return min((server.ref.server_id, int(server.data.calls_succeeded)) for server in servers)[1]

        before = await num_succeeded()
        await asyncio.gather(*(asked.ListModels(inference_pb2.ListModelsRequest()) for _ in range(5)))
        async with asyncio.timeout(PATIENCE_S):  # a call is counted some time after its client has the answer
            while (after := await num_succeeded()) < before + 5:
                pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
    assert after == before + 5
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.combinations
def test_models_command_lists_loads_unloads_and_shows_memory(both: ServerProcess) -> None:
    admin = ("--admin-target", both.admin_target or "")
    loaded = antiphon("models", "load", "again", str(SHIPPED_BUNDLE), "--max-num-seqs", "2", *admin)
    assert (loaded.returncode, loaded.stdout) == (0, b"again is served\n")
    listed = antiphon("models", "list", "--target", both.target).stdout.decode().splitlines()
    assert [line.split()[0] for line in listed] == ["name", "tiny", "de", "again"]
    assert [line.split()[-1] == "yes" for line in listed[1:]] == [True, False, False]
    memory = antiphon("models", "memory", *admin).stdout.decode().splitlines()
    assert [line.split()[0] for line in memory] == ["name", "again", "de", "tiny", "all", "budget:"]
    gone = antiphon("models", "unload", "again", "--grace-s", "5", *admin)
    assert (gone.returncode, gone.stdout) == (0, b"again is gone\n")
    again = antiphon("models", "unload", "again", *admin)
    assert (again.returncode, again.stdout) == (2, b"")
    assert again.stderr == b"antiphon models: model 'again' is not served here; 'tiny', 'de' are\n"


@pytest.mark.combinations
def test_models_command_shows_the_blocks_of_every_running_request(both: ServerProcess) -> None:
    with Client(both.target, model="tiny") as client:
        num_blocks = {model.name: model.cache.num_blocks for model in client.list_models()}
        with repeated(lambda: client.generate_text("How are you?", Options(ignore_eos=True))):
            end_s = time.monotonic() + PATIENCE_S
            rows = cache_rows(both)
            while not any("request" in row for row in rows) and time.monotonic() < end_s:
                rows = cache_rows(both)
    assert rows[0] == ["name", "process", "holder", "source", "target", "blocks"]
    holders = [row for row in rows if "request" in row]
    assert {row[0] for row in holders} == {"tiny"}
    assert all(int(row[-1]) == int(row[-2]) + int(row[-3]) for row in holders)
    totals = {name: sum(int(row[-1]) for row in rows if row[0] == name) for name in num_blocks}
    assert totals == num_blocks


def cache_rows(server: ServerProcess) -> list[list[str]]:
    """Return the words of each line of `antiphon models cache`."""
    done = antiphon("models", "cache", "--admin-target", server.admin_target or "")
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.decode().splitlines()]


@pytest.mark.combinations
def test_models_command_explains_how_to_open_the_admin_port() -> None:
    result = antiphon("models", "memory", "--admin-target", "127.0.0.1:1")
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"start one with: antiphon serve --admin-port 1" in result.stderr


@pytest.mark.combinations
def test_serve_refuses_models_beyond_the_budget_and_names_the_settings_to_lower(bundle: Path) -> None:
    ports = ("--port", "0", "--metrics-port", "0")
    budget = ("--memory-limit-bytes", "100000000")
    result = antiphon("serve", "--model", f"de={SHIPPED_BUNDLE}", "--model", f"tiny={bundle}", *ports, *budget)
    assert (result.returncode, result.stdout) == (2, b"")
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("antiphon serve: model 'tiny' needs ")
    assert "lower kv_cache_blocks from 9216" in line


@pytest.mark.combinations
async def test_sigterm_finishes_the_streams_of_every_model(bundle: Path) -> None:
    with ServerProcess(None, ["--model", f"one={bundle}", "--model", f"two={bundle}"]) as server:
        async with AsyncClient(server.target, model="one") as one, AsyncClient(server.target, model="two") as two:
            expected = await one.generate_text(SENTENCES[0], LONG)
            streams = [client.generate(SENTENCES[0], LONG) for client in (one, two)]
            firsts = [await anext(stream) for stream in streams]
            server.process.send_signal(signal.SIGTERM)
            rests = await asyncio.gather(*(_rest(stream) for stream in streams))
        code, errors = await asyncio.to_thread(server.finish)
    assert {first.text + rest for first, rest in zip(firsts, rests, strict=True)} == {expected.text}
    assert (code, "Traceback" in errors) == (0, False)


async def _rest(stream: Any) -> str:
    return "".join([delta.text async for delta in stream])
