from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.service.bench import command
from antiphon.service.bench.offline import Offline
from antiphon.service.bench.report import BenchError, Finding, Speed, compare, table, to_json
from antiphon.service.bench.sources import EVERYDAY, load_texts, tokenize
from antiphon.service.bench.static import translate_static
from tests.fakes import EOS_ID, FakeRunner, source_of
from tests.serving import tiny_tokenizer


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(flags))


def speed(tokens_per_s: int, cpu_share: float | None = None) -> Speed:
    return Speed(num_tokens=tokens_per_s * 2, seconds=2.0, cpu_s=None if cpu_share is None else 2.0 * cpu_share)


def test_compare_takes_medians_of_rates_and_of_the_ratios_of_pairs() -> None:
    pairs = [(speed(100), speed(50)), (speed(90), speed(100)), (speed(400), speed(100))]
    (finding,) = compare("engine", "sentences", 32, pairs, against="nothing")
    assert (finding.antiphon, finding.baseline, finding.ratio, finding.unit) == (100.0, 100.0, 2.0, "tokens/s")


def test_compare_adds_cpu_seconds_where_both_sides_know_theirs() -> None:
    pairs = [(speed(100, 0.5), speed(100, 1.0))]
    assert [(f.unit, f.ratio) for f in compare("engine", "x", 1, pairs, against="")] == [
        ("tokens/s", 1.0),
        ("tokens/CPU s", 2.0),
    ]
    assert len(compare("grpc_overhead", "x", 1, [(speed(100), speed(100, 1.0))], against="")) == 1


def test_table_aligns_columns_and_leaves_out_what_there_is_not() -> None:
    findings = [
        Finding(name="engine", case="sentences", rows=32, antiphon=12345.6, baseline=50.0, ratio=1.5, unit="tokens/s"),
        Finding(name="startup", case="until ready", rows=64, antiphon=0.75, unit="s"),
    ]
    lines = table(findings).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["engine", "sentences", "32", "12,346", "50.00", "1.50", "tokens/s"],
        ["startup", "until", "ready", "64", "0.75", "s"],
    ]
    assert lines[0].index("unit") == lines[1].index("tokens/s") == lines[2].rindex("s")


def test_json_names_machine_and_commit_and_holds_every_finding() -> None:
    finding = Finding(name="startup", case="until ready", rows=64, antiphon=0.75, unit="s")
    described = json.loads(to_json([finding], threads=3))
    assert described.keys() == {"machine", "commit", "sections"}
    assert "3 threads" in described["machine"]
    (section,) = described["sections"]
    assert section["name"] == "startup"
    assert section["antiphon"] == 0.75
    assert section["ratio"] is None


def test_sources_repeat_until_there_are_enough() -> None:
    texts = load_texts(None, 2 * len(EVERYDAY))
    assert sorted(texts) == sorted(EVERYDAY * 2)
    assert load_texts(None, 3) == texts[:3]
    assert len(load_texts(None, None)) == len(EVERYDAY)


def test_sources_skip_blank_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("One.\n\n  \nTwo.\n", encoding="utf-8")
    assert sorted(load_texts(path, None)) == ["One.", "Two."]


def test_tokenize_names_the_text_that_is_too_long() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenize(["the cat"], tokenizer, 64) == [[*tokenizer.encode("the cat"), tokenizer.eos_id]]
    with pytest.raises(BenchError, match=r"--source: 'the mat on the mat'.*at most 4"):
        tokenize(["the cat", "the mat on the mat"], tokenizer, 4)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(2, 6)), min_size=1, max_size=30),
    rows=st.integers(1, 8),
    max_new_tokens=st.integers(1, 16),
)
def test_static_batches_and_the_engine_give_what_each_source_gives_alone(
    shapes: list[tuple[int, int]], rows: int, max_new_tokens: int
) -> None:
    runner = FakeRunner()
    sources = [
        list(source_of(target_len=target, length=length, variant=i)) for i, (target, length) in enumerate(shapes)
    ]
    expected = []
    for source in sources:
        tokens, _ = runner.answer(source, max_new_tokens)
        expected.append(tokens if len(tokens) == max_new_tokens else [*tokens, EOS_ID])
    for is_sorted in (False, True):
        batches = translate_static(runner, sources, rows=rows, max_new_tokens=max_new_tokens, is_sorted=is_sorted)
        assert batches == expected
    with Offline(FakeRunner(), rows=rows) as offline:
        for concurrency in (1, 2 * rows):
            answers = offline.translate(sources, concurrency=concurrency, max_new_tokens=max_new_tokens)
            assert answers == expected


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--source", "missing.txt"], "--source missing.txt"),
        (["--json", "missing/x.json"], "--json missing/x.json"),
        (["missing-bundle"], "missing-bundle"),
    ],
)
def test_command_names_what_it_cannot_use(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("antiphon bench: ")
    assert named in errors
    assert errors.count("\n") == 1


def test_command_refuses_an_empty_file_of_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n", encoding="utf-8")
    assert run("--source", str(path)) == 2
    assert "holds no sentence" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--repeat", "x"], ["--section", "nothing"]])
def test_command_refuses_flags_out_of_range(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err
