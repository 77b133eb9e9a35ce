"""`make watch`: runs server, Prometheus and Alertmanager on loopback, without containers.

    .venv/bin/python deploy/laptop/watch.py [--prometheus-port N] [--alertmanager-port N] [--data DIR] [SERVE OPTIONS]

Unknown options are passed to `antiphon serve`. Ctrl-C ends all programs, first the server, which drains.
Needs Prometheus from your system's packages. Alertmanager is optional.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LAPTOP = Path(__file__).parent
ALERTS = LAPTOP.parent / "alerts"
# Folders into which `make deploy-tools` unpacks packages for users without root.
UNPACKED = [LAPTOP.parents[1] / "build" / "deploy-tools" / "usr" / name for name in ("bin", "sbin")]
PATIENCE_S = 60
READY = re.compile(
    r"antiphon: ready: .* on (?P<target>\S+), metrics on http://(?P<metrics>[^/\s]+)/metrics"
    r"(, admin on (?P<admin>[^,;]+))?"
)
STOPPED_BY = (signal.SIGINT, signal.SIGTERM)


class CannotRun(Exception):
    """A program is missing or does not start; the message names it."""


def main() -> int:
    """Run until Ctrl-C or until one of the programs ends; return exit code 0 or 1."""
    parser = argparse.ArgumentParser(prog="make watch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prometheus-port", type=_port, default=9091, metavar="N")
    parser.add_argument("--alertmanager-port", type=_port, default=9093, metavar="N")
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the measurements in DIR (default: delete them)")
    options, serve = parser.parse_known_args()
    stop = threading.Event()
    for number in STOPPED_BY:
        signal.signal(number, lambda *_: stop.set())
    try:
        with tempfile.TemporaryDirectory(prefix="antiphon-watch-") as scratch:
            return _watch(options, serve, Path(scratch), stop)
    except CannotRun as error:
        print(f"watch: {error}", file=sys.stderr)
        return 1


def _watch(options: argparse.Namespace, serve: Sequence[str], scratch: Path, stop: threading.Event) -> int:
    data = options.data or scratch / "data"
    data.mkdir(parents=True, exist_ok=True)
    prometheus = _program("prometheus")
    if prometheus is None:
        raise CannotRun("prometheus is not on this machine: install your system's package (Debian: prometheus)")
    alertmanager = _program("alertmanager", "prometheus-alertmanager")
    watcher = f"127.0.0.1:{options.alertmanager_port}" if alertmanager else None
    children: dict[str, subprocess.Popen[str]] = {}
    with stopped_in_reverse(children):
        # Started first and ended last, so that they observe the server while it drains.
        if alertmanager and watcher:
            children["alertmanager"] = start(_alertmanager_command(alertmanager, data / "alertmanager", watcher))
        write_config(scratch, alertmanager=watcher)
        url = f"127.0.0.1:{options.prometheus_port}"
        children["prometheus"] = start(prometheus_command(prometheus, scratch, data / "prometheus", url))
        children["server"] = start([sys.executable, "-m", "antiphon.cli", "serve", *serve], is_heard=True)
        wait_ready(f"http://{url}/-/ready", children["prometheus"])
        if watcher:
            wait_ready(f"http://{watcher}/-/ready", children["alertmanager"])
        ready = heard_ready(children["server"])
        name_servers(scratch, [ready["metrics"]])
        _print_urls(ready["target"], ready["metrics"], url, watcher)
        return wait_for_end(children, stop)


def write_config(folder: Path, *, alertmanager: str | None, interval: str | None = None) -> None:
    """Write the configuration of Prometheus, without servers. interval: between scrapes; None keeps the shipped one."""
    text = (LAPTOP / "prometheus.yaml").read_text(encoding="utf-8")
    if interval is not None:
        text = re.sub(r"_interval: \S+", f"_interval: {interval}", text)
    (folder / "prometheus.yaml").write_text(text, encoding="utf-8")
    shutil.copytree(ALERTS / "rules", folder / "rules")
    _write_targets(folder / "alertmanagers.yaml", [alertmanager] if alertmanager else [])
    name_servers(folder, [])


def name_servers(folder: Path, addresses: Sequence[str]) -> None:
    """Write the addresses of metrics for Prometheus, which reads the file again when it changes."""
    _write_targets(folder / "servers.yaml", addresses)


def prometheus_command(program: Path, folder: Path, data: Path, address: str) -> list[str]:
    """Return the command that runs Prometheus with the configuration in a folder."""
    config = f"--config.file={folder / 'prometheus.yaml'}"
    return [str(program), config, f"--storage.tsdb.path={data}", f"--web.listen-address={address}", "--log.level=warn"]


def _alertmanager_command(program: Path, data: Path, address: str) -> list[str]:
    config, storage = f"--config.file={ALERTS / 'alertmanager.yaml'}", f"--storage.path={data}"
    # Without a cluster of Alertmanagers, and without its port.
    alone = "--cluster.listen-address="
    return [str(program), config, storage, alone, f"--web.listen-address={address}", "--log.level=warn"]


def start(command: Sequence[str], *, is_heard: bool = False) -> subprocess.Popen[str]:
    """Start a program in its own session, so that Ctrl-C does not reach it. is_heard: read its output from a pipe."""
    output = subprocess.PIPE if is_heard else None
    return subprocess.Popen(command, stdout=output, text=True, start_new_session=True, stdin=subprocess.DEVNULL)


def wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until a page is answered. Raises CannotRun if the process ends first, or after a minute."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise CannotRun(f"the process of {url} ended with {process.returncode}; its error message is above")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise CannotRun(f"{url} did not answer within {PATIENCE_S} s")


def _port(text: str) -> int:
    """Read a port. Raises ArgumentTypeError for an invalid one."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; it must be 1 to 65535")
    return int(text)


def _write_targets(path: Path, addresses: Sequence[str]) -> None:
    """Replace a list of targets atomically, because Prometheus can read it at any moment."""
    fresh = path.with_suffix(".new")
    listed = ", ".join(f'"{address}"' for address in addresses)
    fresh.write_text(f"- targets: [{listed}]\n", encoding="utf-8")
    fresh.replace(path)


def _program(*names: str) -> Path | None:
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, UNPACKED)])
    return next((Path(found) for name in names if (found := shutil.which(name, path=places))), None)


def heard_ready(server: subprocess.Popen[str]) -> re.Match[str]:
    """Return the addresses target, metrics and admin, from the line that the server prints when it is ready.

    Raises CannotRun if it ends before.
    """
    assert server.stdout is not None
    match = READY.search(server.stdout.readline())
    if match is None:
        raise CannotRun(f"the server ended with {server.wait()} before it was ready")
    return match


def _print_urls(target: str, metrics: str, prometheus: str, alertmanager: str | None) -> None:
    print(f"server        {target}   (antiphon generate --target {target} 'Good morning.')")
    print(f"metrics       http://{metrics}/metrics")
    print(f"prometheus    http://{prometheus}")
    print(f"alertmanager  {f'http://{alertmanager}' if alertmanager else 'not on this machine'}")
    print("dashboard     deploy/components/monitoring/antiphon-dashboard.json, imported into any Grafana")
    print("Ctrl-C ends all of them.", flush=True)


def wait_for_end(children: dict[str, subprocess.Popen[str]], stop: threading.Event) -> int:
    """Return 0 once `stop` is set. Raises CannotRun if a program ends before."""
    while not stop.wait(0.2):
        for name, child in children.items():
            if child.poll() is not None:
                raise CannotRun(f"{name} ended with {child.returncode}")
    return 0


@contextmanager
def stopped_in_reverse(children: dict[str, subprocess.Popen[str]]) -> Iterator[None]:
    """End the programs that were started within the context, the last one first."""
    try:
        yield
    finally:
        for child in reversed(children.values()):
            child.terminate()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
