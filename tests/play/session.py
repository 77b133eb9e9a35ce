"""Record a real session in a terminal, serve and generate, as an animated picture: docs/play/session.svg.

    make play-pictures

Every piece of output appears when it came, but at least GAP_S after the one before, so that the eye sees a stream.
"""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.integration.process import ANTIPHON, environment

PICTURE = Path(__file__).parents[2] / "docs" / "play" / "session.svg"
PORT = "50051"
SERVE = ["serve", "--port", PORT]
COMMANDS = [
    ["generate", "How are you?"],
    ["generate", "The weather is nice today, but it will rain tomorrow, so take an umbrella with you."],
    ["generate", "--beam-width", "4", "--num-return-sequences", "3", "Where is the nearest train station?"],
]
GAP_S = 0.06
# Time to read a command before it is sent, and its answer before the next command.
PAUSE_S = 0.8
# Character cells in pixels; a line of the session has at most COLUMNS.
CELL = (8.4, 19)
COLUMNS = 100
STYLE = """
text { font: 14px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d6deeb; white-space: pre; }
.typed { fill: #82aaff; }
@media (prefers-reduced-motion: no-preference) { text { opacity: 0; animation: shown 1ms linear forwards; } }
@keyframes shown { to { opacity: 1; } }
"""


@dataclass(frozen=True)
class Piece:
    """Text that appears at once, at a time since the start of the session."""

    at_s: float
    text: str
    is_typed: bool = False


def record() -> list[Piece]:
    """Run the server and every command; return what a terminal shows."""
    pieces = [Piece(0.0, f"$ antiphon {shlex.join(SERVE)} &\n", is_typed=True)]
    clock = _Clock()
    with _running(SERVE) as output:
        while not pieces[-1].text.endswith("\n") or len(pieces) == 1:
            pieces.append(clock.piece(os.read(output, 1 << 16)))
        for command in COMMANDS:
            clock.now_s += PAUSE_S
            pieces.append(Piece(clock.now_s, f"$ antiphon {shlex.join(command)}\n", is_typed=True))
            clock.start()
            with _running(command) as answer:
                pieces += [clock.piece(data) for data in _read(answer)]
    return pieces


class _Clock:
    """Time of the picture: that of the session, without its pauses, and with a gap between pieces."""

    def __init__(self) -> None:
        self.now_s = PAUSE_S
        self.start()

    def start(self) -> None:
        self._last_s = time.monotonic()

    def piece(self, data: bytes) -> Piece:
        now_s = time.monotonic()
        self.now_s += max(GAP_S, now_s - self._last_s)
        self._last_s = now_s
        return Piece(self.now_s, data.decode().replace("\r\n", "\n"))


@contextmanager
def _running(command: list[str]) -> Iterator[int]:
    """Run a subcommand in a terminal of its own and give the terminal's output. Interrupt what runs at the end."""
    output, terminal = pty.openpty()
    process = subprocess.Popen(
        [*ANTIPHON, *command], stdin=terminal, stdout=terminal, stderr=terminal, env=environment()
    )
    os.close(terminal)
    try:
        yield output
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        os.close(output)


def _read(output: int) -> Iterator[bytes]:
    """Yield output until the terminal is closed, which Linux tells by an error."""
    while True:
        try:
            data = os.read(output, 1 << 16)
        except OSError:
            return
        if not data:
            return
        yield data


def draw(pieces: list[Piece]) -> str:
    """Return the SVG of a session: one text for each piece and line, at its place, shown at its time."""
    texts, line, column = [], 1, 0
    for piece in pieces:
        for index, text in enumerate(piece.text.split("\n")):
            if index:
                line, column = line + 1, 0
            while text:
                part, text = text[: COLUMNS - column], text[COLUMNS - column :]
                texts.append(_text(part, line, column, piece))
                column += len(part)
                if text:
                    line, column = line + 1, 0
    width, height = round(CELL[0] * COLUMNS + 24), CELL[1] * (line + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    title = "<title>antiphon serve, and three translations by antiphon generate, in a terminal</title>"
    body = f'<style>{STYLE}</style><rect width="100%" height="100%" rx="8" fill="#0b1522"/>'
    return "\n".join([head, title, body, *texts, "</svg>", ""])


def _text(text: str, line: int, column: int, piece: Piece) -> str:
    x, y = 12 + CELL[0] * column, CELL[1] * line + 6
    kind = ' class="typed"' if piece.is_typed else ""
    width = f'textLength="{CELL[0] * len(text):.1f}" lengthAdjust="spacingAndGlyphs"'
    delay = f'style="animation-delay:{piece.at_s:.2f}s"'
    return f'<text x="{x:.1f}" y="{y}"{kind} {width} {delay} xml:space="preserve">{escape(text)}</text>'


def main() -> None:
    PICTURE.write_text(draw(record()), encoding="utf-8")
    print(f"{PICTURE.name}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
