"""`antiphon generate` with the real server: standard output, standard error and exit code."""

import json
import os
import pty
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from antiphon.client import Client, Options
from tests.integration.conftest import SENTENCES
from tests.integration.process import ANTIPHON, PATIENCE_S, ServerProcess, antiphon, environment

SHORT = ("--max-new-tokens", "12")
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


def generate(server: ServerProcess, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return antiphon("generate", "--target", server.target, *SHORT, *arguments, stdin=stdin)


def expected_lines(server: ServerProcess, texts: Sequence[str]) -> list[str]:
    """Return one line for each text from the client; empty for a blank text."""
    with Client(server.target) as client:
        return [
            client.generate_text(text, Options(max_new_tokens=12)).text.translate(_LINE_ENDS) if text.strip() else ""
            for text in texts
        ]


def lines_of(output: bytes) -> list[str]:
    """Count lines as `wc -l` does."""
    text = output.decode()
    assert text == "" or text.endswith("\n")
    return text.split("\n")[:-1]


def test_generate_prints_each_text_on_its_line(server: ServerProcess) -> None:
    result = generate(server, *SENTENCES[:3])
    assert (result.returncode, result.stderr) == (0, b"")
    assert lines_of(result.stdout) == expected_lines(server, SENTENCES[:3])


def test_generate_prints_one_line_for_each_line_in_order(server: ServerProcess) -> None:
    texts = [*SENTENCES, "", "  \t", "ends with a carriage return\r", "a\u2028b", "last"] * 3
    result = generate(server, "--concurrency", "32", stdin="\n".join(texts).encode())
    assert (result.returncode, result.stderr) == (0, b"")
    assert lines_of(result.stdout) == expected_lines(server, texts)


@pytest.mark.combinations
@pytest.mark.parametrize("stdin", [b"", b"\n", b"\n\n\n"])
def test_generate_prints_an_empty_line_for_an_empty_line(server: ServerProcess, stdin: bytes) -> None:
    assert generate(server, stdin=stdin).stdout == stdin


def test_generate_names_failed_lines_and_continues(server: ServerProcess) -> None:
    texts = [SENTENCES[0].encode(), b"caf\xe9", b"wort " * 500, SENTENCES[1].encode()]
    result = generate(server, stdin=b"\n".join(texts))
    first, last = expected_lines(server, SENTENCES[:2])
    assert lines_of(result.stdout) == [first, "", "", last]
    undecodable, too_long = result.stderr.decode().splitlines()
    assert "line 2: not UTF-8: byte 0xe9 at offset 3" in undecodable
    assert "line 3: text is" in too_long
    assert "1 to 256 tokens" in too_long
    assert result.returncode == 1


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "2"], "--top-p is 2.0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--beam-width", "2", "--temperature", "1"], "--temperature is 1.0; it must be 0 if beam_width is above 1"),
        (["--num-return-sequences", "2"], "--num-return-sequences is 2"),
        (["--stop-ids", "400000"], "--stop-ids is token id 400000"),
        (["--model", "nope"], "'nope'"),
    ],
)
@pytest.mark.parametrize("texts", [["one"], []])
def test_generate_stops_with_one_line_when_an_option_is_wrong(
    server: ServerProcess, flags: list[str], message: str, texts: list[str]
) -> None:
    result = generate(server, *flags, *texts, stdin=b"one\ntwo\n" * 50)
    (line,) = result.stderr.decode().splitlines()
    assert (result.returncode, result.stdout) == (2, b"")
    assert message in line


def outputs_of(server: ServerProcess, text: str, **options: Any) -> list[str]:
    with Client(server.target) as client:
        outputs = client.generate_outputs(text, Options(max_new_tokens=12, **options))
        return [output.text.translate(_LINE_ENDS) for output in outputs]


@pytest.mark.combinations
def test_generate_prints_one_line_for_each_sequence_best_first(server: ServerProcess) -> None:
    flags = ("--beam-width", "4", "--num-return-sequences", "3", "--length-penalty", "0.5")
    options: dict[str, Any] = dict(beam_width=4, num_return_sequences=3, length_penalty=0.5)
    expected = [outputs_of(server, text, **options) for text in SENTENCES[:2]]
    by_argument = generate(server, *flags, *SENTENCES[:2])
    assert (by_argument.returncode, by_argument.stderr) == (0, b"")
    assert lines_of(by_argument.stdout) == [*expected[0], *expected[1]]
    lines = f"{SENTENCES[0]}\n\n{'wort ' * 500}\n{SENTENCES[1]}\n".encode()
    by_line = generate(server, *flags, stdin=lines)
    assert by_line.returncode == 1
    assert lines_of(by_line.stdout) == [*expected[0], *[""] * 6, *expected[1]]


@pytest.mark.combinations
def test_generate_streams_the_best_hypothesis(server: ServerProcess) -> None:
    result = generate(server, "--beam-width", "3", SENTENCES[0])
    assert lines_of(result.stdout) == outputs_of(server, SENTENCES[0], beam_width=3)


@pytest.mark.combinations
def test_generate_sends_every_kind_of_control(server: ServerProcess) -> None:
    options: dict[str, Any] = dict(
        temperature=1.5,
        num_return_sequences=2,
        seed=3,
        logit_bias={50: 4.0, 51: -4.0},
        suppressed_ids=[60, 61],
        stop_strings=["e", "n"],
        prefix_text="Der",
        repetition_penalty=1.2,
    )
    flags = (
        "--temperature 1.5 --num-return-sequences 2 --seed 3 --logit-bias 50=4 --logit-bias 51=-4 "
        "--suppressed-ids 60,61 --stop-strings e --stop-strings n --prefix-text Der --repetition-penalty 1.2"
    )
    result = generate(server, *flags.split(), SENTENCES[0])
    assert result.stderr == b""
    assert lines_of(result.stdout) == outputs_of(server, SENTENCES[0], **options)


@pytest.mark.parametrize("texts", [[SENTENCES[0]], []])
def test_generate_prints_the_whole_answer_as_json(server: ServerProcess, texts: list[str]) -> None:
    flags = ("--json", "--num-logprobs", "2", "--num-return-sequences", "2", "--temperature", "1", "--seed", "5")
    result = generate(server, *flags, *texts, stdin=f"{SENTENCES[0]}\n\n".encode())
    printed = [json.loads(line) for line in lines_of(result.stdout)]
    with Client(server.target) as client:
        options = Options(max_new_tokens=12, num_logprobs=2, num_return_sequences=2, temperature=1, seed=5)
        expected = client.generate_outputs(SENTENCES[0], options)
    assert len(printed) == (2 if texts else 4)
    assert printed[2:] == [None] * (len(printed) - 2)
    for output, found in zip(expected, printed, strict=False):
        assert found.pop("timing")["total_s"] > 0
        given = json.loads(json.dumps(asdict(output)))
        del given["timing"]
        assert found == given


@pytest.mark.combinations
@pytest.mark.parametrize("texts", [["one"], []])
def test_generate_names_the_target_when_no_server_listens(texts: list[str]) -> None:
    result = antiphon("generate", "--target", "127.0.0.1:1", *texts, stdin=b"one\n")
    (line,) = result.stderr.decode().splitlines()
    assert (result.returncode, result.stdout) == (2, b"")
    assert "127.0.0.1:1" in line
    assert "antiphon serve" in line


@pytest.mark.combinations
def test_generate_prints_the_answer_to_a_line_before_it_reads_the_next(server: ServerProcess) -> None:
    with start(server) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text, expected in zip(SENTENCES[:3], expected_lines(server, SENTENCES[:3]), strict=True):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode() == f"{expected}\n"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("redirection", "message"), [("<&-", "standard input is closed"), ("0>/dev/null", "standard input cannot be read")]
)
def test_generate_reports_an_input_that_it_cannot_read(server: ServerProcess, redirection: str, message: str) -> None:
    command = shlex.join([*ANTIPHON, "generate", "--target", server.target])
    result = subprocess.run(
        f"{command} {redirection}", shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=environment(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.combinations
@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGINT])
def test_generate_prints_no_error_when_its_reader_closes_the_pipe_or_it_is_interrupted(
    server: ServerProcess, number: signal.Signals
) -> None:
    with start(server) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        process.stdout.readline()
        if number is signal.SIGPIPE:
            process.stdout.close()
            process.stdin.write(b"two\n")
            process.stdin.flush()
        else:
            process.send_signal(number)
        assert process.wait(PATIENCE_S) == 128 + number
        assert process.stderr.read() == b""


@pytest.mark.combinations
def test_generate_draws_progress_on_a_terminal_only(server: ServerProcess) -> None:
    terminal, far_end = pty.openpty()
    with start(server, stderr=far_end) as process:
        os.close(far_end)
        out, _ = process.communicate("\n".join(SENTENCES).encode(), timeout=PATIENCE_S)
        drawn = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert f"{len(SENTENCES)} lines" in drawn
    assert lines_of(out) == expected_lines(server, SENTENCES)


def start(server: ServerProcess, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start `antiphon generate` with a standard input that the test controls."""
    return subprocess.Popen(
        [*ANTIPHON, "generate", "--target", server.target, *SHORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(),
    )
