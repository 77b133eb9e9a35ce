"""The laptop's stack: programs run without containers; container parts are checked as far as possible."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.server.settings import ServerConfig
from tests.deploy.scraping import PACKAGE, PATIENCE_S, Prometheus, free_port
from tests.deploy.tools import ROOT, tool
from tests.integration.process import environment

pytestmark = pytest.mark.programs

LAPTOP = ROOT / "deploy" / "laptop"
COMPOSE = LAPTOP / "compose.yaml"
GRAFANA = LAPTOP / "grafana"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


SERVICES = read(COMPOSE)["services"]


def test_watch_runs_a_server_and_prometheus_and_ends_both_on_an_interrupt() -> None:
    tool("prometheus", PACKAGE)
    ports = [str(free_port()) for _ in range(2)]
    options = ("--prometheus-port", ports[0], "--alertmanager-port", ports[1])
    serve = ("--port", "0", "--metrics-port", "0", "--threads", "1")
    process = subprocess.Popen(
        [sys.executable, LAPTOP / "watch.py", *options, *serve], stdout=subprocess.PIPE, text=True, env=environment()
    )
    with process:
        try:
            said = _said_until_ready(process)
            watching = Prometheus(f"http://127.0.0.1:{ports[0]}")
            watching.wait(lambda one: bool(one.ask('antiphon_build_info{job="antiphon"}')))
            assert said["prometheus"] == watching.url
            groups = [group["name"] for group in watching.get("rules")["groups"]]
            assert len(groups) > 3
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    for url in (said["metrics"], said["prometheus"]):
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5)


def test_play_runs_a_server_and_a_page_over_it_and_ends_both_on_an_interrupt() -> None:
    command = [sys.executable, "-m", "deploy.laptop.play", "--page-port", "0", "--port", "0", "--metrics-port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    with process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            page = re.search(r"http://\S+", said)
            assert page is not None, said
            with urllib.request.urlopen(f"{page[0]}/api/memory", timeout=PATIENCE_S) as answer:
                memory = json.loads(answer.read())
            assert memory["metrics"]["models"]["en-de"]["running"] == 0
            assert memory["caches"][0]["holders"] == []
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(page[0], timeout=5)


def test_play_reports_a_wrong_option_of_the_server() -> None:
    command = [sys.executable, "-m", "deploy.laptop.play", "--no-such-option"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "unrecognized arguments: --no-such-option" in done.stderr
    assert "play: the server ended with 2 before it was ready" in done.stderr


def _said_until_ready(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the printed names and addresses, up to the line that describes how to stop."""
    assert process.stdout is not None
    said: dict[str, str] = {}
    for line in process.stdout:
        if "Ctrl-C" in line:
            return said
        name, address = line.split()[:2]
        said[name] = address
    raise AssertionError(f"it ended with {process.wait()}, having said {said}")


def test_watch_reports_a_wrong_option_of_the_server() -> None:
    tool("prometheus", PACKAGE)
    ports = ("--prometheus-port", str(free_port()), "--alertmanager-port", str(free_port()))
    command = [sys.executable, str(LAPTOP / "watch.py"), *ports, "--max-num-seqs", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert "max_num_seqs" in ended.stderr
    assert "watch: the server ended with 2 before it was ready" in ended.stderr


def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "servers.yaml", "alertmanagers.yaml"):
        (tmp_path / name).write_bytes((LAPTOP / name).read_bytes())
    (tmp_path / "rules").symlink_to(ROOT / "deploy" / "alerts" / "rules")
    checked = subprocess.run(
        [tool("promtool", PACKAGE), "check", "config", tmp_path / "prometheus.yaml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("SUCCESS") >= 3  # the configuration, and two files of rules


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_no_more_rights_than_they_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"]), "a version, and no registry"


def test_containers_mount_existing_files() -> None:
    mounts = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", ())]
    sources = [source for source, *_ in mounts if source.startswith(".")]
    assert len(sources) >= 8
    assert [source for source in sources if not (LAPTOP / source).exists()] == []
    named = {source for source, *_ in mounts if not source.startswith(".")}
    assert named == set(read(COMPOSE)["volumes"])


def test_addresses_in_lists_are_those_of_containers() -> None:
    for name in ("servers.yaml", "alertmanagers.yaml"):
        (entry,) = read(LAPTOP / name)
        (address,) = entry["targets"]
        host, _, port = address.partition(":")
        assert any(mapping.endswith(f":{port}") for mapping in SERVICES[host]["ports"])


def test_settings_of_the_server_are_settings() -> None:
    names = {name.removeprefix("ANTIPHON_").lower() for name in SERVICES["antiphon"]["environment"]}
    assert names <= set(ServerConfig.model_fields)


def test_grafana_finds_datasource_and_dashboard() -> None:
    sources = read(GRAFANA / "datasources.yaml")["datasources"]
    (default,) = (source for source in sources if source.get("isDefault"))
    assert default["type"] == "prometheus"
    assert default["jsonData"]["timeInterval"] == read(LAPTOP / "prometheus.yaml")["global"]["scrape_interval"]
    for source in sources:
        host, _, port = source["url"].removeprefix("http://").partition(":")
        assert any(mapping.endswith(f":{port}") for mapping in SERVICES[host]["ports"]), source["name"]
    mounts = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])
    (provider,) = read(GRAFANA / "dashboards.yaml")["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"])
    assert mounts[home].endswith("antiphon-dashboard.json")


def test_compose_file_is_read_by_a_compose() -> None:
    program = tool("podman-compose", "install podman and podman-compose, of your system or PyPI")
    shown = subprocess.run([program, "-f", COMPOSE, "config"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert set(yaml.safe_load(shown.stdout)["services"]) == set(SERVICES)
