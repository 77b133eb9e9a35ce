"""A log that nobody reads holds up nobody; what could be written comes in order, and what is missing is said."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator

import pytest

from antiphon.service.observability.log_handler import BackgroundHandler


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("alone")
    log.setLevel(logging.INFO)
    log.propagate = False
    yield log
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_lines_come_in_order_with_what_is_formatted_where_they_are_made(log: logging.Logger) -> None:
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    log.addHandler(handler)
    for index in range(500):
        log.info("line %d", index)
    handler.flush()
    assert stream.getvalue().splitlines() == [f"line {index}" for index in range(500)]


def test_pipe_that_nobody_reads_holds_up_nobody(log: logging.Logger) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as read, os.fdopen(writer, "w") as stream:
        handler = BackgroundHandler(stream, max_pending=50)
        log.addHandler(handler)
        dropped: list[None] = []
        handler.on_drop = lambda: dropped.append(None)
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
    assert num_missing >= 200 - 50 - 10  # what waits, and what a pipe takes


def test_log_whose_reader_has_gone_is_given_up(log: logging.Logger) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    handler = BackgroundHandler(stream)
    log.addHandler(handler)
    log.info("nobody reads this")
    log.info("nor this")
    handler.flush()
    with pytest.raises(BrokenPipeError):
        stream.close()
