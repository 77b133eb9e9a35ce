"""Log lines: their format and fields, the texts that none may contain, and the writers of lines and spans."""

import datetime
import io
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import InvalidArgument
from antiphon.observability.access_log import fields_of
from antiphon.observability.background_writer import BackgroundWriter
from antiphon.observability.call import CallRecord, Sampler, TraceContext, log_request_id, read_trace_parent
from antiphon.observability.logging import BackgroundHandler, configure_logging, rfc3339, where_of
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.tracing import Spans
from tests.disks import disk_of

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


PATIENCE_S = 60


class Slow:
    """Stores the written batches. Blocks in the first call until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.dropped = 0
        self.began, self.go = threading.Event(), threading.Event()

    def write(self, batch: list[int]) -> None:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        self.batches.append(batch)

    def drop(self) -> None:
        self.dropped += 1

    def writer(self, **settings: int) -> BackgroundWriter[int]:
        return BackgroundWriter("test", self.write, on_drop=self.drop, gather_s=0.0, **settings)


def test_background_writer_writes_every_item_in_order_in_batches_of_bounded_size() -> None:
    slow = Slow()
    writer = slow.writer(max_batch=7)
    slow.go.set()
    for item in range(100):
        writer.put(item)
    assert writer.close(PATIENCE_S)
    assert [item for batch in slow.batches for item in batch] == list(range(100))
    assert max(map(len, slow.batches)) <= 7
    assert slow.dropped == 0


def test_background_writer_drops_and_counts_items_when_the_queue_is_full() -> None:
    slow = Slow()
    writer = slow.writer(max_waiting=5)
    writer.put(-1)
    assert slow.began.wait(PATIENCE_S)  # the thread is blocked in the write of the first item
    for item in range(8):
        writer.put(item)
    assert slow.dropped == 3
    slow.go.set()
    assert writer.close(PATIENCE_S)
    assert [item for batch in slow.batches for item in batch] == [-1, 0, 1, 2, 3, 4]


def test_background_writer_continues_when_a_write_failed() -> None:
    written: list[int] = []
    both = threading.Event()

    def write(batch: list[int]) -> None:
        written.extend(batch)
        if 2 in written:
            both.set()
        raise RuntimeError("broken")

    writer: BackgroundWriter[int] = BackgroundWriter("test", write, on_drop=lambda: None, gather_s=0.0, max_batch=1)
    writer.put(1)
    writer.put(2)
    assert both.wait(PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert written == [1, 2]


def test_background_writer_close_returns_when_a_write_hangs() -> None:
    slow = Slow()
    writer = slow.writer()
    writer.put(1)
    assert slow.began.wait(PATIENCE_S)
    assert not writer.close(0.0)
    slow.go.set()
    assert writer.close(PATIENCE_S)


TIMEOUT_S = 30.0


class Stuck(SpanExporter):
    """Exporter whose export lasts until its shutdown, and then raises, as gRPC does for a closed channel."""

    def __init__(self) -> None:
        self.has_begun, self.is_shut_down = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        assert self.is_shut_down.wait(TIMEOUT_S)
        raise ValueError("Cannot invoke RPC on closed channel!")

    def shutdown(self) -> None:
        self.is_shut_down.set()


def finished_call() -> CallRecord:
    trace = TraceContext(trace_id="0" * 31 + "1", parent_id="0" * 15 + "2", is_sampled=True)
    call = CallRecord(method="Test/Embed", request_id="a", arrival_s=0.0, trace=trace)
    call.ended_s, call.code = 1.0, "OK"
    return call


def test_export_that_shutdown_cancels_is_counted_and_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the exporter raised during shutdown, and its stack was printed as an error of the server."""
    registry, exporter = CollectorRegistry(), Stuck()
    spans = Spans(exporter, MetricFamilies(registry))
    spans(finished_call())
    assert exporter.has_begun.wait(TIMEOUT_S)
    spans.close(0.0)
    spans._calls._thread.join(TIMEOUT_S)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert registry.get_sample_value("antiphon_spans_dropped_total", {"reason": "not_exported"}) == 1


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("alone")
    log.setLevel(logging.INFO)
    log.propagate = False
    yield log
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_lines_are_written_formatted_and_in_order(log: logging.Logger) -> None:
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    log.addHandler(handler)
    for index in range(500):
        log.info("line %d", index)
    handler.flush()
    assert stream.getvalue().splitlines() == [f"line {index}" for index in range(500)]


def test_lines_that_wait_are_written_with_one_system_call(
    log: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_open, has_begun, num_calls = os.write, threading.Event(), threading.Event(), 0

    def held_back(descriptor: int, data: bytes) -> int:
        nonlocal num_calls
        num_calls += 1
        has_begun.set()
        assert is_open.wait(TIMEOUT_S)
        return write(descriptor, data)

    with (tmp_path / "log").open("w") as stream:
        handler = BackgroundHandler(stream)
        log.addHandler(handler)
        monkeypatch.setattr("antiphon.observability.logging.os.write", held_back)
        log.info("line 0")
        assert has_begun.wait(TIMEOUT_S)
        for index in range(1, 100):
            log.info("line %d", index)
        is_open.set()
        handler.flush()
    assert (tmp_path / "log").read_text().splitlines() == [f"line {index}" for index in range(100)]
    assert num_calls == 2


def test_logging_does_not_block_when_the_pipe_is_not_read(log: logging.Logger) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as read, os.fdopen(writer, "w") as stream:
        handler = BackgroundHandler(stream, max_pending=50)
        log.addHandler(handler)
        dropped: list[None] = []
        handler.report_drops(lambda: dropped.append(None))
        line = "x" * 10_000
        for _ in range(200):  # a pipe holds 64 KiB
            log.info(line)
        num_lines = num_missing = 0
        while num_lines + num_missing < 200:
            found = read.readline()
            if found == line + "\n":
                num_lines += 1
            else:
                num_missing += int(found.split()[0])
                assert "log records are missing here" in found
        handler.flush()
    assert len(dropped) == num_missing
    assert num_missing >= 200 - 50 - 10  # the queued lines, and those in the pipe


def test_lines_are_counted_as_dropped_when_the_reader_has_closed_the_pipe(log: logging.Logger) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        handler = BackgroundHandler(stream)
        log.addHandler(handler)
        log.info("nobody reads this")
        log.info("nor this")
        handler.flush()
    assert counted(handler) == 2


def counted(handler: BackgroundHandler) -> int:
    """Return the number of lines that a handler reports as dropped."""
    dropped: list[None] = []
    handler.report_drops(lambda: dropped.append(None))
    return len(dropped)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_every_line_that_the_device_refuses_is_counted(log: logging.Logger) -> None:
    with Path("/dev/full").open("w") as stream:
        handler = BackgroundHandler(stream)
        log.addHandler(handler)
        for index in range(300):
            log.info("line %d", index)
        handler.flush()
        early = counted(handler)
        later: list[None] = []
        handler.report_drops(lambda: later.append(None))
        for index in range(300):
            log.info("line %d", index)
        handler.flush()
    assert (early, len(later)) == (300, 600)  # lines that were dropped before the first report are included


def test_line_is_written_with_escapes_when_the_stream_cannot_encode_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        handler = BackgroundHandler(stream)
        # Not through a logger: pytest captures those, and cannot send such a line between its processes.
        handler.handle(logging.makeLogRecord({"msg": "\udc80 \u00fc"}))
        handler.flush()
        handler.close()
    assert (tmp_path / "log").read_text() == "\\udc80 \\xfc\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a size of its own needs root")
def test_written_and_dropped_lines_are_all_lines_when_the_disk_was_full(log: logging.Logger, tmp_path: Path) -> None:
    """Regression: the old handler lost 350 of 600 lines, and neither the log nor the metric reported it."""
    with disk_of(64 * 1024, tmp_path / "disk") as disk, (disk / "log").open("a") as stream:
        (disk / "other").write_bytes(b"x" * 40_000)
        handler = BackgroundHandler(stream)
        log.addHandler(handler)
        for index in range(500):
            log.info("line %04d %s", index, "y" * 90)
        handler.flush()
        (disk / "other").unlink()
        for index in range(500, 600):
            log.info("line %04d %s", index, "y" * 90)
        handler.flush()
        check_accounts((disk / "log").read_text(), counted(handler), num_logged=600)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a size of its own needs root")
def test_log_reports_dropped_lines_without_a_further_line(log: logging.Logger, tmp_path: Path) -> None:
    with disk_of(64 * 1024, tmp_path / "disk") as disk, (disk / "log").open("a") as stream:
        (disk / "other").write_bytes(b"x" * 40_000)
        handler = BackgroundHandler(stream, retry_s=0.01)
        log.addHandler(handler)
        for index in range(500):
            log.info("line %04d %s", index, "y" * 90)
        handler.flush()
        (disk / "other").unlink()
        end_s = time.monotonic() + PATIENCE_S
        while "missing" not in (disk / "log").read_text() and time.monotonic() < end_s:
            handler.flush()
        check_accounts((disk / "log").read_text(), counted(handler), num_logged=500)


def check_accounts(text: str, num_counted: int, *, num_logged: int) -> None:
    """Check that written lines plus lines counted as dropped are all logged lines."""
    lines = text.splitlines()
    whole = [line for line in lines if re.fullmatch(r"line \d{4} y{90}", line)]
    (notice,) = (line for line in lines if " missing" in line)
    said = re.fullmatch(r"(\d+) log records are missing here: No space left on device", notice)
    assert said is not None
    assert num_counted > 0
    assert len(whole) + num_counted == num_logged
    assert int(said[1]) == num_counted
    assert len(set(whole)) == len(whole)
    assert whole == sorted(whole)
