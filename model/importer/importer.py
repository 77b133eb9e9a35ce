"""`antiphon import`: a checkpoint of the Hugging Face libraries becomes a bundle, compared with the original first.

Owns the order of work. Where tensors lie is source_weights.py's, what they mean families/'s, the bundle export.py's.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from antiphon.model.bundle.manifest import Bundle, BundleError, CacheType, Precision, Provenance
from antiphon.model.checkpoints.checkpoint import Checkpoint
from antiphon.model.checkpoints.families.family import Family, Settings, family_in
from antiphon.model.checkpoints.settings import describe
from antiphon.model.checkpoints.source_weights import SourceError
from antiphon.model.config import ModelConfig
from antiphon.model.export.contrib_lowering import LoweringError
from antiphon.model.export.export import (
    ALL_PRECISIONS,
    CACHE_TYPES,
    PRECISIONS,
    ExportError,
    check_target,
    export_bundle,
)
from antiphon.model.export.verify import VerificationError
from antiphon.model.importer.convert_tokenizer import convert_tokenizer
from antiphon.model.importer.generation_settings import generation_defaults, with_start_tokens
from antiphon.model.importer.hub import find_checkpoint
from antiphon.model.importer.original import compare_with_original, random_batches, run_original
from antiphon.model.text.format import NoTokenizersFile, TextFormat
from antiphon.model.text.tokenizer import TokenizerError, open_tokenizer
from antiphon.model.transformer.transformer import Transformer

# Above this many parameters the graph of attention weights, traced and verified apart, is left out unless asked for.
_EXPLAINED_PARAMETERS = 150_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """What the command was asked.

    source: a directory or a name of the hub. explain None: by the model's size. max_source_len and max_target_len
    None: the checkpoint's own. licence and attribution None: what its README says.
    """

    source: str
    target: Path
    name: str | None = None
    precisions: Sequence[Precision] = PRECISIONS
    cache: CacheType | None = None
    explain: bool | None = None
    overwrite: bool = False
    verify: bool = True
    revision: str | None = None
    max_source_len: int | None = None
    max_target_len: int | None = None
    licence: str | None = None
    attribution: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A checkpoint understood: everything but its numbers."""

    folder: Path
    settings: Settings
    family: Family
    config: ModelConfig


def import_checkpoint(options: ImportOptions) -> Bundle:
    """Write the bundle of somebody else's checkpoint, whole and verified or not at all.

    Raises SourceError, TokenizerError, ExportError, BundleError or VerificationError.
    """
    name = options.target.resolve().name if options.name is None else options.name
    check_target(options.target.resolve(), name, overwrite=options.overwrite)
    source = _understand(options)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = _checkpoint(source, options, Path(directory))
        explain = options.explain
        if explain is None:
            explain = checkpoint.model.num_parameters <= _EXPLAINED_PARAMETERS
        return export_bundle(
            checkpoint,
            options.target,
            precisions=options.precisions,
            cache=options.cache,
            explain=explain,
            name=name,
            overwrite=options.overwrite,
        )


def open_original(source: str, text_folder: Path) -> Checkpoint:
    """Somebody else's checkpoint as one of ours, to train on; nothing is compared. Its text files come to text_folder.

    Raises SourceError or TokenizerError.
    """
    options = ImportOptions(source=source, target=text_folder, verify=False)
    return _checkpoint(_understand(options), options, text_folder)


def _checkpoint(source: _Source, options: ImportOptions, text_folder: Path) -> Checkpoint:
    """The whole as a checkpoint of ours; its text files, linked or written, lie in text_folder."""
    text = _text(source, text_folder)
    for file in text.files:
        if (source.folder / file).is_file() and not (text_folder / file).exists():
            (text_folder / file).symlink_to((source.folder / file).resolve())
    tokenizer = open_tokenizer(text_folder, text)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise SourceError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model only {source.config.vocab_size}; "
            "are its files those of another checkpoint?"
        )
    generation = generation_defaults(source.folder, source.settings, source.config, text)
    compares = options.verify and source.family.reference
    return Checkpoint(
        config=source.config,
        model=_verified(source) if compares else load_model(source),
        tokenizer=tokenizer,
        text=text,
        text_folder=text_folder,
        provenance=_provenance(options, source.folder),
        generation=generation,
    )


def _text(source: _Source, text_folder: Path) -> TextFormat:
    """How its texts become ids; files that the checkpoint has in another form are written to text_folder."""
    source.family.write_text(source.folder, source.settings, text_folder)
    try:
        return source.family.text(source.folder, source.settings, source.config)
    except NoTokenizersFile:
        convert_tokenizer(source.folder, text_folder)
        return source.family.text(text_folder, source.settings, source.config)


def _understand(options: ImportOptions) -> _Source:
    """Read all but the tensors' numbers, and compare their names and shapes with our model of them."""
    folder = find_checkpoint(options.source, options.revision)
    family = family_in(folder)
    settings = with_start_tokens(folder, family.read_settings(folder))
    _refuse_remote_code(settings)
    with family.open_weights(folder) as weights:
        settings = family.settle(settings, weights)
    config = _limited(family.configure(settings), options)
    with family.open_weights(folder, on_meta=True) as shapes, torch.device("meta"):
        family.load(Transformer(config), shapes, settings)
        shapes.check(family.name)
    return _Source(folder=folder, settings=settings, family=family, config=config)


def _refuse_remote_code(settings: Settings) -> None:
    for name in ("auto_map", "custom_code"):
        if settings.get(name):
            raise SourceError(
                f"config.json: {name} asks for code of the checkpoint's own, which is never run; "
                "only models that transformers itself has are imported"
            )


def _limited(config: ModelConfig, options: ImportOptions) -> ModelConfig:
    """The lengths asked for, within the table where positions are learned."""
    asked = {side: getattr(options, side) for side in ("max_source_len", "max_target_len")}
    for side, length in asked.items():
        rows = getattr(config, side)
        if length is not None and config.positions == "learned" and length > rows:
            raise SourceError(f"--{side.replace('_', '-')} is {length}; the checkpoint has learned {rows} positions")
    changed = {side: length for side, length in asked.items() if length is not None}
    return describe(**{**config.model_dump(), **changed}) if changed else config


def _verified(source: _Source) -> Transformer:
    """The model, compared with the original, which has come and gone before it is loaded."""
    batches = random_batches(source.config)
    reference = _reference(source)
    with tqdm(total=2, desc="compare with transformers", unit="model", disable=None) as progress:
        expected = run_original(source.folder, reference, source.config, batches)
        progress.update()
        model = load_model(source)
        errors = compare_with_original(model, batches, expected)
        progress.update()
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    tokens = sum(int(batch.lens.sum()) for batch in batches)
    print(f"{source.family.name}: as in transformers over {tokens} random tokens; largest relative error: {shown}")
    return model


def _reference(source: _Source) -> str:
    """The class that runs the original: of an encoder the one that config.json names, for its heads."""
    import transformers

    named = (source.settings.get("architectures") or [""])[0]
    found = getattr(transformers, str(named), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return named if is_model and source.config.architecture == "encoder" else source.family.reference


def load_model(source: _Source) -> Transformer:
    """Our model with the checkpoint's weights, in evaluation mode; takes the memory of the model alone."""
    with _Unset():
        model = Transformer(source.config).eval().requires_grad_(requires_grad=False)
    with source.family.open_weights(source.folder) as weights:
        source.family.load(model, weights, source.settings)
        weights.check(source.family.name)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum()):
            raise SourceError(f"the tensors that make up {name} hold values that are no finite numbers")
    return model


class _Unset(TorchFunctionMode):
    """Modules made in here draw no random weights: nan stands where one should have been, until it is filled."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0].fill_(torch.nan)
        return func(*args, **(kwargs or {}))


def _provenance(options: ImportOptions, folder: Path) -> Provenance:
    directory = Path(options.source)
    name = directory.resolve().name if directory.is_dir() else options.source
    source = f"{name} at revision {options.revision}" if options.revision else name
    return Provenance(
        source=source,
        licence=options.licence or _stated_licence(folder) or "unknown",
        attribution=options.attribution
        or f"{name}, by its authors; imported by Antiphon, weights unchanged in meaning",
    )


def _stated_licence(folder: Path) -> str | None:
    """`license:` of the front matter of a checkpoint's README.md."""
    try:
        readme = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = re.match(r"---\n(.*?)\n---", readme, re.DOTALL)
    found = re.search(r"^license:[ \t]*([^\s#]+)", front.group(1), re.MULTILINE) if front else None
    return found.group(1).strip("'\"") if found else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="DIRECTORY_OR_HUB_NAME", help="a checkpoint; a directory wins over a name")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="directory to write, for `antiphon serve`")
    parser.add_argument("--name", help="the model's name for clients (default: the bundle directory's name)")
    parser.add_argument(
        "--precision", nargs="+", choices=ALL_PRECISIONS, default=list(PRECISIONS), help="default: float32 int8"
    )
    parser.add_argument(
        "--cache-type",
        choices=CACHE_TYPES,
        help="what graphs keep keys and values in (default: float16 beside integer weights, else float32)",
    )
    parser.add_argument(
        "--explain",
        action=argparse.BooleanOptionalAction,
        help="the graph that shows attention weights (default: of models up to "
        f"{_EXPLAINED_PARAMETERS // 1_000_000} million parameters)",
    )
    for side in ("source", "target"):
        parser.add_argument(f"--max-{side}-len", type=int, help=f"longest {side} in tokens (default: the checkpoint's)")
    parser.add_argument("--overwrite", action="store_true", help="replace BUNDLE if it is one already")
    parser.add_argument("--revision", help="branch, tag or commit of a checkpoint of the hub")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not run the original beside it")
    parser.add_argument("--licence", help="of the weights (default: what the checkpoint's README.md says)")
    parser.add_argument("--attribution", help="who is to be named with the weights")


def _options(args: argparse.Namespace) -> ImportOptions:
    return ImportOptions(
        source=args.source,
        target=args.bundle,
        name=args.name,
        precisions=tuple(dict.fromkeys(args.precision)),
        cache=args.cache_type,
        explain=args.explain,
        overwrite=args.overwrite,
        verify=args.verify,
        revision=args.revision,
        max_source_len=args.max_source_len,
        max_target_len=args.max_target_len,
        licence=args.licence,
        attribution=args.attribution,
    )


def run(args: argparse.Namespace) -> int:
    """Import; 0 when the bundle is written, 2 with one line on standard error when it cannot be."""
    try:
        bundle = import_checkpoint(_options(args))
    except (
        SourceError,
        TokenizerError,
        ExportError,
        BundleError,
        LoweringError,
        VerificationError,
        OSError,
    ) as error:
        print(f"antiphon import: {error}", file=sys.stderr)
        return 2
    size = sum(entry.size for entry in bundle.manifest.files.values())
    held = ", ".join(f"{graphs.lowering} {graphs.precision}" for graphs in bundle.manifest.graphs)
    print(f"{bundle.path}: {held}; {size / 1e6:.1f} MB, graphs verified against the model")
    return 0
