"""Section `rivals`: other programs that run the same weights, each in a virtual environment of its own.

A bundle that was imported is compared with programs that read what it was imported from, the directory of
--checkpoint: ONNX Runtime and OpenVINO a directory of transformers, Marian and fxtranslate a Marian model's. The random
model is one of transformers: BART with the size of the preset. All sides are greedy and translate the same sources on
the same cores. Programs of transformers get token ids, and batches of sources of similar length; those of Marian get
texts and read the model's shortlist, and at one row use one thread, as they do. pymarian computes in float32.

Environments are made in --work, with the packages that RIVALS names; they take up to 1.5 GB each.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from antiphon.checkpoints.marian_files import OPTIONS, MarianFile
from antiphon.text.shortlist import Shortlist
from antiphon.tools.bench import rival_programs
from antiphon.tools.bench.corpus import tokenize
from antiphon.tools.bench.report import BenchError, BenchFailure, Case, Finding, Speed, alternate, compare
from antiphon.tools.bench.setup import PATIENCE_S, Setup, Subject
from antiphon.tools.bench.throughput import checked_share_equal, decode_case, num_requests, vocabularies
from antiphon.tools.offline import Offline

ROWS = (1, 64)
# Requests of the random model in one run, of which some programs need a minute.
_RANDOM_FILLS, _MIN_REQUESTS = 2, 8

_OPTIMUM = ("torch==2.13.0", "transformers==4.57.6", "optimum==2.1.0", "optimum-onnx==0.1.0")


@dataclass(frozen=True, slots=True)
class Rival:
    """A program of another project. name: in tables. program: of rival_programs.py, with the arguments after its own.

    python: version that its packages need; None: that of this process.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    python: str | None = None


_ONNX_RUNTIME = partial(Rival, program="onnxruntime", packages=(*_OPTIMUM, "onnxruntime==1.32.0"))
_OPENVINO = partial(
    Rival, program="openvino", packages=(*_OPTIMUM, "optimum-intel==1.27.0", "openvino==2026.4.1", "nncf==3.4.0")
)
OF_TRANSFORMERS = (
    _ONNX_RUNTIME("ONNX Runtime, float32", arguments=("float32",)),
    _ONNX_RUNTIME("ONNX Runtime, int8", arguments=("int8",)),
    _OPENVINO("OpenVINO, float32", arguments=("float32",)),
    _OPENVINO("OpenVINO, int8", arguments=("int8",)),
)
OF_MARIAN = (
    Rival("fxtranslate", "fxtranslate", ("fxtranslate==0.5.0",)),
    Rival("pymarian", "pymarian", ("pymarian==1.12.42",), python="3.11"),
)


@dataclass(frozen=True, slots=True)
class Child:
    """A running program. name: of the rival. words: its standard error."""

    name: str
    process: subprocess.Popen[str]
    words: IO[str]

    def answer(self, **request: Any) -> list[Any]:
        """Send a request and return the answer."""
        self.ask(**request)
        return self.read()

    def ask(self, **request: Any) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def read(self) -> list[Any]:
        """Return the answer to the request sent last. Raises BenchFailure if the program has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.words.seek(0)
            last = (self.words.read().strip().splitlines() or ["without a reason"])[-1]
            raise BenchFailure(f"{self.name} ended: {last}")
        answer: list[Any] = json.loads(line) if line.strip() else []
        return answer


@contextmanager
def running(rival: Rival, work: Path, arguments: Sequence[str]) -> Iterator[Child]:
    """Run a rival's program in its environment. Raises BenchError or BenchFailure if it does not become ready."""
    python = python_of(rival, work)
    if not python.exists():
        _make_environment(rival, python)
    variables = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as words,
        subprocess.Popen(
            [python, rival_programs.__file__, rival.program, *arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=words, text=True, env={**variables, "HF_HUB_OFFLINE": "1"},
        ) as process,
    ):  # fmt: skip
        try:
            child = Child(rival.name, process, words)
            child.read()
            yield child
        finally:
            process.kill()


Side = Callable[[], list[Any]]
"""Translates all sources of a case into texts or token ids."""


def rivals(setup: Setup) -> list[Finding]:
    """Measure every subject of which there is a form that other programs read, at every number of rows."""
    findings = []
    for subject, folder in _subjects(setup):
        for rows in setup.rows or ROWS:
            of_marian = _is_of_marian(folder)
            # Marian and fxtranslate translate one sentence with one thread.
            threads = 1 if of_marian and rows == 1 else setup.threads
            measure = _beside_marian if of_marian else _beside_transformers
            findings += measure(subject, folder, rows, replace(setup, threads=threads))
    return findings


def _subjects(setup: Setup) -> Iterator[tuple[Subject, Path]]:
    """Yield models, each with the directory that rivals read."""
    if "random" in setup.models:
        yield setup.random_of_transformers
    if "bundle" not in setup.models:
        return
    if setup.checkpoint is not None:
        yield setup.bundle_subject, setup.checkpoint
    else:
        reason = "--checkpoint names the directory that it was imported from"
        print(f"antiphon bench: {setup.bundle_subject.name} is not compared with rivals: {reason}", file=sys.stderr)


def _is_of_marian(folder: Path) -> bool:
    return not (folder / "config.json").is_file()


def _beside_transformers(subject: Subject, folder: Path, rows: int, setup: Setup) -> list[Finding]:
    count = _RANDOM_FILLS * rows if subject.is_endless else num_requests(subject, rows)
    sources, longest = subject.sources(max(count, _MIN_REQUESTS)), subject.max_new_tokens
    request = {"sources": sources, "rows": rows, "max_new_tokens": longest, "is_endless": subject.is_endless}
    findings = []
    with Offline(*setup.runners(subject, rows), rows=rows) as offline:
        ours = partial(
            offline.translate,
            sources, concurrency=len(sources), max_new_tokens=longest, ignore_eos=subject.is_endless,
        )  # fmt: skip
        for rival in OF_TRANSFORMERS:
            arguments = (str(folder), *rival.arguments, str(setup.threads))
            with running(rival, setup.work, arguments) as child:
                theirs = partial(child.answer, **request)
                case = Case(
                    name="rivals",
                    case=decode_case(subject),
                    rows=rows,
                    against=rival.name,
                    equal_outputs=checked_share_equal(subject, ours(), theirs(), other=rival.name),
                )
                pairs = alternate(
                    partial(_timed, ours, _num_tokens), partial(_timed, theirs, _num_tokens), setup.repeat
                )
                findings += compare(case, pairs)
    return findings


def _beside_marian(subject: Subject, folder: Path, rows: int, setup: Setup) -> list[Finding]:
    texts = subject.texts(num_requests(subject, rows))
    findings = []
    with ExitStack() as stack:
        offline = stack.enter_context(Offline(*setup.runners(subject, rows), rows=rows))
        sides = {
            rival.name: stack.enter_context(_marian_side(rival, folder, texts, rows, setup)) for rival in OF_MARIAN
        }
        for words, shortlist in vocabularies(subject):
            ours = partial(_translate_texts, subject, offline, texts, shortlist)
            for name, theirs in sides.items():
                equal = sum(map(str.__eq__, ours(), theirs())) / len(texts)
                case = Case(
                    name="rivals", case=f"{decode_case(subject)}{words}", rows=rows, against=name, equal_outputs=equal
                )
                pairs = alternate(partial(_timed, ours, len), partial(_timed, theirs, len), setup.repeat)
                findings += compare(case, pairs, "sentences/s")
    return findings


def _translate_texts(
    subject: Subject, offline: Offline, texts: Sequence[str], shortlist: Shortlist | None
) -> list[str]:
    manifest = subject.bundle.manifest
    sources = tokenize(list(texts), subject.tokenizer, manifest.text, manifest.model.max_source_len)
    longest = manifest.model.max_target_len
    targets = offline.translate(sources, concurrency=len(sources), max_new_tokens=longest, shortlist=shortlist)
    return [subject.tokenizer.decode(target) for target in targets]


def _timed(side: Side, size: Callable[[list[Any]], int]) -> Speed:
    """Run once; return the speed in wall-clock time, since most CPU time of a rival is that of another process."""
    started_s = time.perf_counter()
    targets = side()
    return Speed(num_tokens=size(targets), seconds=time.perf_counter() - started_s)


def _num_tokens(targets: Sequence[Sequence[int]]) -> int:
    return sum(map(len, targets))


@contextmanager
def _marian_side(rival: Rival, folder: Path, texts: Sequence[str], rows: int, setup: Setup) -> Iterator[Side]:
    """Yield a side: one process of pymarian, or a process of fxtranslate, which has no threads, for each thread."""
    model, vocabulary, shortlist = (_find(folder, pattern) for pattern in ("model*.bin", "*.spm", "lex*.bin"))
    count, arguments = setup.threads, [str(model), str(vocabulary), str(shortlist)]
    if rival.program == "pymarian":
        npz = setup.work / f"{folder.name}.npz"
        _write_npz(MarianFile(model), npz)
        files = f"-m {npz} -v {vocabulary} {vocabulary} --shortlist {shortlist} false"
        batches = f"--mini-batch {rows} --maxi-batch {100 if rows > 1 else 1}"
        count, arguments = 1, [f"{files} --cpu-threads {setup.threads} --beam-size 1 {batches} -w 512 --quiet"]
    with ExitStack() as stack:
        children = [stack.enter_context(running(rival, setup.work, arguments)) for _ in range(count)]
        yield partial(_shared_out, children, texts, rows)


def _shared_out(children: Sequence[Child], texts: Sequence[str], rows: int) -> list[str]:
    """Return the translations of several processes, each of which translates its share."""
    count = len(children)
    for index, child in enumerate(children):
        child.ask(sources=texts[index::count], rows=rows)
    targets = [""] * len(texts)
    for index, child in enumerate(children):
        targets[index::count] = child.read()
    return targets


def _find(folder: Path, pattern: str) -> Path:
    """Return a file of a Marian model. Raises BenchError, which names --checkpoint."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise BenchError(f"--checkpoint {folder}: neither config.json of transformers nor {pattern} of Marian is there")
    return paths[0]


def _write_npz(model: MarianFile, path: Path) -> None:
    """Write the tensors as float32 in Marian's .npz, which pymarian reads; its own int8 files it does not."""
    options = np.frombuffer(json.dumps(model.options).encode(), np.int8)
    arrays: dict[str, Any] = {name: model.floats(name) for name in model}
    arrays[OPTIONS] = options
    np.savez(path, **arrays)


def python_of(rival: Rival, work: Path) -> Path:
    """Return the path of the Python of a rival's environment."""
    digest = hashlib.sha256(repr((rival.packages, rival.python)).encode()).hexdigest()[:12]
    return work / f"{rival.program}-{digest}" / "bin" / "python"


def _make_environment(rival: Rival, python: Path) -> None:
    """Make a rival's environment. Raises BenchError if that fails."""
    folder = python.parents[1]
    base = sys.executable if rival.python is None else shutil.which(f"python{rival.python}")
    if base is None:
        raise BenchError(f"{rival.name} needs python{rival.python}, which is not on PATH")
    print(f"antiphon bench: making {folder} with {', '.join(rival.packages)}", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run(base, "-m", "venv", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *rival.packages)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(*command: str) -> None:
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    if ended.returncode != 0:
        words = ended.stderr.strip().splitlines() or ["no reason given"]
        raise BenchError(f"{' '.join(command[:4])} failed: {words[-1]}")
