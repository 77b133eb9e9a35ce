"""The exported directory: its manifest, and the check that nothing in it is missing, changed or newer than we know.

Torch-free. Layout of a bundle:

    manifest.json     this file's models, as JSON, with a checksum of the file itself
    tokenizer.json    `tokenizers` format, or what text_format.py names instead
    weights.*.bin     external data shared by the graphs of one precision
    *.onnx            encoder and decoder graphs of each precision, and the eager baseline if exported
    explain.*.onnx    attention weights of every head at one precision, unless left out
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

from antiphon.model.bundle.checksum import ChecksumError, verify_checksum, with_checksum
from antiphon.model.bundle.external_data import NotAGraph, external_files
from antiphon.model.bundle.token_ids import check_ids
from antiphon.model.config import ModelConfig
from antiphon.model.head_config import Task
from antiphon.model.text.format import TextFormat

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
# As version 3, but for the checksum of the manifest itself.
_VERSION_WITHOUT_CHECKSUM = 2
MANIFEST_NAME = "manifest.json"
# Plain, and never hidden: no path leads out of the directory.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_MAX_MANIFEST_BYTES = 1 << 24
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Precision = Literal["float32", "int8", "int4"]
Lowering = Literal["native", "contrib", "eager"]
CacheType = Literal["float32", "float16"]
Measure = Literal["bleu", "perplexity", "accuracy", "f1"]


class BundleError(Exception):
    """A bundle cannot be used; the message names the file or field and what was expected."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Strict):
    """Size in bytes and SHA-256 (hex) of one file of the bundle."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class GraphSet(_Strict):
    """File names of the graphs that together run the model at one precision and lowering.

    Contrib and eager. The arrays of a row lie together:
        encoder: input_ids [B,S] int64 -> present.{i}.encoder.key/value [B,H,S,D] float32 for each decoder layer i.
            Every row has length S: the contrib lowering takes no padding.
        decoder: input_ids [B,1] int64, past_lens [B] int32, source_lens [B] int32,
            past_key_values.{i}.decoder.key/value [B,H,C,D], past_key_values.{i}.encoder.key/value [B,H,E,D] float32
            -> logits [B,V] float32, present.{i}.decoder.key/value (bind to the past buffers: written in place).
            past_lens[b] tokens are cached in row b already; the new token takes position past_lens[b].

    Native. Tokens are packed, N of a run; caches are blocks of one pool, named by tables [rows, X] and [rows, Y]:
        cache [num_blocks, L, 2, H, 16*Dp] of the type `cache`, Dp = D rounded up to 16; changed in place. Block b of a
            table holds positions 16 b to 16 b + 15. Of a (block, layer, head), index 0 holds keys [Dp][16], 1 values
            [16][Dp]; rows from D on are unused. Unused table entries may be anything.
        encoder: input_ids [N] int64, positions [N] int32, offsets [B+1] int32 (source b is tokens offsets[b] to
            offsets[b+1]), block_tables [B,X] int32, cache -> written [1] int32, tokens written; memory [N,M] float32,
            the encoder's states.
        decoder: input_ids [N] int64, positions [N] int32, offsets [R+1] int32 (the new tokens of row r, at least one),
            self_tables [R,X], cross_tables [R,Y], source_lens [R] int32, cache, and how K next tokens are chosen, as in
            ops/choices.py: picks [K] int32, temperatures [K] float32, top_ks [K] int32, top_ps, min_ps, typical_ps [K]
            float32, seeds [K] int64 (bits of a uint64), given_ids [K] int64, num_logprobs, is_normalized, is_exclusive
            [K] int32, edit_offsets [K+1] int32, edit_ids [E] int32, edit_values [E,3] float32
            -> token_ids [K] int64, logprobs [K] float32, top_ids [K,k] int64, top_logprobs, top_scores [K,k] float32;
            k is the largest of num_logprobs, at least 0.

    An encoder alone has no decoder, and its encoder graph neither block_tables nor cache nor written:
        encoder: input_ids [N] int64, positions [N] int32, offsets [B+1] int32, and where the model has token types
            type_ids [N] int64 -> memory [N,M] float32.
        heads, by task: hidden [K,M] float32, states of the tokens that the task reads -> outputs [K,O] float32.
    A decoder alone has no encoder; cross_tables and source_lens of its decoder graph mean nothing.
    """

    precision: Precision
    lowering: Lowering
    encoder: str | None = None
    decoder: str | None = None
    heads: dict[Task, str] = Field(default_factory=dict)
    cache: CacheType | None = None
    explain: str | None = None  # graph of explain_graph.py at this precision; sets may share one, or have none

    @property
    def encoder_file(self) -> str:
        """The encoder graph's file. Raises BundleError for a decoder alone."""
        return self._file("encoder", self.encoder)

    @property
    def decoder_file(self) -> str:
        """The decoder graph's file. Raises BundleError for an encoder alone."""
        return self._file("decoder", self.decoder)

    def _file(self, part: str, name: str | None) -> str:
        if name is None:
            raise BundleError(f"the {self.lowering} {self.precision} graphs have no {part}")
        return name


class MemoryFit(_Strict):
    """Peak workspace of one encoder run, fitted: bytes = a + B * (b * T + c * T^2).

    T is the source length in tokens, B the number of rows; packed graphs know only the tokens of a run, so theirs has
    c = 0 and B * T stands for any mix of that many tokens. residual is the largest relative error of the
    fit over the measured grid, exponent the slope of log(bytes - a) against log(T) at the longest lengths.
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
    """Measured by `antiphon profile`; fits by graph set, keyed `<lowering>-<precision>`."""

    fits: dict[str, MemoryFit]
    machine: str


class Provenance(_Strict):
    """Where the weights come from and under which licence."""

    source: str
    licence: str
    attribution: str
    recipe: str | None = None


class GenerationDefaults(_Strict):
    """What an absent option takes with this model; None: the server's own default. Fields are GenerateOptions'."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    beam_width: int | None = Field(default=None, ge=1, le=16)
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    early_stopping: Literal["heuristic", "first", "never"] | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    forced_first_id: int | None = Field(default=None, ge=0)
    suppressed_ids: tuple[int, ...] = Field(default=(), max_length=1024)
    stop_ids: tuple[int, ...] = Field(default=(), max_length=16)


class Quality(_Strict):
    """What one graph set scores on a file, beside the float32 model: what a narrower format costs."""

    precision: Precision
    measure: Measure
    value: float
    float32: float
    file: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(_Strict):
    """Contents of manifest.json."""

    format_version: int = FORMAT_VERSION
    name: str = Field(pattern=NAME_PATTERN)
    model: ModelConfig
    text: TextFormat
    generation: GenerationDefaults = GenerationDefaults()
    graphs: tuple[GraphSet, ...] = Field(min_length=1)
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
        """Return the graphs of a lowering; precision None takes int8, else float32, else int4.

        The server runs native graphs only. Raises BundleError naming the graphs that the bundle has.
        """
        held = {graphs.precision: graphs for graphs in reversed(self.manifest.graphs) if graphs.lowering == lowering}
        for choice in (precision,) if precision else ("int8", "float32", "int4"):
            if choice in held:
                return held[choice]
        wanted = f"{lowering} graphs" + (f" at precision {precision}" if held else "")
        names = ", ".join(f"{graphs.lowering}-{graphs.precision}" for graphs in self.manifest.graphs)
        raise BundleError(f"{self.path / MANIFEST_NAME}: no {wanted}; the bundle holds {names}; export the model again")

    def memory_fit(self, graphs: GraphSet) -> MemoryFit | None:
        """What was measured of these graphs; None where nothing was."""
        memory = self.manifest.memory
        return memory.fits.get(f"{graphs.lowering}-{graphs.precision}") if memory else None


def file_entry(path: Path) -> FileEntry:
    """Describe a file as the manifest lists it."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return FileEntry(size=path.stat().st_size, sha256=digest.hexdigest())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write manifest.json atomically, in the newest version: a reader sees the old one or the new one."""
    temporary = path / f".{MANIFEST_NAME}.tmp"
    described = manifest.model_copy(update={"format_version": FORMAT_VERSION})
    temporary.write_bytes(with_checksum(described.model_dump(mode="json", exclude_none=True)))
    temporary.replace(path / MANIFEST_NAME)


def load_bundle(path: Path) -> Bundle:
    """Read and verify a bundle: manifest valid and of a known version, every file of use listed, present, unchanged.

    Nothing outside its directory is ever opened. Raises BundleError.
    """
    manifest = _read_manifest(path)
    graphs = {
        name
        for g in manifest.graphs
        for name in (g.encoder, g.decoder, g.explain, *g.heads.values())
        if name is not None
    }
    named = {*manifest.text.files} | graphs
    if unlisted := sorted(named - manifest.files.keys()):
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
    """Return what a manifest of a known version says, its checksum verified and left out. Raises BundleError."""
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
    """Raise BundleError for a version that is not known, or that lacks its checksum; warn of one that never had it."""
    if version not in (FORMAT_VERSION, _VERSION_WITHOUT_CHECKSUM):
        raise BundleError(
            f"{source}: format_version is {version!r:.40}; this Antiphon reads "
            f"{_VERSION_WITHOUT_CHECKSUM} and {FORMAT_VERSION}: export or import it again"
        )
    if version == FORMAT_VERSION and not has_checksum:
        raise BundleError(f"{source}: checksum is missing; format_version {version} has one: export or import it again")
    if version == _VERSION_WITHOUT_CHECKSUM:
        log.warning(
            "%s: format_version %s has no checksum of this file, so damage to it is not noticed; "
            "export or import it again",
            source,
            version,
        )


def _in_one_line(error: object) -> str:
    return " ".join(str(error).split())


def _read_at_most(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return content


def _check_external_data(path: Path, name: str, manifest: Manifest) -> None:
    """Weights that `files` leaves out were never verified, and may lie anywhere."""
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
    found = file_entry(target)
    if found != expected:
        raise BundleError(
            f"{target} is damaged: {found.size} bytes with sha256 {found.sha256[:12]}..., "
            f"the manifest says {expected.size} bytes with {expected.sha256[:12]}..."
        )
