"""Manifest of a bundle, and the check that no file of the bundle is missing, changed or of an unknown version.

Imports no torch. Layout of a bundle:

    manifest.json     the `Manifest` below as JSON, with a checksum of the file itself
    tokenizer.json    `tokenizers` format, or the files that text/format.py names instead
    shortlist*.bin    likely target tokens of source tokens, see text/shortlist.py; optional
    weights.*.bin     external data shared by the graphs of one precision
    *.onnx            encoder and decoder graphs of each precision and lowering
    explain.*.onnx    attention weights of all heads at one precision; optional
    positions.onnx    learned tables of positions, see position_tables.py; only of models that have some
    NOTICE            licence and attribution of the training data
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Task
from antiphon.bundle.checksum import ChecksumError, verify_checksum, with_checksum
from antiphon.bundle.external_data import NotAGraph, external_files
from antiphon.bundle.token_ids import check_ids
from antiphon.errors import BundleError
from antiphon.text.format import TextFormat

log = logging.getLogger(__name__)

FORMAT_VERSION = 5
MANIFEST_NAME = "manifest.json"
# Plain names that are not hidden: no name leads out of the directory.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_MAX_MANIFEST_BYTES = 1 << 24
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Precision = Literal["float32", "int8", "int4", "bfloat16", "float16"]
Lowering = Literal["native", "cuda"]
CacheType = Literal["float32", "float16"]
Measure = Literal["bleu", "perplexity", "accuracy", "f1"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Strict):
    """Size in bytes and SHA-256 (hex) of one file of the bundle."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class GraphSet(_Strict):
    """File names of the graphs that run the model at one precision and lowering.

    Native graphs. Batches are packed, with N tokens in all. Caches are blocks of one pool; block tables [rows, X] and
    [rows, Y] hold their ids:
        cache [num_blocks, L, 2, C, 16*Dp] of the type `cache`, Dp = D rounded up to 16; changed in place. Entry b of a
            table is the block of positions 16 b to 16 b + 15. For each (block, layer), index 0 holds keys [Dp][16] and
            index 1 values [16][Dp] of each head; rows from D on are unused. C = H, or with module_heads the most heads
            of a decoder's module; others use the first ones. Unused table entries can have any value.
        encoder: input_ids [N] int64, positions [N] int32, offsets [B+1] int32 (source b is tokens offsets[b] to
            offsets[b+1]), block_tables [B,X] int32, cache -> written [1] int32, tokens written; memory [N,M] float32,
            the encoder's states.
        decoder: input_ids [N] int64, positions [N] int32, offsets [R+1] int32 (the new tokens of row r, at least one),
            self_tables [R,X], cross_tables [R,Y], source_lens [R] int32, cache, and the sampling parameters of K next
            tokens, see ops/sampling.py: picks [K] int32, float_params [K,F] float32, int_params [K,I] int64,
            edit_offsets [K+1] int32, edit_ids [E] int32, edit_values [E,3] float32
            -> token_ids [K] int64, logprobs [K] float32, top_ids [K,k] int64, top_logprobs, top_scores [K,k] float32;
            k is the largest of num_logprobs, at least 0.

    An encoder-only model has no decoder graph, and its encoder graph has no block_tables, cache or written:
        encoder: input_ids [N] int64, positions [N] int32, offsets [B+1] int32, and with token types also
            type_ids [N] int64 -> memory [N,M] float32.
        heads, by task: hidden [K,M] float32, states of the tokens that the task uses -> outputs [K,O] float32.
    A decoder-only model has no encoder graph; its decoder graph ignores cross_tables and source_lens.

    Cuda graphs, for an NVIDIA GPU, of one element type T: bfloat16, float16 or float32. ops/cuda/nodes.py lists the
    nodes. Batches can be padded: a token at position -1 has no effect, W tiles of sequence -1 have none.
        cache [num_blocks, L, 2, H, 16, D] T: as the pool above, with keys and values of each head as [16][D].
        encoder: tokens [N], positions [N], offsets [B+1], tiles [W,2] int32 (source and first of 64 queries; all
            queries of a source have a tile), with token types also types [N] int32, and with a decoder also
            rows [N] (source of each token), tables [B,X] int32, cache -> memory [N,M] T, and written.{i} [1] int32 for
            each decoder layer i.
        decoder: tokens [N] int32 (-1: the token that the row sampled in the step before), positions [N], rows [N],
            self_lens [N] (positions that the token sees, itself included; 0 for padding), cross_lens [N] (source
            length), self_tables [R,X], cross_tables [R,Y], previous [R], picks [K], sample_positions [K] int32,
            float_params [K,4] float32, int_params [K,6] int64, edit_offsets [K+1], edit_ids [E], edit_rounds [E] int32
            (number of earlier edits of the same sample and token), edit_values [E,3] float32, candidates [k] int32
            (k is the number of candidates; the values are not read), cache -> as native, with int32 ids.
            Without an encoder there are no cross_lens and cross_tables.
        heads: hidden [K,M] T -> outputs [K,Op] T, Op = O rounded up to 16; columns from O on are 0.
    """

    precision: Precision
    lowering: Lowering
    encoder: str | None = None
    decoder: str | None = None
    heads: dict[Task, str] = Field(default_factory=dict)
    cache: CacheType | None = None
    explain: str | None = None  # graph of export/explain.py at this precision; several sets can share one

    @property
    def encoder_file(self) -> str:
        """File name of the encoder graph. Raises BundleError for a decoder-only model."""
        return self._file("encoder", self.encoder)

    @property
    def decoder_file(self) -> str:
        """File name of the decoder graph. Raises BundleError for an encoder-only model."""
        return self._file("decoder", self.decoder)

    def _file(self, part: str, name: str | None) -> str:
        if name is None:
            raise BundleError(f"the {self.lowering} {self.precision} graphs have no {part}")
        return name


class MemoryFit(_Strict):
    """Fit of the peak workspace of one encoder run: bytes = a + B * (b * T + c * T^2).

    T is the source length in tokens, B the number of rows. The workspace of a packed batch depends only on the number
    of tokens, so c = 0 and B * T is that number for any mix of lengths.
    residual: largest relative error of the fit over the measured grid.
    exponent: slope of log(bytes - a) against log(T) at the longest lengths.
    """

    a: float
    b: float
    c: float
    residual: float
    exponent: float
    max_len: int
    max_rows: int

    def predict(self, rows: int, length: int) -> float:
        """Predicted peak workspace in bytes of one encoder run of `rows` sources of `length` tokens."""
        return self.a + rows * (self.b * length + self.c * length * length)


class MemoryProfile(_Strict):
    """Memory fits measured by `antiphon profile`; the key of each graph set is `<lowering>-<precision>`."""

    fits: dict[str, MemoryFit]
    machine: str


class Provenance(_Strict):
    """Origin and licence of the weights."""

    source: str
    licence: str
    attribution: str
    recipe: str | None = None


class GenerationDefaults(_Strict):
    """Default generation options of this model; None: the server's default. Fields as in the table of controls."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    time_limit_s: float | None = Field(default=None, gt=0)
    num_return_sequences: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    beam_width: int | None = Field(default=None, ge=1, le=16)
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    early_stopping: Literal["heuristic", "first", "never"] | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    forced_first_id: int | None = Field(default=None, ge=0)
    suppressed_ids: tuple[int, ...] = Field(default=(), max_length=1024)
    logit_bias: tuple[tuple[int, float], ...] = Field(default=(), max_length=1024)
    stop_ids: tuple[int, ...] = Field(default=(), max_length=16)
    ignore_eos: bool | None = None
    use_shortlist: bool | None = None


class Quality(_Strict):
    """Score of one precision on a test file, beside the score of float32: the loss by quantisation."""

    precision: Precision
    measure: Measure
    value: float
    float32: float
    file: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(_Strict):
    """Contents of manifest.json. positions: name of the graph of learned tables of positions."""

    format_version: int = FORMAT_VERSION
    name: str = Field(pattern=NAME_PATTERN)
    model: ModelConfig
    text: TextFormat
    generation: GenerationDefaults = GenerationDefaults()
    graphs: tuple[GraphSet, ...] = Field(min_length=1)
    positions: str | None = None
    files: dict[str, FileEntry]
    memory: MemoryProfile | None = None
    quality: tuple[Quality, ...] = ()
    provenance: Provenance | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A verified bundle on disk."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Absolute path of a file listed in the manifest."""
        return self.path / name

    def graph_set(self, precision: Precision | None = None, lowering: Lowering = "native") -> GraphSet:
        """Return the graphs of a lowering; precision None selects int8, else float32, else int4.

        Of cuda graphs None selects bfloat16, else float16, else float32. Raises BundleError naming the graphs that the
        bundle has.
        """
        by_precision = {
            graphs.precision: graphs for graphs in reversed(self.manifest.graphs) if graphs.lowering == lowering
        }
        for choice in (precision,) if precision else _preferred(lowering):
            if choice in by_precision:
                return by_precision[choice]
        wanted = f"{lowering} graphs" + (f" at precision {precision}" if by_precision else "")
        names = ", ".join(f"{graphs.lowering}-{graphs.precision}" for graphs in self.manifest.graphs)
        raise BundleError(f"{self.path / MANIFEST_NAME}: no {wanted}; the bundle holds {names}; export the model again")

    def memory_fit(self, graphs: GraphSet) -> MemoryFit | None:
        """Return the memory fit of these graphs; None if they were not measured."""
        memory = self.manifest.memory
        return memory.fits.get(f"{graphs.lowering}-{graphs.precision}") if memory else None


def _preferred(lowering: Lowering) -> tuple[Precision, ...]:
    """Return the precisions of a lowering, the one to take first where none is named."""
    return ("bfloat16", "float16", "float32") if lowering == "cuda" else ("int8", "float32", "int4")


def file_entry(path: Path) -> FileEntry:
    """Return size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return FileEntry(size=path.stat().st_size, sha256=digest.hexdigest())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write manifest.json in the newest version, atomically: a reader sees either the old file or the new one."""
    temporary = path / f".{MANIFEST_NAME}.tmp"
    described = manifest.model_copy(update={"format_version": FORMAT_VERSION})
    temporary.write_bytes(with_checksum(described.model_dump(mode="json", exclude_none=True)))
    temporary.replace(path / MANIFEST_NAME)


def load_bundle(path: Path) -> Bundle:
    """Read and verify a bundle.

    The manifest must be valid and of a known version, and list every file that the model needs; each listed file must
    be present and unchanged. No file outside the directory is opened.
    Raises BundleError naming the file or field.
    """
    manifest = _read_manifest(path)
    graphs = {
        name
        for g in manifest.graphs
        for name in (g.encoder, g.decoder, g.explain, *g.heads.values(), manifest.positions)
        if name is not None
    }
    needed = {*manifest.text.files} | graphs
    if unlisted := sorted(needed - manifest.files.keys()):
        raise BundleError(f"{path / MANIFEST_NAME}: files does not list {', '.join(unlisted)}")
    for name, expected in manifest.files.items():
        _check_file(path, name, expected)
    for name in sorted(graphs):
        _check_external_data(path, name, manifest)
    return Bundle(path=path, manifest=manifest)


def _read_manifest(path: Path) -> Manifest:
    source = path / MANIFEST_NAME
    raw = _verified(source)
    try:
        manifest = Manifest.model_validate(raw)
        check_ids(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise BundleError(f"{source}: {field}: {_in_one_line(first['msg'])}") from None
    except ValueError as error:
        raise BundleError(f"{source}: {error}") from None
    return manifest


def _verified(source: Path) -> dict[str, object]:
    """Return a manifest's fields without the checksum, after a check of checksum and version. Raises BundleError."""
    try:
        content = _read_at_most(source, _MAX_MANIFEST_BYTES)
        is_checked = verify_checksum(content)
        raw = json.loads(content)
    except FileNotFoundError:
        raise BundleError(f"{source.parent} is not a bundle: {MANIFEST_NAME} is missing") from None
    except ChecksumError as error:
        raise BundleError(f"{source} is damaged, or was edited: {error}; export or import it again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{source} cannot be read: {_in_one_line(error)}") from None
    if not isinstance(raw, dict):
        raw = {}
    _check_version(source, raw.get("format_version"), has_checksum=is_checked)
    return {name: value for name, value in raw.items() if name != "checksum" or not is_checked}


def _check_version(source: Path, version: object, *, has_checksum: bool) -> None:
    """Raise BundleError for another version or a missing checksum."""
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{source}: format_version is {version!r:.40}; this Antiphon reads {FORMAT_VERSION}: export or import the "
            "model again"
        )
    if not has_checksum:
        raise BundleError(f"{source}: checksum is missing: export or import the model again")


def _in_one_line(error: object) -> str:
    return " ".join(str(error).split())


def _read_at_most(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return content


def _check_external_data(path: Path, name: str, manifest: Manifest) -> None:
    """Raise BundleError if a graph reads weights from a file that `files` does not list, and so was not verified."""
    try:
        unlisted = sorted(external_files(path / name) - manifest.files.keys())
    except NotAGraph as error:
        raise BundleError(str(error)) from None
    if unlisted:
        shown = ", ".join(map(repr, unlisted))
        raise BundleError(f"{path / name} keeps weights in {shown}, which files of {MANIFEST_NAME} does not list")


def _check_file(path: Path, name: str, expected: FileEntry) -> None:
    target = path / name
    if not _FILE_NAME.fullmatch(name):
        raise BundleError(f"{path / MANIFEST_NAME}: files names {name!r}; only plain file names are allowed")
    if not target.is_file():
        raise BundleError(f"{target} is missing")
    if not target.resolve().is_relative_to(path.resolve()):
        raise BundleError(f"{target} is a link out of the bundle")
    size = target.stat().st_size
    if size != expected.size:  # before a byte is read
        raise BundleError(f"{target} is damaged: {size} bytes, the manifest says {expected.size}")
    entry = file_entry(target)
    if entry != expected:
        raise BundleError(
            f"{target} is damaged: {entry.size} bytes with sha256 {entry.sha256[:12]}..., "
            f"the manifest says {expected.size} bytes with {expected.sha256[:12]}..."
        )
