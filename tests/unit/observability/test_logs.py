"""Format of log lines, fields of an RPC's line, and texts that no line may contain."""

from __future__ import annotations

import datetime
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from antiphon.domain.errors import InvalidArgument
from antiphon.observability.access_log import fields_of
from antiphon.observability.call import CallRecord, Sampler, TraceContext, log_request_id, read_trace_parent
from antiphon.observability.logging import configure_logging, rfc3339, where_of

SECRET = "Geheimnis"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Yield the stream of a test's log. Restores the root logger afterwards."""
    root = logging.getLogger()
    kept = root.level, list(root.handlers)
    yield io.StringIO()
    root.level, root.handlers = kept


def call_of(method: str = "a.B/C") -> CallRecord:
    return CallRecord(method=method, request_id="id-1", arrival_s=1.0, caller="ipv4:127.0.0.1")


def written(stream: io.StringIO) -> str:
    """Return the log so far, after the handler's thread has written it."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    return stream.getvalue()


def test_json_lines_are_objects_with_the_fields_of_every_record(stream: io.StringIO) -> None:
    configure_logging("debug", "json", stream)
    logging.getLogger("some.where").warning("two\nlines %s", 3, extra={"fields": {"answer": 42, "text": "a b"}})
    (line,) = written(stream).splitlines()
    record = json.loads(line)
    when = datetime.datetime.fromisoformat(record.pop("timestamp"))
    assert when.tzinfo == datetime.UTC
    assert abs(when - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=1)
    assert record == {
        "level": "warning", "logger": "some.where", "message": "two\nlines 3", "answer": 42, "text": "a b",
    }  # fmt: skip


def test_text_lines_quote_values_that_are_not_plain_words(stream: io.StringIO) -> None:
    configure_logging("info", "text", stream)
    log = logging.getLogger("x")
    log.info("rpc", extra={"fields": {"one": "a=b", "two": 'say "hi"\nnow', "three": 1.5, "four": "", "five": "a/b:1"}})
    log.debug("not shown")
    (line,) = written(stream).splitlines()
    assert re.fullmatch(r"\S+Z INFO x: rpc (.*)", line)
    assert line.endswith(r'one="a=b" two="say \"hi\"\nnow" three=1.5 four="" five=a/b:1')


@pytest.mark.parametrize("kind", ["text", "json"])
def test_records_carry_the_request_id_of_the_rpc_and_exceptions_as_text(kind: str, stream: io.StringIO) -> None:
    configure_logging("info", kind, stream)
    log_request_id.set(call_of().request_id)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("failed")
    finally:
        log_request_id.set("")
    logging.getLogger("x").info("outside")
    text = written(stream)
    assert (text.count("Traceback"), text.count("id-1")) == (1, 1)
    if kind == "json":
        assert [json.loads(line)["message"] for line in text.splitlines()] == ["failed", "outside"]
    assert "ValueError: broken" in text


def test_rfc3339_is_utc_to_the_microsecond() -> None:
    assert rfc3339(0.25) == "1970-01-01T00:00:00.250000Z"
    assert datetime.datetime.fromisoformat(rfc3339(1_800_000_000.5)).timestamp() == 1_800_000_000.5


def test_where_of_contains_locations_and_types_and_no_messages() -> None:
    try:
        try:
            int(SECRET)
        except ValueError as cause:
            raise InvalidArgument("text", SECRET, "shorter") from cause
    except InvalidArgument as error:
        shown = where_of(error)
    assert SECRET not in shown
    assert shown.index("builtins.ValueError") < shown.index("InvalidArgument")
    assert "test_where_of" in shown


def test_access_line_of_a_refusal_contains_the_field_and_not_its_value() -> None:
    call = call_of()
    call.error = InvalidArgument("options.prefix_text", SECRET, "shorter")
    call.code = "INVALID_ARGUMENT"
    call.trace = TraceContext("ab" * 16, None, is_sampled=True)
    call.ended_s = 1.25
    fields = fields_of(call)
    assert SECRET not in repr(fields)
    assert (fields["reason"], fields["field"]) == ("INVALID_FIELD", "options.prefix_text")
    assert (fields["total_ms"], fields["trace_id"]) == (250.0, "ab" * 16)


def test_traceparent_is_read_as_the_w3c_recommendation_requires() -> None:
    assert read_trace_parent(PARENT) == TraceContext(PARENT[3:35], PARENT[36:52], is_sampled=True)
    assert read_trace_parent(PARENT[:-2] + "02") == TraceContext(PARENT[3:35], PARENT[36:52], is_sampled=False)
    later = read_trace_parent(f"42{PARENT[2:]}-more")
    assert later is not None
    assert later.is_sampled


@pytest.mark.parametrize(
    "bad",
    [
        None, b"bytes", "", PARENT.upper(), PARENT + "-more", PARENT[:-1], PARENT + "\n", "ff" + PARENT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{'a' * 32}-{'0' * 16}-01", PARENT.replace("-", "_"),
    ],
)  # fmt: skip
def test_malformed_traceparent_is_ignored(bad: str | bytes | None) -> None:
    assert read_trace_parent(bad) is None


def test_sampler_starts_the_configured_share_of_traces() -> None:
    assert [Sampler(0.0).begin() for _ in range(100)] == [None] * 100
    traces = [Sampler(1.0).begin() for _ in range(100)]
    assert len({trace.trace_id for trace in traces if trace is not None}) == 100
    half = Sampler(0.5)
    kept = sum(half.begin() is not None for _ in range(4000))
    assert 1700 < kept < 2300  # ten standard deviations
