"""Standard output on a full device: the last line on standard error reports it, and the exit code is 2."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.process import ANTIPHON, PATIENCE_S, ServerProcess, environment

FULL = Path("/dev/full")
pytestmark = [pytest.mark.hardship, pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")]
UNREAD = "standard output cannot be written: No space left on device"
# With and without Python's buffer for printed text.
AT_ONCE, GATHERED = {"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": ""}


def check_told(arguments: Sequence[str], env: dict[str, str], name: str) -> None:
    with FULL.open("wb") as output:
        result = subprocess.run(
            [*ANTIPHON, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            env=environment(env),
            timeout=PATIENCE_S,
            check=False,
        )
    # The server's log lines come first; there are no others.
    assert result.stderr.decode().splitlines()[-1] == f"{name}: {UNREAD}"
    assert b"Traceback" not in result.stderr
    assert result.returncode == 2


@pytest.mark.parametrize("env", [AT_ONCE, GATHERED])
@pytest.mark.parametrize(
    "arguments",
    [("generate", "Guten Tag"), ("generate", "--json", "Guten Tag", "Hallo"), ("models", "list"), ("health",)],
)
def test_clients_report_a_full_output(server: ServerProcess, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    check_told((*arguments, "--target", server.target), env, f"antiphon {arguments[0]}")


@pytest.mark.parametrize("env", [AT_ONCE, GATHERED])
@pytest.mark.parametrize("arguments", [("serve", "--print-config"), ("size",)])
def test_commands_without_a_server_report_a_full_output(arguments: tuple[str, ...], env: dict[str, str]) -> None:
    check_told(arguments, env, f"antiphon {arguments[0]}")


@pytest.mark.parametrize("env", [AT_ONCE, GATHERED])
def test_server_does_not_serve_when_its_ready_line_has_no_space(bundle: Path, env: dict[str, str]) -> None:
    check_told(("serve", str(bundle), "--port", "0", "--metrics-port", "0"), env, "antiphon serve")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("--help",), "antiphon"), (("--version",), "antiphon"), (("generate", "--help"), "antiphon generate")],
)
def test_help_reports_that_its_output_has_no_space(arguments: tuple[str, ...], name: str) -> None:
    check_told(arguments, GATHERED, name)
