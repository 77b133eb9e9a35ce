"""What is measured: the models, what they translate, and how often. Sections read it; it measures nothing itself.

Two models. `random` is a Transformer of the paper's base size with random weights, whose targets never end, so that
lengths are what a section says. `bundle` is the one asked for (the shipped one, if none is), on real sentences.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from antiphon.model.bundle.manifest import Bundle, BundleError, load_bundle
from antiphon.model.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.service.runtime.runners import AnyRunner, open_runner
from antiphon.service.runtime.warm_up import warm_up
from antiphon.service.tools.bench.isa import choose_isa
from antiphon.service.tools.bench.report import BenchError
from antiphon.service.tools.bench.sources import Corpus, Ids, repeat, tokenize

MODELS = ("random", "bundle")
PRESETS = ("tiny", "base", "big")
RANDOM_SOURCE_LEN = 30
RANDOM_TARGET_LEN = 64
# Everyday sentences end long before.
MAX_NEW_TOKENS = 64
# Far beyond what making a model takes: a bound for a child that would otherwise hang.
PATIENCE_S = 1800
_SENTENCES_PER_S = 128
_FIRST_WORD_ID = 4  # after the special tokens
_SEED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One model under measurement.

    name: for tables. twin: the same weights for CTranslate2, None without them.
    corpus: real sentences; None where sources are random ids and targets never end.
    max_new_tokens: bound of every target, and the length of all of them where they never end.
    """

    name: str
    bundle: Bundle
    tokenizer: Tokenizer
    twin: Path | None
    corpus: Corpus | None
    max_new_tokens: int

    @property
    def is_endless(self) -> bool:
        """Whether only max_new_tokens ends a target."""
        return self.corpus is None

    @property
    def twin_folder(self) -> Path:
        """Where the twin is, of a subject that has one."""
        assert self.twin is not None
        return self.twin

    def texts(self, count: int | None) -> list[str]:
        """Sentences, repeated until there are enough; None takes each once."""
        assert self.corpus is not None
        return repeat(self.corpus.texts, count)

    def sources(self, count: int) -> list[Ids]:
        """Source ids, end token included: sentences, or random ids of one length."""
        if self.corpus is None:
            return self.random_sources([RANDOM_SOURCE_LEN] * count)
        manifest = self.bundle.manifest
        return tokenize(self.texts(count), self.tokenizer, manifest.text, manifest.model.max_source_len)

    def random_sources(self, lengths: Sequence[int]) -> list[Ids]:
        """Random ids of these lengths, the end token included; the same at every call."""
        model, rng = self.bundle.manifest.model, random.Random(_SEED)
        return [
            [*(rng.randrange(_FIRST_WORD_ID, model.vocab_size) for _ in range(length - 1)), model.eos_id]
            for length in lengths
        ]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was asked for. work: folder that keeps models made for the benchmark.

    rows: numbers of rows to measure at; None leaves them to the section.
    seconds: length of one open-loop run; what a run under load is given grows with it.
    checkpoint: the bundle's weights in float32, for its twin. preset: size of the random model.
    """

    bundle: Bundle
    corpus: Corpus
    models: Sequence[str] = MODELS
    work: Path
    checkpoint: Path | None = None
    preset: str = "base"
    rows: tuple[int, ...] | None = None
    threads: int
    repeat: int
    seconds: float = 8.0

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            _check_checkpoint(self.checkpoint, self.bundle)

    @property
    def num_sentences(self) -> int:
        """Sentences of one run under load."""
        return max(64, round(_SENTENCES_PER_S * self.seconds))

    def runner(self, subject: Subject, rows: int) -> AnyRunner:
        """A model's graphs with caches for so many rows, warmed up."""
        runner = open_runner(subject.bundle, max_rows=rows, threads=self.threads)
        warm_up(runner)
        return runner

    def subjects(self) -> list[Subject]:
        """The models asked for, without twins."""
        held = [self._random] if "random" in self.models else []
        return [*held, self.bundle_subject] if "bundle" in self.models else held

    def twinned(self) -> list[Subject]:
        """The models asked for that CTranslate2 can run too; says on standard error which cannot, and why.

        Raises BenchError where CTranslate2 is not installed.
        """
        _require("ctranslate2", "comparing with CTranslate2")
        held = [self._twinned_random] if "random" in self.models else []
        if "bundle" in self.models and self._twinned_bundle is not None:
            held.append(self._twinned_bundle)
        if held:
            choose_isa(held[0].twin_folder, self.threads)
        return held

    @cached_property
    def bundle_subject(self) -> Subject:
        """The bundle, on sentences."""
        manifest = self.bundle.manifest
        return Subject(
            name=manifest.name,
            bundle=self.bundle,
            tokenizer=open_tokenizer(self.bundle.path, manifest.text),
            twin=None,
            corpus=self.corpus,
            max_new_tokens=min(MAX_NEW_TOKENS, manifest.model.max_target_len),
        )

    @cached_property
    def _twinned_bundle(self) -> Subject | None:
        if self.checkpoint is None:
            name = self.bundle.manifest.name
            print(f"antiphon bench: {name} is left out: its twin needs --checkpoint", file=sys.stderr)
            return None
        folder = self.work / f"twin-{_digest([self.checkpoint / 'model.safetensors'])}"
        return self._with_twin(self.bundle_subject, self.checkpoint, folder)

    @cached_property
    def _random(self) -> Subject:
        folder = self.random_folder
        if not (folder / "bundle").is_dir():
            _make("random", self.preset, folder)
        try:
            bundle = load_bundle(folder / "bundle")
        except BundleError as error:
            raise BenchError(f"--work: {error}; delete {folder}") from None
        return Subject(
            name=f"random {self.preset}",
            bundle=bundle,
            tokenizer=open_tokenizer(bundle.path, bundle.manifest.text),
            twin=None,
            corpus=None,
            max_new_tokens=RANDOM_TARGET_LEN,
        )

    @cached_property
    def _twinned_random(self) -> Subject:
        return self._with_twin(self._random, self.random_folder / "checkpoint", self.random_folder / "ctranslate2")

    @cached_property
    def random_folder(self) -> Path:
        """Where the random model is kept; named after the code that makes it, which another export's bundle is not."""
        code = Path(__file__).resolve().parents[3] / "model"
        made_by = [path for path in sorted(code.rglob("*.py")) if not path.is_relative_to(code / "bundles")]
        return self.work / f"random-{self.preset}-{_digest([*made_by, Path(__file__).with_name('make.py')])}"

    @staticmethod
    def _with_twin(subject: Subject, checkpoint: Path, folder: Path) -> Subject:
        if not folder.is_dir():
            _make("twin", str(checkpoint), folder)
        return Subject(
            name=subject.name,
            bundle=subject.bundle,
            tokenizer=subject.tokenizer,
            twin=folder,
            corpus=subject.corpus,
            max_new_tokens=subject.max_new_tokens,
        )


def _make(kind: str, origin: str, folder: Path) -> None:
    _require("torch", f"making the {kind} model")
    print(f"antiphon bench: making {folder}", file=sys.stderr)
    command = (sys.executable, "-m", "antiphon.service.tools.bench.make", kind, origin, str(folder))
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    if ended.returncode != 0:
        words = ended.stderr.strip().splitlines() or ["no reason given"]
        raise BenchError(f"the {kind} model of {origin} cannot be made: {words[-1]}")


def _require(package: str, purpose: str) -> None:
    if importlib.util.find_spec(package) is None:
        extra = "'antiphon[server,train]'" if package == "torch" else package
        raise BenchError(f"{purpose} needs {package}, which is not installed; run: pip install {extra}")


def _check_checkpoint(checkpoint: Path, bundle: Bundle) -> None:
    """Refuse another model's checkpoint, as far as can be seen without torch."""
    for name, held in (("tokenizer.json", bundle.file("tokenizer.json")), ("model.safetensors", None)):
        path = checkpoint / name
        if not path.is_file():
            raise BenchError(f"--checkpoint {checkpoint}: {name} is missing")
        if held is not None and path.read_bytes() != held.read_bytes():
            raise BenchError(f"--checkpoint {checkpoint}: {name} is not that of the bundle {bundle.path}")


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
