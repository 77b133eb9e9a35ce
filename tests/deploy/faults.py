"""Faults that are caused on a real server, the alerts that must fire for them, and their repair.

A fault is a generator: the fault lasts until the yielded repair function is called. Metrics are never faked: servers
are killed, stopped, overloaded, or get wrong profiles, limits and certificates. Only a model that hangs or raises is
simulated at the runner's boundary, because no input makes a correct model do so.
"""

import contextlib
import datetime
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from antiphon.bundle.manifest import load_bundle, write_manifest
from antiphon.client import Client
from antiphon.load.workload import EVERYDAY
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.certificates import Authority, Pair, trusting
from tests.deploy.control_group import limited_memory
from tests.deploy.proof import FAULTS, Cure, Scene, fault
from tests.integration.process import ANTIPHON, environment
from tests.reliability.footprint import footprint

__all__ = ["FAULTS", "killed", "stuck"]

MAX_RESTARTS = 10

# Runs the following command, with a decoder that is faulty while a file exists.
_FAULTY = """
import os, sys, time
from antiphon.runtime.native import NativeRunner
decode, steps = NativeRunner.decode, []
def faulty(self, batch):
    steps.append(batch)
    {fault}
    return decode(self, batch)
NativeRunner.decode = faulty
from antiphon.cli.main import main
sys.exit(main(sys.argv[sys.argv.index("serve"):]))
"""


@contextlib.contextmanager
def load(target: str, rate: float, *flags: str) -> Iterator[Cure]:
    """Run `antiphon load` until the context exits."""
    command = [*ANTIPHON, "load", "--target", target, "--rate", str(rate), "--duration", "3600", *flags]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=null, stderr=null, env=environment()) as process:
        try:
            yield process.kill
        finally:
            process.kill()


def faulty(flag: Path, fault: str) -> tuple[str, ...]:
    """Return a prefix for a server whose decoder is faulty while the file exists."""
    return (sys.executable, "-c", _FAULTY.format(fault=fault.format(flag=repr(str(flag)))))


@fault(cause="the process is killed", cure="it is started again", of_one=("TargetDown",))
def killed(scene: Scene) -> Iterator[Cure]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(scene.server())
        scene.seen(server)
        server.process.kill()
        yield lambda: stack.enter_context(scene.server(metrics_port=server.metrics_port))


@fault(cause="there is no target any more", cure="there is one again", of_all=("Absent",))
def forgotten(scene: Scene) -> Iterator[Cure]:
    with scene.server() as server:
        scene.seen(server)
        scene.watch.targets({})
        yield lambda: scene.watch.targets({scene.name: server.metrics_port})


@fault(cause="the process is killed and started again, over and over", cure="it is left alone", of_one=("Restarting",))
def restarted(scene: Scene) -> Iterator[Cure]:
    """Restart without waiting for readiness, because metrics come earlier. Two restarts can be too few."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(scene.server())
        port, process = server.metrics_port, server.process
        scene.seen(server)
        for _ in range(MAX_RESTARTS):
            (began,) = scene.watch.query(scene.began)
            process.kill()
            process.wait()
            command = [*ANTIPHON, "serve", "--port", "0", "--metrics-port", str(port)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, env=environment())
            stack.callback(process.wait)
            stack.callback(process.kill)
            scene.wait(f"{scene.began} > {began['value'][1]}")
            if scene.watch.query('ALERTS{alertname="AntiphonRestarting"}'):
                break
        yield lambda: None


@fault(
    cause="several times what the server can do is asked of it",
    cure="the load ends",
    of_one=("QueueGrowing", "QueueWaitHigh"),
    of_all=(
        "Refusing", "FirstTokenSlow", "AnswerSlow", "AvailabilityBudgetFast", "AvailabilityBudgetSlow",
        "LatencyBudgetFast", "LatencyBudgetSlow",
    ),
)  # fmt: skip
def overloaded(scene: Scene) -> Iterator[Cure]:
    long_answers = ("--max-new-tokens", "128", "--ignore-eos")
    with scene.server("--max-queue-time-s", "8") as server, load(server.target, 300, *long_answers) as stop:
        yield stop


@fault(
    cause="many long answers share a cache of two longest sequences",
    cure="the load ends",
    of_one=("CacheFull", "Preempting"),
)
def crowded(scene: Scene) -> Iterator[Cure]:
    long_answers = ("--max-new-tokens", "200", "--ignore-eos")
    with scene.server("--kv-cache-blocks", "66") as server, load(server.target, 100, *long_answers) as stop:
        yield stop


@fault(
    cause="the process is held for three quarters of each half second, as by a CPU limit that is too low",
    cure="it is held no more",
    of_one=("EventLoopLate",),
    of_all=("InterTokenSlow",),
)
def starved(scene: Scene) -> Iterator[Cure]:
    is_over = threading.Event()

    def hold(pid: int) -> None:
        while not is_over.wait(0.12):  # enough to answer a scrape
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(0.36)
            os.kill(pid, signal.SIGCONT)

    with scene.server() as server, load(server.target, 30, "--max-new-tokens", "64", "--ignore-eos"):
        scene.seen(server)
        holding = threading.Thread(target=hold, args=(server.process.pid,))
        holding.start()
        try:
            yield is_over.set
        finally:
            is_over.set()
            holding.join()


@fault(cause="a decoder step does not end", cure="it ends after all", of_one=("NoProgress", "EngineStuck"))
def stuck(scene: Scene) -> Iterator[Cure]:
    flag = scene.folder / "stuck"
    prefix = faulty(flag, "while os.path.exists({flag}): time.sleep(0.01)")
    with scene.server("--watchdog-timeout-s", "1", prefix=prefix) as server:
        flag.touch()
        with load(server.target, 10):
            yield flag.unlink


@fault(
    cause="one of two workers dies, and its bundle is gone from the disk",
    cure="the bundle is there again",
    of_one=("WorkersMissing",),
)
def bereft(scene: Scene) -> Iterator[Cure]:
    bundle, gone = scene.folder / "bundle", scene.folder / "gone"
    shutil.copytree(SHIPPED_BUNDLE, bundle)
    with scene.server("--workers", "2", bundle=bundle) as server:
        scene.seen(server)
        pid = server.process.pid
        worker, _ = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        bundle.rename(gone)
        os.kill(int(worker), signal.SIGKILL)
        yield lambda: gone.rename(bundle)


@fault(cause="every third decoder step raises", cure="none does", of_one=("Errors",))
def broken(scene: Scene) -> Iterator[Cure]:
    flag = scene.folder / "broken"
    prefix = faulty(flag, 'if os.path.exists({flag}) and len(steps) % 3 == 0: raise RuntimeError("broken")')
    with scene.server(prefix=prefix) as server, load(server.target, 10):
        flag.touch()
        yield flag.unlink


@fault(
    cause="the bundle's profile says a quarter of the memory that encoding takes",
    cure="the bundle with the true profile is served",
    of_one=("WorkspaceAboveFit", "ArenaRefusing"),
)
def misprofiled(scene: Scene) -> Iterator[Cure]:
    texts = scene.folder / "texts.txt"
    texts.write_text("\n".join([*EVERYDAY, " ".join(EVERYDAY)[:700]]) + "\n")
    limit = ("--workspace-limit-bytes", "900000")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(scene.server(*limit, bundle=misprofiled_bundle(scene.folder)))
        stop = stack.enter_context(load(server.target, 20, "--input", str(texts)))

        def cure() -> None:
            stop()
            server.process.kill()
            server.process.wait()
            again = stack.enter_context(scene.server(metrics_port=server.metrics_port))
            stack.enter_context(load(again.target, 20, "--input", str(texts)))

        yield cure


def misprofiled_bundle(folder: Path) -> Path:
    """Copy the shipped bundle, with a memory fit that is four times too low."""
    bundle = folder / "misprofiled"
    shutil.copytree(SHIPPED_BUNDLE, bundle)
    manifest = load_bundle(bundle).manifest
    assert manifest.memory is not None
    fits = {name: fit.model_copy(update={"a": fit.a / 4, "b": fit.b / 4}) for name, fit in manifest.memory.fits.items()}
    memory = manifest.memory.model_copy(update={"fits": fits})
    write_manifest(bundle, manifest.model_copy(update={"memory": memory}))
    return bundle


@fault(cause="clients ask for long streams and do not read them", cure="they are gone", of_one=("SlowReaders",))
def unread(scene: Scene) -> Iterator[Cure]:
    # A window as small as gRPC allows, so that an answer with all its alternatives overflows it.
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
    options = pb.GenerateOptions(max_new_tokens=250, ignore_eos=True, num_logprobs=20)
    with scene.server("--slow-reader-timeout-s", "0.5") as server:
        scene.seen(server)
        with grpc.insecure_channel(server.target, options=window) as channel:
            stub = InferenceServiceStub(channel)
            calls = [stub.Generate(pb.GenerateRequest(text=text, options=options)) for text in EVERYDAY[:12]]

            def cure() -> None:
                for call in calls:
                    call.cancel()

            yield cure


@fault(
    cause="connections take up the files that the process may open", cure="they are closed", of_one=("FilesNearLimit",)
)
def connected(scene: Scene) -> Iterator[Cure]:
    with scene.server(prefix=("prlimit", "--nofile=100:100")) as server, contextlib.ExitStack() as stack:
        for _ in range(65):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        yield stack.close


@fault(
    cause="the container's memory limit is a twentieth above what the process holds",
    cure="it is started again with twice the limit",
    of_one=("MemoryNearLimit",),
)
def confined(scene: Scene) -> Iterator[Cure]:
    with scene.server() as free:
        resident = footprint(free.process.pid).resident_bytes
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(limited_memory("antiphon-alerts-low", int(1.05 * resident)))
        server = stack.enter_context(scene.server(prefix=prefix))

        def cure() -> None:
            server.process.kill()
            server.process.wait()
            wider = stack.enter_context(limited_memory("antiphon-alerts-high", 2 * resident))
            stack.enter_context(scene.server(prefix=wider, metrics_port=server.metrics_port))

        yield cure


@fault(
    cause="the certificate ends in three days",
    cure="it is replaced by one of ninety, under the running server",
    of_one=("CertificateExpiring",),
)
def expiring(scene: Scene) -> Iterator[Cure]:
    authority = Authority(scene.folder)
    now = datetime.datetime.now(datetime.UTC)
    pair = authority.server(not_after=now + datetime.timedelta(days=3))
    with scene.server(f"--tls-cert={pair.cert}", f"--tls-key={pair.key}") as server:

        def cure() -> None:
            renew(pair, authority.server(not_after=now + datetime.timedelta(days=90)))
            connect(server.target, authority)

        yield cure


@fault(cause="the certificate is replaced by half of one", cure="by a whole one", of_one=("ReloadFailed",))
def mangled(scene: Scene) -> Iterator[Cure]:
    authority = Authority(scene.folder, "mangled")
    pair, other = authority.server(), authority.server()
    with scene.server(f"--tls-cert={pair.cert}", f"--tls-key={pair.key}") as server:
        scene.seen(server)
        pair.cert.write_bytes(other.cert.read_bytes()[:500])
        connect(server.target, authority)

        def cure() -> None:
            renew(pair, other)
            connect(server.target, authority)

        yield cure


def renew(pair: Pair, by: Pair) -> None:
    by.key.replace(pair.key)
    by.cert.replace(pair.cert)


def connect(target: str, authority: Authority) -> None:
    """Make a TLS handshake: the server checks its certificate files at each one."""
    with Client(target, connection=trusting(authority)) as client:
        client.generate_text(EVERYDAY[0])
