"""MLPerf's LoadGen and Locust load the same server with independent clocks and the same calls."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.cli import main as cli
from antiphon.load.drive import DriveError
from antiphon.load.mlperf_summary import read_summary
from tests.integration.process import PATIENCE_S, environment

LOCUSTFILE = Path(__file__).parents[2] / "deploy" / "load" / "locustfile.py"


@pytest.mark.parametrize("objective", ["--objective-ttft-ms", "--objective-p99-ms"])
def test_loadgen_sends_our_calls_and_returns_a_verdict(
    objective: str, target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlperf_loadgen")
    code = cli.main(
        ["load", "--target", target, "--rate", "60", "--duration", "1", objective, "60000",
         "--mlperf", str(tmp_path / "logs"), "--json", str(tmp_path / "json")]
    )  # fmt: skip
    assert code == 0
    held = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    summary = read_summary(tmp_path / "logs")
    assert held["e2e_ms"] == summary.percentiles_ms["e2e_ms"]
    assert list(held["e2e_ms"].values()) == sorted(held["e2e_ms"].values())
    # LoadGen reports that so few queries are not enough for its 99 %, and must report no other problem.
    assert (held["valid"], held["missed"], held["errors"]) == (False, ["Early stopping satisfied"], {})
    if objective == "--objective-ttft-ms":
        assert held["ttft_ms"]["p50"] <= held["e2e_ms"]["p50"]
        assert held["tokens_per_second"] > held["ok_per_second"]
    else:
        assert "ttft_ms" not in held
    assert "LoadGen: INVALID" in capfd.readouterr().out


def test_queries_that_fail_make_the_verdict_invalid(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlperf_loadgen")
    (tmp_path / "texts").write_text("far too long " * 10_000, encoding="utf-8")
    code = cli.main(
        ["load", "--target", target, "--rate", "60", "--duration", "0.5", "--objective-p99-ms", "60000",
         "--input", str(tmp_path / "texts"), "--mlperf", str(tmp_path / "logs"), "--json", str(tmp_path / "json")]
    )  # fmt: skip
    assert code == 1
    held = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    assert not held["valid"]
    assert held["errors"]["INVALID_ARGUMENT"] > 0
    assert "failed: INVALID_ARGUMENT" in capfd.readouterr().out


def test_invalid_summary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match="is not a summary"):
        read_summary(tmp_path)
    (tmp_path / "mlperf_log_summary.txt").write_text("Result is : VALID\n", encoding="utf-8")
    with pytest.raises(DriveError, match="Completed samples per second"):
        read_summary(tmp_path)


# A run time would depend on the machine. Locust writes its figures every second, but not at the end.
QUIT_ONCE_WRITTEN = """
import gevent
from pathlib import Path
from locust import events

@events.init.add_listener
def on_init(environment, **_):
    gevent.spawn(watch, environment)

def watch(environment):
    written = Path(f"{environment.parsed_options.csv_prefix}_stats.csv")
    while not (written.exists() and "Generate" in written.read_text()):
        gevent.sleep(0.1)
    environment.runner.quit()
"""


def test_locust_loads_a_server_without_a_failure(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("locust") is None:  # importing it would replace this process's threads by gevent's
        pytest.skip("locust is not here")
    (tmp_path / "quit_once_written.py").write_text(QUIT_ONCE_WRITTEN, encoding="utf-8")
    locustfiles = f"{LOCUSTFILE},{tmp_path / 'quit_once_written.py'}"
    ended = subprocess.run(
        [
            sys.executable, "-m", "locust", "-f", locustfiles, "--host", target, "--headless", "--users", "4",
            "--spawn-rate", "4", "--run-time", "100s", "--csv", str(tmp_path / "stats"), "--only-summary",
        ],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    with (tmp_path / "stats_stats.csv").open(encoding="utf-8", newline="") as stream:
        rows = {row["Name"]: row for row in csv.DictReader(stream)}
    assert {"Generate", "TTFT"} <= rows.keys(), ended.stdout + ended.stderr
    assert int(rows["TTFT"]["Request Count"]) >= int(rows["Generate"]["Request Count"]) > 0
    assert int(rows["Generate"]["Failure Count"]) == 0
