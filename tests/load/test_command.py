"""`antiphon load` as a command, with a real server and with one that never answers."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main as cli
from antiphon.load import command
from antiphon.load.plan import Plan
from antiphon.load.results import Outcome, Record, Reply, Result
from antiphon.v1 import inference_pb2 as pb
from tests.integration.process import ANTIPHON, PATIENCE_S, environment
from tests.load.scripted import Asked, Scripted, served

PNG = b"\x89PNG\r\n\x1a\n"


def load(*arguments: str) -> int:
    return cli.main(["load", *arguments])


def figures(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return held


def test_load_reports_a_run_as_table_and_json(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = load(
        "--target", target, "--rate", "60", "--duration", "1", "--warmup", "0.3", "--processes", "2", "--check",
        "--connections", "2", "--max-new-tokens", "8", "--priority", "batch", "--objective-p99-ms", "60000", "--fail",
        "--json", str(tmp_path / "load.json"),
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    held = figures(tmp_path / "load.json")
    assert held["sent"] == held["ok"] == held["scheduled"] > 0
    assert (held["errors"], held["dropped"], held["unfinished"]) == ({}, 0, 0)
    assert held["checked"]["mismatches"] == 0
    assert held["objective"]["met"]
    assert held["goodput_per_second"] == held["sent_per_second"] == held["sent"]  # of one second
    for name in ("ttft_ms", "e2e_ms", "lag_ms"):
        spread = list(held[name].values())
        assert spread == sorted(spread)
        assert spread[0] >= 0
    assert held["ttft_ms"]["max"] <= held["e2e_ms"]["max"]
    assert f"sent {held['sent']}, ok {held['ok']}, failed 0" in printed.out
    assert "whole answer" in printed.out


@pytest.mark.combinations
def test_load_sends_the_texts_of_a_file(target: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("Stop!\n\nHow are you?\n", encoding="utf-8")
    wanted = ("--target", target, "--rate", "40", "--duration", "0.5", "--unary", "--json", str(tmp_path / "json"))
    assert load(*wanted, "--input", str(tmp_path / "texts")) == 0
    held = figures(tmp_path / "json")
    assert held["ok"] == held["sent"] > 0
    assert held["ttft_ms"] is None  # of whole answers there is none


@pytest.mark.combinations
def test_load_replays_a_trace_of_lengths(target: str, tmp_path: Path) -> None:
    rows = [(index / 50, 3 + index, 1 + index % 4) for index in range(20)]
    lines = [f"{time_s},{source_tokens},{max_new_tokens}" for time_s, source_tokens, max_new_tokens in rows]
    (tmp_path / "trace.csv").write_text("\n".join(["time_s,source_tokens,max_new_tokens", *lines]), encoding="utf-8")
    wanted = ("--target", target, "--trace", str(tmp_path / "trace.csv"), "--ignore-eos")
    assert load(*wanted, "--json", str(tmp_path / "json")) == 0
    held = figures(tmp_path / "json")
    assert held["sent"] == held["ok"] == len(rows)
    assert held["duration_s"] == pytest.approx(20 / 50)
    # Nothing ends an answer before its length.
    assert held["tokens_per_second"] / held["ok_per_second"] == pytest.approx(sum(row[2] for row in rows) / len(rows))


@pytest.mark.combinations
def test_load_draws_a_curve(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--target", target, "--rates", "40,20", "--duration", "0.4", "--objective-ttft-ms", "60000")
    assert load(*wanted, "--plot", str(tmp_path / "curve.png"), "--json", str(tmp_path / "json")) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert [run["rate"] for run in figures(tmp_path / "json")["runs"]] == [20, 40]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["rate/s", "20.0", "40.0"]


@pytest.mark.combinations
def test_load_searches_for_the_highest_rate(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is simulated: it sustains 100 requests per second, and beyond that a request waits a second."""

    def simulate(plan: Plan) -> Result:
        assert plan.rate is not None
        record = Record()
        wait_s = 0.1 if plan.rate <= 100 else 1.0
        for _ in range(100):
            record.add(Reply(scheduled_s=0, sent_s=0, first_s=0.01, last_s=wait_s, outcome=Outcome("OK")))
        return Result(plan=plan, record=record)

    monkeypatch.setattr(command, "drive", simulate)
    assert load("--target", target, "--search", "--objective-p99-ms", "250", "--json", str(tmp_path / "json")) == 0
    held = figures(tmp_path / "json")
    assert 95 <= held["highest_rate"] <= 100
    assert held["highest_rate"] == max(run["rate"] for run in held["runs"] if run["objective"]["met"])
    assert f"highest rate that meets the objective: {held['highest_rate']:.1f} requests/s" in capsys.readouterr().out


@pytest.mark.combinations
def test_load_fails_when_a_required_objective_is_missed(target: str) -> None:
    wanted = ("--target", target, "--rate", "20", "--duration", "0.3", "--objective-p99-ms", "0.001")
    assert load(*wanted) == 0
    assert load(*wanted, "--fail") == 1


@pytest.mark.combinations
def test_load_fails_when_requests_were_not_sent(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("--target", target, "--rate", "2000", "--duration", "0.2", "--max-outstanding", "1") == 1
    assert "requests were not sent: --max-outstanding 1 were running" in capsys.readouterr().err


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--rate", "-1"), "--rate is -1.0; it must be above 0"),
        (("--rate", "nan"), "--rate is nan"),
        (("--input", "absent"), "--input absent cannot be read"),
        (("--trace", "absent"), "--trace absent cannot be read"),
        (("--trace", "absent", "--rate", "5"), "--rate and --trace exclude each other"),
        (("--rate", "5", "--rates", "5,10"), "--rate and --rates exclude each other"),
        (("--search",), "--search needs --objective"),
        (("--json", "no/such/folder"), "--json no/such/folder cannot be written"),
        (("--max-outstanding", "0"), "--max-outstanding is 0"),
        (("--tls-ca", "absent"), "--tls-ca is absent, which cannot be read"),
        (("--mlperf", "logs"), "--mlperf needs --objective"),
        (("--mlperf", "logs", "--check"), "--mlperf excludes --plot and --check"),
        (("--target", "127.0.0.1:1"), "127.0.0.1:1 is unavailable"),
        (("--model", "absent"), "absent"),
    ],
)
def test_load_exits_with_2_and_reports_the_reason(
    target: str, flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("--target", target, "--timeout-s", "5", *flags) == 2
    printed = capsys.readouterr()
    assert printed.err.rpartition("antiphon load: ")[2].startswith(problem) or problem in printed.err
    assert not printed.out


@pytest.mark.combinations
def test_load_refuses_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    async def asked() -> int:
        scripted = Scripted()
        scripted.model.architecture = pb.ARCHITECTURE_ENCODER
        async with served(scripted) as target:
            return await asyncio.to_thread(load, "--target", target)

    assert asyncio.run(asked()) == 2
    assert "is an encoder-only model" in capsys.readouterr().err


@pytest.mark.combinations
async def test_interrupted_run_reports_the_results_so_far(tmp_path: Path) -> None:
    async def never(request: Asked) -> list[pb.GenerateResponse]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    scripted = Scripted(never)
    async with served(scripted) as target, asyncio.timeout(PATIENCE_S):
        process = await asyncio.create_subprocess_exec(
            *ANTIPHON, "load", "--target", target, "--rate", "50", "--duration", "600", "--processes", "2", "--json",
            str(tmp_path / "json"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
        )  # fmt: skip
        await scripted.first_asked.wait()
        process.send_signal(signal.SIGINT)
        printed, errors = await process.communicate()
    assert process.returncode == command.EXIT_INTERRUPTED, errors.decode()
    held = figures(tmp_path / "json")
    assert held["interrupted"]
    assert 0 < held["sent"] == held["unfinished"] < held["scheduled"]
    assert (held["ok"], held["errors"]) == (0, {})
    assert f"sent {held['sent']}, ok 0" in printed.decode()
    assert not errors.decode().count("Traceback")


@pytest.mark.combinations
def test_load_imports_neither_numpy_nor_modules_of_optional_flags() -> None:
    names = ("numpy", "matplotlib", "mlperf_loadgen", "google.rpc")
    code = f"import sys, antiphon.load.command; print([name for name in {names} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert ended.stdout == "[]\n"
