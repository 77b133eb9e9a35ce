"""Program that counts the instructions of inner loops of products on 64-bit Arm, beside the fewest that could do them.

    python -m tests.arm.instructions

Compiles the kernels as a wheel does and reads the assembly: the shortest loop of each tile that multiplies.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hatch_build import INSTRUCTION_SETS, NATIVE_FLAGS, NATIVE_SOURCES
from tests.arm.emulator import COMPILER, ROOT

MULTIPLIED = {"fmla": 4, "sdot": 16, "smmla": 32}
"""Multiply-adds of an instruction on vectors of 128 bits."""
# Instructions that the vector units do not execute.
_OTHERS = ("ldr", "ldp", "str", "stp", "ld1r", "add", "sub", "cmp", "cmn", "b", "prfm", "cbz", "cbnz", "sxtw", "lsl")
_TILE = re.compile(r"(DotTile|FloatTile|NibbleTile)ILi(\d+)ELi(\d+)E(?:Lb(\d)E)?")
_LABEL = re.compile(r"(\.L\d+):")
_BRANCH = re.compile(r"\t(?:b\.?\w+|cbn?z)\t(?:\w+, )?(\.L\d+)$")


def loops(lines: list[str]) -> Iterator[list[str]]:
    """Yield the instructions of each loop without another one in it."""
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        if (branch := _BRANCH.match(line)) and branch[1] in labels:
            body = [line.split()[0] for line in lines[labels[branch[1]] : number + 1] if re.match(r"\t[a-z]", line)]
            yield body
            labels = {}


def functions(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """Yield name and lines of each function."""
    for part in re.split(r"\n(?=_Z\w+:\n)", assembly):
        yield part.partition(":")[0], part.splitlines()


def main() -> None:
    """Print a row of a table for the tallest tile of each kind, and for one row."""
    print("| kernels | tile | rows x panels | multiply-adds | instructions | of the vector units | fewest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for source, flags in INSTRUCTION_SETS["aarch64"].items():
        with tempfile.TemporaryDirectory() as folder:
            listing = Path(folder) / "kernels.s"
            command = [*NATIVE_FLAGS, *flags, "-S", "-o", str(listing), str(ROOT / NATIVE_SOURCES[0] / source)]
            subprocess.run([str(COMPILER), *command], check=True)
            for line in _rows(listing.read_text(encoding="utf-8")):
                print(f"| {source[len('kernels_') : -len('.cc')]} | {line} |")


def _rows(assembly: str) -> list[str]:
    found: dict[tuple[str, int, int], str] = {}
    for name, lines in functions(assembly):
        if (tile := _TILE.search(name)) is None:
            continue
        multiplying = [body for body in loops(lines) if any(word in MULTIPLIED for word in body)]
        if not multiplying:
            continue
        body = max(multiplying, key=len)
        count = Counter(body)
        done = sum(count[word] * each for word, each in MULTIPLIED.items())
        vector = sum(times for word, times in count.items() if word.split(".")[0] not in _OTHERS and word[0] != "b")
        fewest = sum(count[word] for word in MULTIPLIED)
        key = (tile[1], int(tile[2]), int(tile[3]))
        found[key] = f"{tile[1]} | {key[1]} x {key[2]} | {done:,} | {len(body)} | {vector} | {fewest}"
    tallest = {(kind, panels): rows for kind, rows, panels in sorted(found)}
    return [line for key, line in sorted(found.items()) if key[1] in (1, tallest[key[0], key[2]])]


if __name__ == "__main__":
    main()
