"""Report of one part of `make card`: a JSON file that is written again after every figure.

    {"part", "status", "device", "driver", "cores", "commit", "command", "date", "seconds", "figures", "error"}

status is `running`, `done` or `failed`. A part that ends early keeps the figures that it has. `at_s` of a figure is the
time at which the part had it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from antiphon.tools.bench.report import commit

Status = Literal["running", "done", "failed"]
Figure = dict[str, Any]


class MissingError(Exception):
    """A part lacks a program, a package, a file or a device; the message names it."""


@dataclass(kw_only=True, slots=True)
class Report:
    """Content of the file. seconds: how long the part took so far. error: why it failed, None if it did not."""

    part: str
    status: Status = "running"
    device: str
    driver: int
    cores: int
    command: str
    commit: str | None = field(default_factory=commit)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    error: str | None = None

    def write(self, path: Path) -> None:
        """Replace the file. Raises OSError."""
        unfinished = path.with_name(f".{path.name}.tmp")
        described = {name: getattr(self, name) for name in self.__dataclass_fields__}
        unfinished.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def measure(self, path: Path, part: Callable[[], Iterator[Figure]]) -> None:
        """Run a part and write its figures as they come; what it lacks is a figure {"missing": reason}.

        Raises what the part raises, once the file has it, and OSError if the file cannot be written.
        """
        began_s = time.monotonic()

        def write() -> None:
            self.seconds = round(time.monotonic() - began_s, 1)
            self.write(path)

        write()
        try:
            try:
                for figure in part():
                    self.figures.append({**figure, "at_s": round(time.monotonic() - began_s, 1)})
                    write()
            except MissingError as error:
                self.figures.append({"missing": str(error)})
            self.status = "done"
        except BaseException as error:
            self.status, self.error = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            write()


def read_report(path: Path) -> Report | None:
    """Return the report in a file; None if there is none, or none that can be read."""
    try:
        return Report(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
