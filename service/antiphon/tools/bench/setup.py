"""Setup of a benchmark: the models, their sources and the number of runs. Sections read it; it measures nothing itself.

There are two models. `random` is a Transformer of the paper's base size with random weights. Its targets never end, so
that each section can choose their length. `bundle` is the given bundle (by default the shipped one), on real sentences.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import antiphon.bundle
from antiphon.bundle.manifest import MANIFEST_NAME, Bundle, load_bundle
from antiphon.errors import BundleError
from antiphon.runtime.lanes import AnyRunner, fastest_num_lanes, open_lanes, open_runner, possible_lanes
from antiphon.runtime.warm_up import warm_up
from antiphon.server.models.loading import open_shortlist
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.tools.bench.corpus import Corpus, Ids, repeat, tokenize
from antiphon.tools.bench.ctranslate2 import VMAP_NAME, choose_isa, obstacle, write_vmap
from antiphon.tools.bench.report import BenchError

MODELS = ("random", "bundle")
PRESETS = ("tiny", "base", "big", "nllb")
RANDOM_SOURCE_LEN = 30
RANDOM_TARGET_LEN = 64
# Everyday sentences are much shorter.
MAX_NEW_TOKENS = 64
# Much longer than making a model takes: turns a hang of the child process into an error.
PATIENCE_S = 1800
_SENTENCES_PER_S = 128
_FIRST_WORD_ID = 4  # after the special tokens
_SEED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One measured model."""

    name: str
    """Name in tables."""
    bundle: Bundle
    tokenizer: Tokenizer
    ctranslate2: Path | None
    """Folder of the same weights for CTranslate2; None if there is none."""
    corpus: Corpus | None
    """Real sentences; None if sources are random ids and targets never end."""
    max_new_tokens: int
    """Maximum length of every target, and the exact length of targets that never end."""
    shortlist: Shortlist | None = None
    """Of the bundle; CTranslate2's model has a vocabulary map with the same candidates."""

    @property
    def is_endless(self) -> bool:
        """Return whether targets end only at max_new_tokens."""
        return self.corpus is None

    @property
    def ctranslate2_folder(self) -> Path:
        """Return the folder of the CTranslate2 model; the subject must have one."""
        assert self.ctranslate2 is not None
        return self.ctranslate2

    def texts(self, count: int | None) -> list[str]:
        """Return `count` sentences, repeated in a cycle; None returns each once."""
        assert self.corpus is not None
        return repeat(self.corpus.texts, count)

    def sources(self, count: int) -> list[Ids]:
        """Return source ids, end token included, of sentences, or random ids of one length."""
        if self.corpus is None:
            return self.random_sources([RANDOM_SOURCE_LEN] * count)
        manifest = self.bundle.manifest
        return tokenize(self.texts(count), self.tokenizer, manifest.text, manifest.model.max_source_len)

    def random_sources(self, lengths: Sequence[int]) -> list[Ids]:
        """Return random ids of these lengths, end token included. Every call returns the same ids."""
        model, rng = self.bundle.manifest.model, random.Random(_SEED)
        return [
            [*(rng.randrange(_FIRST_WORD_ID, model.vocab_size) for _ in range(length - 1)), model.eos_id]
            for length in lengths
        ]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Options of one benchmark."""

    bundle: Bundle
    corpus: Corpus
    models: Sequence[str] = MODELS
    work: Path
    """Folder that keeps the generated models."""
    checkpoint: Path | None = None
    """Origin of the bundle: float32 weights for CTranslate2 (None: the bundle's own weights), and the directory that
    rivals read."""
    preset: str = "base"
    """Size of the random model."""
    rows: tuple[int, ...] | None = None
    """Numbers of rows to measure; None uses those of each section."""
    threads: int
    lanes: int | Literal["auto"] = "auto"
    """Lanes of the engine; "auto" takes the fastest number for the rows of a section."""
    repeat: int
    seconds: float = 8.0
    """Length of one open-loop run. The number of sentences of other runs under load grows with it."""

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            raise BenchError(f"--checkpoint {self.checkpoint} is not a directory")

    @property
    def num_sentences(self) -> int:
        """Return the number of sentences of one run under load."""
        return max(64, round(_SENTENCES_PER_S * self.seconds))

    def runner(self, subject: Subject, rows: int) -> AnyRunner:
        """Open a model's graphs with caches for `rows` rows and all threads, and warm them up."""
        runner = open_runner(subject.bundle, max_rows=rows, threads=self.threads)
        warm_up(runner)
        return runner

    def runners(self, subject: Subject, rows: int) -> tuple[AnyRunner, ...]:
        """Open the runners of an engine's lanes, with caches for `rows` rows, and warm them up."""
        lanes = self.lanes
        if lanes == "auto":
            candidates = [count for count in possible_lanes(subject.bundle, self.threads) if count <= rows]
            lanes = fastest_num_lanes(subject.bundle, candidates, max_rows=rows, threads=self.threads)
        runners = open_lanes(subject.bundle, num_lanes=lanes, max_rows=rows, threads=self.threads)
        for runner in runners:
            warm_up(runner)
        return runners

    def subjects(self) -> list[Subject]:
        """Return the chosen models, without their CTranslate2 models."""
        subjects = [self._random] if "random" in self.models else []
        return [*subjects, self.bundle_subject] if "bundle" in self.models else subjects

    def with_ctranslate2(self) -> list[Subject]:
        """Return the chosen models that CTranslate2 can also run, and print a message for each that it cannot.

        Raises BenchError if CTranslate2 is not installed.
        """
        _require("ctranslate2", "comparing with CTranslate2")
        subjects = [self._random_with_ctranslate2] if "random" in self.models else []
        if "bundle" in self.models and self._bundle_with_ctranslate2 is not None:
            subjects.append(self._bundle_with_ctranslate2)
        if subjects:
            choose_isa(subjects[0].ctranslate2_folder, self.threads)
        return subjects

    @cached_property
    def bundle_subject(self) -> Subject:
        """Return the bundle with its sentences."""
        manifest = self.bundle.manifest
        return Subject(
            name=manifest.name,
            bundle=self.bundle,
            tokenizer=open_tokenizer(self.bundle.path, manifest.text),
            ctranslate2=None,
            corpus=self.corpus,
            max_new_tokens=min(MAX_NEW_TOKENS, manifest.model.max_target_len),
            shortlist=open_shortlist(self.bundle),
        )

    @cached_property
    def _bundle_with_ctranslate2(self) -> Subject | None:
        manifest = self.bundle.manifest
        if (reason := obstacle(manifest.model)) is not None:
            print(f"antiphon bench: {manifest.name} is not compared with CTranslate2: {reason}", file=sys.stderr)
            return None
        if self.checkpoint is not None:
            _check_checkpoint(self.checkpoint, self.bundle)
        origin = self.checkpoint or self.bundle.path
        # The manifest has the digests of the bundle's weights and shortlist.
        files = [*_code_of_models(), self.bundle.path / MANIFEST_NAME]
        if self.checkpoint is not None:
            files.append(self.checkpoint / "model.safetensors")
        return self._add_ctranslate2(self.bundle_subject, origin, self.work / f"ctranslate2-{_digest(files)}")

    @cached_property
    def _random(self) -> Subject:
        return self._random_subject("random", f"random {self.preset}", self.random_folder)

    @cached_property
    def random_of_transformers(self) -> tuple[Subject, Path]:
        """Return a random model that was imported, and its checkpoint of transformers."""
        _require("transformers", "making a random model of transformers")
        folder = self.work / f"bart-{self.preset}-{_digest(_code_of_models())}"
        return self._random_subject("transformers", f"random BART, {self.preset}", folder), folder / "checkpoint"

    def cuda_folder(self, shape: str) -> Path:
        """Return the folder of a random model with graphs for GPUs. shape: of gpu/decoding.py."""
        folder = self.work / f"cuda-{shape}-{_digest(_code_of_models())}"
        if not (folder / "bundle").is_dir():
            _make("cuda", shape, folder)
        return folder

    def _random_subject(self, kind: str, name: str, folder: Path) -> Subject:
        if not (folder / "bundle").is_dir():
            _make(kind, self.preset, folder)
        try:
            bundle = load_bundle(folder / "bundle")
        except BundleError as error:
            raise BenchError(f"--work: {error}; delete {folder} and run again") from None
        return Subject(
            name=name,
            bundle=bundle,
            tokenizer=open_tokenizer(bundle.path, bundle.manifest.text),
            ctranslate2=None,
            corpus=None,
            max_new_tokens=RANDOM_TARGET_LEN,
        )

    @cached_property
    def _random_with_ctranslate2(self) -> Subject:
        folder = self.random_folder
        return self._add_ctranslate2(self._random, folder / "checkpoint", folder / "ctranslate2")

    @cached_property
    def random_folder(self) -> Path:
        """Return the folder of the random model. Its name contains a digest of the code that makes the model."""
        return self.work / f"random-{self.preset}-{_digest(_code_of_models())}"

    @staticmethod
    def _add_ctranslate2(subject: Subject, origin: Path, folder: Path) -> Subject:
        if not folder.is_dir():
            _make("ctranslate2", str(origin), folder)
        if subject.shortlist is not None and not (folder / VMAP_NAME).exists():
            write_vmap(subject.shortlist, folder)
        return replace(subject, ctranslate2=folder)


def _code_of_models() -> list[Path]:
    """Return the code that makes models; generated models of another version are not used again."""
    model, here = Path(antiphon.bundle.__file__).parents[1], Path(__file__).parent
    code = [path for path in sorted(model.rglob("*.py")) if not path.is_relative_to(model / "bundles")]
    makers = (here / "make_models.py", here / "gpu" / "decoding.py", *sorted(here.glob("ctranslate2*.py")))
    return [*code, *makers]


def _make(kind: str, origin: str, folder: Path) -> None:
    _require("torch", f"making the {kind} model")
    print(f"antiphon bench: making {folder}", file=sys.stderr)
    command = (sys.executable, "-m", "antiphon.tools.bench.make_models", kind, origin, str(folder))
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    if ended.returncode != 0:
        words = ended.stderr.strip().splitlines() or ["no reason given"]
        raise BenchError(f"the {kind} model of {origin} cannot be made: {words[-1]}")


def _require(package: str, purpose: str) -> None:
    if importlib.util.find_spec(package) is None:
        extra = {"torch": "'antiphon[server,train]'", "transformers": "'antiphon[import]'"}.get(package, package)
        raise BenchError(f"{purpose} needs {package}, which is not installed; run: pip install {extra}")


def _check_checkpoint(checkpoint: Path, bundle: Bundle) -> None:
    """Refuse the checkpoint of another model, as far as this is possible without torch."""
    for name, expected in (("tokenizer.json", bundle.file("tokenizer.json")), ("model.safetensors", None)):
        path = checkpoint / name
        if not path.is_file():
            raise BenchError(f"--checkpoint {checkpoint}: {name} is missing")
        if expected is not None and path.read_bytes() != expected.read_bytes():
            raise BenchError(f"--checkpoint {checkpoint}: {name} is not that of the bundle {bundle.path}")


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
