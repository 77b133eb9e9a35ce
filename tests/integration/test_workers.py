"""A server whose calls two processes answer, with engines of their own or one behind both: one server from outside."""

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from antiphon.client import AsyncClient, Client, Generation, Options, ServerError
from antiphon.client.admin_client import AdminClient
from antiphon.client.connection import Offer, offer_of
from antiphon.observability.metrics import MERGE_RULES
from antiphon.tools.capacity.footprint import SUPERVISOR_BYTES
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.certificates import Authority, as_pem, renew, replace
from tests.integration.conftest import SENTENCES
from tests.integration.process import PATIENCE_S, ServerProcess, antiphon, num_submitted

PORTS = ("--admin-port", "0", "--probe-port", "0")
WORKERS, FRONTS = ("--workers", "2"), ("--fronts", "2")
ENGINE = 0
"""Index of the process of the engine among those of a server with fronts."""
LONG = Options(ignore_eos=True, max_new_tokens=1500)
SHORT = Options(max_new_tokens=8)
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")


@pytest.fixture(scope="module", params=[WORKERS, FRONTS], ids=["workers", "fronts"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Flags of a server whose calls two processes answer."""
    chosen: tuple[str, ...] = request.param
    return chosen


@pytest.fixture(scope="module")
def two(bundle: Path, flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    """Serve in two processes; nothing is wrong when they end."""
    with ServerProcess(bundle, (*flags, *PORTS)) as process:
        yield process
        process.process.send_signal(signal.SIGTERM)
        code, errors = process.finish()
        assert code == 0
        assert "Traceback" not in errors


def workers_of(process: ServerProcess) -> list[int]:
    pid = process.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def answering(process: ServerProcess, flags: Sequence[str]) -> list[int]:
    """Return the ids of the two processes that answer calls. Call it before any is replaced."""
    return workers_of(process)[1:] if flags == FRONTS else workers_of(process)


def num_processes(flags: Sequence[str]) -> int:
    return 3 if flags == FRONTS else 2


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "the condition never became true"
        os.sched_yield()


class Reached:
    """Channels of their own connections, each known by the worker that answers it."""

    def __init__(self) -> None:
        self.channels: dict[int, grpc.aio.Channel] = {}

    def stub(self, worker: int) -> Any:
        return InferenceServiceStub(self.channels[worker])


async def offered(channel: grpc.aio.Channel) -> Offer:
    call: Any = InferenceServiceStub(channel).GenerateMany()
    await call.done_writing()
    return offer_of(await call.code(), await call.trailing_metadata())


@contextlib.asynccontextmanager
async def each_worker(target: str) -> AsyncIterator[Reached]:
    """Yield a connection to each of two workers."""
    reached = Reached()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(reached.channels) < 2:
                channel = grpc.aio.insecure_channel(target, options=_OWN_CONNECTION)
                offer = await offered(channel)
                assert offer.num_workers == 2
                if offer.is_known and offer.worker not in reached.channels:
                    reached.channels[offer.worker] = channel
                else:
                    await channel.close()
        yield reached
    finally:
        for channel in reached.channels.values():
            await channel.close()


async def rest_of(stream: Any) -> list[pb.GenerateResponse]:
    return [response async for response in stream]


def test_both_workers_answer_as_one_server(two: ServerProcess, server: ServerProcess, flags: tuple[str, ...]) -> None:
    before = num_submitted(two.metrics())
    with Client(two.target) as client, Client(server.target) as alone:
        results = list(client.generate_many(SENTENCES, SHORT))
        expected = list(alone.generate_many(SENTENCES, SHORT))
    assert all(isinstance(result, Generation) for result in results)
    assert [result.text for result in results if isinstance(result, Generation)] == [
        result.text for result in expected if isinstance(result, Generation)
    ]
    after = two.wait_for_metrics(lambda metrics: num_submitted(metrics) == before + len(SENTENCES))
    num = num_processes(flags)
    assert after["antiphon_workers_serving"] == after["antiphon_workers_configured"] == num
    assert {f"process_open_fds{{worker={name}}}" for name in (*range(num), "supervisor")} <= after.keys()


@pytest.mark.hardship
def test_supervisor_takes_no_more_memory_than_the_sizing_says(two: ServerProcess) -> None:
    assert resident_bytes(two.process.pid) <= SUPERVISOR_BYTES


@pytest.mark.hardship
def test_resident_memory_counts_shared_pages_once(two: ServerProcess) -> None:
    each = [resident_bytes(pid) for pid in (two.process.pid, *workers_of(two))]
    assert max(each) < two.metrics()["process_resident_memory_bytes"] < sum(each)


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_every_gauge_says_how_those_of_several_workers_become_one(two: ServerProcess) -> None:
    with urllib.request.urlopen(two.metrics_url, timeout=PATIENCE_S) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    gauges = {family.name for family in families if family.type == "gauge" and not family.name.endswith("_created")}
    assert gauges - MERGE_RULES.keys() == {"python_info"}


async def test_client_of_many_requests_uses_both_workers(two: ServerProcess) -> None:
    async with AsyncClient(two.target) as client:
        [_ async for _ in client.generate_many(SENTENCES, SHORT)]
        offers = [await offered(channel) for channel in client._channels._channels]
    assert sorted(offer.worker for offer in offers) == [0, 1]


@pytest.mark.hardship
def test_connections_spread_over_the_workers(two: ServerProcess, flags: tuple[str, ...]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    pids = answering(two, flags)
    with contextlib.ExitStack() as connections:
        opened = [connections.enter_context(socket.create_connection(("127.0.0.1", two.port))) for _ in range(1000)]
        ports = {connection.getsockname()[1] for connection in opened}
        until(lambda: sum(num_accepted(pid, two.port, ports) for pid in pids) == 1000)
        counts = [num_accepted(pid, two.port, ports) for pid in pids]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert min(counts) > 400, counts  # of 1,000 fair coins, six standard deviations are 95


def num_accepted(pid: int, server_port: int, client_ports: set[int]) -> int:
    """Return the number of connections from these ports that a process has accepted."""
    sockets = set()
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    for local, remote, inode in ((line[1], line[2], line[9]) for line in lines if line[0] != "sl"):
        if _port(local) == server_port and _port(remote) in client_ports:
            sockets.add(f"socket:[{inode}]")
    return len(sockets & set(open_files(pid)))


def _port(address: str) -> int:
    """Return the port of an address in a table of /proc/net, which is in hexadecimal digits."""
    return int(address.rpartition(":")[2], 16)


def open_files(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(entry.readlink())


@pytest.mark.hardship
async def test_model_is_loaded_into_and_unloaded_from_both_workers(two: ServerProcess, bundle: Path) -> None:
    def names(models: Sequence[pb.Model]) -> list[str]:
        return [model.name for model in models]

    with AdminClient(two.admin_target) as admin:
        alone = {model.name: model for model in admin.get_memory().models}
        assert admin.load_model("guest", str(bundle)).name == "guest"
        async with each_worker(two.target) as reached:
            for worker in (0, 1):
                listed = await reached.stub(worker).ListModels(pb.ListModelsRequest())
                assert names(listed.models) == [two.model, "guest"]
            held = {model.name: model for model in admin.get_memory().models}
            assert held[two.model] == alone[two.model]
            with pytest.raises(Exception, match="guest"):
                admin.load_model("guest", str(bundle))
            with pytest.raises(Exception, match="name"):
                admin.load_model("not a name", str(bundle))
            assert admin.unload_model("guest")
            for worker in (0, 1):
                listed = await reached.stub(worker).ListModels(pb.ListModelsRequest())
                assert names(listed.models) == [two.model]
    assert not any("guest" in sample for sample in two.metrics())


@pytest.mark.hardship
def test_caches_of_all_engines_are_reported(two: ServerProcess, flags: tuple[str, ...]) -> None:
    with Client(two.target) as client, AdminClient(two.admin_target) as admin:
        num_blocks = client.get_model().cache.num_blocks
        for caches in (admin.get_cache().caches, admin.get_cache(two.model).caches):
            found = [(cache.model, cache.worker, cache.num_blocks) for cache in caches]
            assert found == [(two.model, worker, num_blocks) for worker in ((ENGINE,) if flags == FRONTS else (0, 1))]
        with pytest.raises(ServerError, match="'fr' is not served here") as caught:
            admin.get_cache("fr")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


@pytest.mark.hardship
async def test_killed_worker_loses_only_its_own_calls_and_is_replaced(bundle: Path, flags: tuple[str, ...]) -> None:
    with ServerProcess(bundle, (*flags, *PORTS)) as process:
        with AdminClient(process.admin_target) as admin:
            admin.load_model("guest", str(bundle))
        async with each_worker(process.target) as reached:
            for worker in (0, 1):
                await rest_of(reached.stub(worker).Generate(_long_request()))
            before = process.metrics()
            killed, kept = answering(process, flags)
            os.kill(killed, signal.SIGSTOP)  # it cannot answer before it is killed
            lost, finished = [reached.stub(worker).Generate(_long_request()) for worker in (0, 1)]
            assert (await rest_of(finished))[-1].usage.generated_tokens == LONG.max_new_tokens
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest_of(lost)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        after = process.wait_for_metrics(partial(_is_whole_again, flags))
        assert kept in workers_of(process)
        assert killed not in workers_of(process)
        sums = [key for key in before if key.endswith("_total") or "_total{" in key or "_count" in key]
        assert all(after[key] >= before[key] for key in sums)
        async with each_worker(process.target) as reached:  # the new one has what was loaded meanwhile
            for worker in (0, 1):
                models = (await reached.stub(worker).ListModels(pb.ListModelsRequest())).models
                assert [model.name for model in models] == [process.model, "guest"]
        with Client(process.target) as client:
            assert client.generate_text(SENTENCES[0], SHORT).token_ids


def _is_whole_again(flags: Sequence[str], metrics: dict[str, float]) -> bool:
    counts = metrics["antiphon_worker_restarts_total"], metrics["antiphon_workers_serving"]
    return counts == (1, num_processes(flags))


def _long_request() -> pb.GenerateRequest:
    options = pb.GenerateOptions(ignore_eos=True, max_new_tokens=LONG.max_new_tokens)
    return pb.GenerateRequest(text=SENTENCES[0], options=options)


@pytest.mark.hardship
async def test_requests_that_share_calls_survive_the_death_of_a_worker(bundle: Path, flags: tuple[str, ...]) -> None:
    with ServerProcess(bundle, (*flags, *PORTS)) as process:
        async with AsyncClient(process.target) as client:
            results: list[object] = []
            async for result in client.generate_many(SENTENCES * 8, Options(ignore_eos=True, max_new_tokens=100)):
                if not results:
                    os.kill(answering(process, flags)[0], signal.SIGKILL)
                results.append(result)
    assert len(results) == 8 * len(SENTENCES)
    assert all(isinstance(result, Generation) for result in results)


@pytest.mark.hardship
async def test_drain_finishes_the_streams_of_both_workers(bundle: Path, flags: tuple[str, ...]) -> None:
    with ServerProcess(bundle, (*flags, *PORTS)) as process:
        async with (
            each_worker(process.target) as reached,
            grpc.aio.insecure_channel(str(process.probe_target)) as probes,
        ):
            health: Any = health_pb2_grpc.HealthStub(probes)
            checked = await health.Check(health_pb2.HealthCheckRequest())
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            streams = [aiter(reached.stub(worker).Generate(_long_request())) for worker in (0, 1)]
            for stream in streams:
                await anext(stream)
            process.process.send_signal(signal.SIGTERM)
            for rest in await asyncio.gather(*(rest_of(stream) for stream in streams)):
                assert rest[-1].usage.generated_tokens == LONG.max_new_tokens
        code, errors = await asyncio.to_thread(process.finish)
        assert code == 0, errors
    assert is_free(process.port)


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


@pytest.mark.hardship
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_supervisor(bundle: Path, flags: tuple[str, ...], number: signal.Signals) -> None:
    with ServerProcess(bundle, (*flags, *PORTS)) as process:
        pids = workers_of(process)
        assert len(pids) == num_processes(flags)
        process.process.send_signal(number)
        process.finish()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert is_free(process.port)


@pytest.mark.hardship
def test_both_workers_present_a_renewed_certificate(bundle: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    shown = authority.server()
    with ServerProcess(bundle, (*flags, *PORTS, f"--tls-cert={shown.cert}", f"--tls-key={shown.key}")) as process:
        pids = workers_of(process)
        for _ in range(3):
            new = authority.server()
            renew(shown, new)
            until(partial(_all_show, process, as_pem(new)))
        assert workers_of(process) == pids


@pytest.mark.hardship
@pytest.mark.parametrize("index", [0, 1])  # with fronts, the engine and a front
def test_worker_that_hangs_is_killed_and_replaced(bundle: Path, flags: tuple[str, ...], index: int) -> None:
    with ServerProcess(bundle, (*flags, *PORTS, "--watchdog-timeout-s", "1")) as process:
        pids = workers_of(process)
        os.kill(pids[index], signal.SIGSTOP)
        process.wait_for_metrics(partial(_is_whole_again, flags))
        assert set(pids) - set(workers_of(process)) == {pids[index]}
        with Client(process.target) as client:
            assert client.generate_text(SENTENCES[0], SHORT).token_ids


@pytest.mark.hardship
async def test_killed_engine_ends_the_calls_of_its_fronts_and_is_replaced(bundle: Path) -> None:
    with ServerProcess(bundle, (*FRONTS, *PORTS)) as process:
        with AdminClient(process.admin_target) as admin:
            admin.load_model("guest", str(bundle))
        before = process.metrics()
        pids = workers_of(process)
        async with each_worker(process.target) as reached:
            streams = [aiter(reached.stub(front).Generate(_long_request())) for front in (0, 1)]
            for stream in streams:
                await anext(stream)
            os.kill(pids[ENGINE], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(grpc.aio.AioRpcError, match="the process of the engine has ended") as caught:
                    await rest_of(stream)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            after = process.wait_for_metrics(partial(_is_whole_again, FRONTS))
            assert set(workers_of(process)) > set(pids[1:])
            for front in (0, 1):  # over the same connections; the new engine has what was loaded meanwhile
                for model in (process.model, "guest"):
                    message = pb.GenerateUnaryRequest(model=model, text=SENTENCES[0])
                    await _until_available(partial(reached.stub(front).GenerateUnary, message))
        sums = [key for key in before if key.endswith("_total") or "_total{" in key or "_count" in key]
        assert all(after[key] >= before[key] for key in sums)


async def _until_available(call: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        code = grpc.StatusCode.UNAVAILABLE
        while code is grpc.StatusCode.UNAVAILABLE:
            code = await call().code()
        assert code is grpc.StatusCode.OK


@pytest.mark.hardship
async def test_rows_of_a_killed_front_are_free_again(bundle: Path) -> None:
    flags = ("--fronts", "2", *PORTS, "--max-num-seqs", "1", "--max-queued-requests", "1", "--max-queue-time-s", "60")
    with ServerProcess(bundle, flags) as process:
        async with each_worker(process.target) as reached:
            stream = aiter(reached.stub(0).Generate(_long_request()))
            await anext(stream)
            waiting = reached.stub(1).GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]))
            os.kill(answering(process, FRONTS)[0], signal.SIGKILL)
            assert (await waiting).outputs  # it got the only row


@pytest.mark.hardship
async def test_full_queue_is_refused_through_fronts_with_pushback(bundle: Path) -> None:
    limits = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--max-queue-time-s", "60")
    with ServerProcess(bundle, (*FRONTS, *PORTS, *limits)) as process:
        async with each_worker(process.target) as reached:
            message = pb.GenerateUnaryRequest(text=SENTENCES[0], options=_long_request().options)
            calls = [reached.stub(index % 2).GenerateUnary(message) for index in range(16)]
            codes = Counter([await call.code() for call in calls])
            assert codes.keys() == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
            for call in calls:
                if await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    trailers = {str(key): value for key, value in await call.trailing_metadata()}
                    assert int(trailers["grpc-retry-pushback-ms"]) > 0
                    assert "1 requests wait already" in await call.details()
        metrics = process.metrics()
        assert num_submitted(metrics) == codes[grpc.StatusCode.OK]
        refused = metrics["antiphon_requests_refused_total{reason=QUEUE_FULL}"]
        assert refused == codes[grpc.StatusCode.RESOURCE_EXHAUSTED]


@pytest.mark.hardship
async def test_both_workers_read_the_tokens_again(bundle: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(_token_line("first"))
    tokens.chmod(0o600)
    with ServerProcess(bundle, (*flags, f"--auth-tokens-file={tokens}")) as process:
        replace(tokens, _token_line("second").encode())
        tokens.chmod(0o600)
        seen = Counter[tuple[int, str]]()
        async with asyncio.timeout(PATIENCE_S):
            while {(0, "OK"), (1, "OK")} - seen.keys():  # with the new token
                seen[await _answer(process, "second")] += 1
        assert {code for _, code in [await _answer(process, "first") for _ in range(40)]} == {"UNAUTHENTICATED"}


def _token_line(token: str) -> str:
    return f"someone:{hashlib.sha256(token.encode()).hexdigest()}\n"


async def _answer(process: ServerProcess, token: str) -> tuple[int, str]:
    """Return the worker that a new connection reaches, and the status of a call with a token."""
    async with grpc.aio.insecure_channel(process.target, options=_OWN_CONNECTION) as channel:
        call: Any = InferenceServiceStub(channel).GenerateMany(metadata=(("authorization", f"Bearer {token}"),))
        await call.done_writing()
        code = await call.code()
        return offer_of(code, await call.trailing_metadata()).worker, code.name


def _all_show(process: ServerProcess, leaf: str) -> bool:
    """Return whether both workers present a certificate: one in 10**12 answers is wrong."""
    return all(ssl.get_server_certificate(("127.0.0.1", process.port)) == leaf for _ in range(40))


@pytest.mark.hardship
def test_what_is_wrong_is_said_once_with_exit_code_2(bundle: Path, tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    many = antiphon("serve", str(bundle), "--port=0", "--metrics-port=0", f"--workers={num_cores + 1}")
    assert many.returncode == 2
    assert many.stderr.decode().startswith(f"antiphon serve: workers is {num_cores + 1}; it must be at most")
    both = antiphon("serve", str(bundle), "--port=0", "--metrics-port=0", "--workers=2", "--fronts=1")
    assert (both.returncode, both.stderr.decode().count("\n")) == (2, 1)
    assert "fronts is 1 and workers is 2" in both.stderr.decode()
    for flags in (WORKERS, FRONTS):
        wrong = antiphon("serve", str(tmp_path), "--port=0", "--metrics-port=0", *flags)
        assert (wrong.returncode, wrong.stderr.decode().count("\n")) == (2, 1)
        assert f"{tmp_path} is not a bundle" in wrong.stderr.decode()


@pytest.mark.hardship
def test_weights_are_mapped_once_and_cores_are_divided(
    two: ServerProcess, bundle: Path, flags: tuple[str, ...]
) -> None:
    cores, resident_kb = [], []
    for pid in workers_of(two):
        cores.append(frozenset(os.sched_getaffinity(pid)))
        mappings = list(mappings_of(pid, bundle))
        for mapping in mappings:
            assert mapping["Private_Dirty"] == mapping["Anonymous"] == 0
        resident_kb.append(sum(mapping["Rss"] for mapping in mappings))
    if flags == FRONTS:
        assert resident_kb[1:] == [0, 0]
        assert resident_kb[ENGINE] > 0
    else:
        assert not cores[0] & cores[1]


def mappings_of(pid: int, folder: Path) -> Iterator[Counter[str]]:
    """Yield the kilobytes of each mapping of a file in a folder."""
    found: Counter[str] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            if found is not None:
                yield found
            found = Counter() if values and values[-1].startswith(str(folder)) else None
        elif found is not None and len(values) == 2 and values[1] == "kB":
            found[name[:-1]] = int(values[0])
