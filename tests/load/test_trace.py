"""Traces are read, or refused with line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.load.plan import PlanError
from antiphon.load.workload import Entry, read_trace


def trace_of(folder: Path, text: str) -> list[Entry]:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


ENTRIES = [
    Entry(time_s=0.0, source_tokens=12, max_new_tokens=20),
    Entry(time_s=0.25, text='Is "this, here" a trace?'),
    Entry(time_s=2.5, source_tokens=3),
]


def test_json_lines_and_csv_give_the_same_trace(tmp_path: Path) -> None:
    json_lines = (
        '{"time_s": 7.5, "source_tokens": 12, "max_new_tokens": 20}\n\n'
        '{"time_s": 7.75, "text": "Is \\"this, here\\" a trace?"}\n'
        '{"time_s": 10, "source_tokens": 3}\n'
    )
    table = (
        "max_new_tokens,time_s,source_tokens,text\n"
        '20,7.5,12,\n,7.75,,"Is ""this, here"" a trace?"\n,10,3,\n'
    )  # fmt: skip
    assert trace_of(tmp_path, json_lines) == trace_of(tmp_path, table) == ENTRIES


def test_entries_are_sorted_by_time_and_start_at_zero(tmp_path: Path) -> None:
    lines = ['{"time_s": 1700000003, "text": "b"}', '{"time_s": 1700000001, "text": "a"}']
    assert trace_of(tmp_path, "\n".join(lines)) == [Entry(time_s=0.0, text="a"), Entry(time_s=2.0, text="b")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither JSON lines nor CSV"),
        ("time_s,text\n", "holds no request"),
        ("when,text\n1,a\n", "neither JSON lines nor CSV whose header names time_s"),
        ('{"time_s": 1, "text": "a"}\n{"time_s"', "line 2: not JSON"),
        ('{"time_s": 1, "text": "a"}\n[1]', "line 2: not a JSON object"),
        ('{"time_s": 1}', "line 1: give either text or source_tokens"),
        ('{"time_s": 1, "text": "a", "source_tokens": 3}', "line 1: give either text or source_tokens"),
        ('{"time_s": 1, "text": 5}', "line 1: text is 5"),
        ('{"text": "a"}', "line 1: time_s is None"),
        ('{"time_s": NaN, "text": "a"}', "line 1: time_s is nan"),
        ('{"time_s": "soon", "text": "a"}', "line 1: time_s is 'soon'"),
        ('{"time_s": 1, "source_tokens": 0}', "line 1: source_tokens is 0"),
        ('{"time_s": 1, "source_tokens": 2.5}', "line 1: source_tokens is 2.5"),
        ("time_s,source_tokens,max_new_tokens\n1,2,x\n", "line 2: max_new_tokens is 'x'"),
        ('{"time_s": 1, "text": "a", "output_tokens": 3}', "line 1: unknown field output_tokens"),
    ],
)
def test_invalid_trace_is_refused_by_line_and_field(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        trace_of(tmp_path, text)
    assert str(caught.value).startswith(f"--trace {tmp_path / 'trace'}")
    assert problem in str(caught.value)


def test_unreadable_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--trace .*absent cannot be read"):
        read_trace(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(PlanError, match=r"--trace .*latin cannot be read"):
        read_trace(tmp_path / "latin")
