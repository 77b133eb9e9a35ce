"""`antiphon import`: conversion of a public checkpoint to a bundle, after a comparison with the original model.

Owns the order of the steps. checkpoints/source_weights.py reads tensors, checkpoints/families/ interprets them, and
export/export.py writes the bundle.
"""

from __future__ import annotations

import argparse
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

from antiphon.model.bundle.manifest import Bundle, BundleError, CacheType, Lowering, Precision, Provenance
from antiphon.model.checkpoints.adapters.adapter import Adapter, open_adapter
from antiphon.model.checkpoints.adapters.lora_config import CONFIG_NAME
from antiphon.model.checkpoints.checkpoint import Checkpoint
from antiphon.model.checkpoints.families.family import Family, Settings, family_in
from antiphon.model.checkpoints.settings import describe
from antiphon.model.checkpoints.source_weights import SourceError, SourceWeights
from antiphon.model.config import ModelConfig
from antiphon.model.export.export import (
    ALL_PRECISIONS,
    CACHE_TYPES,
    PRECISIONS,
    ExportError,
    check_target,
    chosen_precisions,
    export_bundle,
)
from antiphon.model.export.graphs.contrib_lowering import LoweringError
from antiphon.model.export.verification.verify import VerificationError
from antiphon.model.importer.adapted_head import with_trained_head
from antiphon.model.importer.convert_tokenizer import convert_tokenizer
from antiphon.model.importer.generation_settings import generation_defaults, with_start_tokens
from antiphon.model.importer.hub import find_checkpoint
from antiphon.model.importer.original import compare_with_original, random_batches, run_original
from antiphon.model.importer.provenance import provenance_of
from antiphon.model.text.format import NoTokenizersFile, TextFormat
from antiphon.model.text.tokenizer import TokenizerError, open_tokenizer
from antiphon.model.transformer.transformer import Transformer

# Larger models have no explain graph unless --explain is given, because it is traced and verified separately.
_EXPLAINED_PARAMETERS = 150_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """Options of the command.

    source: a directory or a name on the hub.
    target: directory of the bundle.
    name: model name for clients; None: the name of the bundle's directory.
    adapter: directory of a LoRA adapter of peft, which is merged into the weights; None: the checkpoint as it is.
    explain: export the explain graph; None: only for models up to 150 million parameters.
    verify: compare with the original model in transformers.
    max_source_len, max_target_len: in tokens; None: those of the checkpoint.
    licence, attribution: None: the licence in the checkpoint's README.md, and the checkpoint's name.
    """

    source: str
    target: Path
    name: str | None = None
    precisions: Sequence[Precision] = PRECISIONS
    lowerings: Sequence[Lowering] = ("native",)
    cache: CacheType | None = None
    adapter: Path | None = None
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
    """A checkpoint whose settings and tensor shapes are checked, without the tensors' data."""

    folder: Path
    settings: Settings
    family: Family
    config: ModelConfig
    adapter: Adapter | None

    def open_weights(self) -> SourceWeights:
        """Return the tensors, after the adapter's changes. Raises SourceError."""
        return _open_weights(self.folder, self.family, self.adapter)


def import_checkpoint(options: ImportOptions) -> Bundle:
    """Write the bundle of a public checkpoint. The bundle is written completely and verified, or not at all.

    Raises SourceError, TokenizerError, ExportError, BundleError or VerificationError.
    """
    name = options.target.resolve().name if options.name is None else options.name
    check_target(options.target.resolve(), name, overwrite=options.overwrite)
    source = _inspect(options)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = _checkpoint(source, options, Path(directory))
        explain = options.explain
        if explain is None:
            explain = checkpoint.model.num_parameters <= _EXPLAINED_PARAMETERS
        return export_bundle(
            checkpoint,
            options.target,
            precisions=options.precisions,
            lowerings=options.lowerings,
            cache=options.cache,
            explain=explain,
            name=name,
            overwrite=options.overwrite,
        )


def open_original(source: str, text_folder: Path) -> Checkpoint:
    """Return a public checkpoint as one of ours, without comparison, for further training.

    text_folder: directory that gets its tokenizer files.
    Raises SourceError or TokenizerError.
    """
    options = ImportOptions(source=source, target=text_folder, verify=False)
    return _checkpoint(_inspect(options), options, text_folder)


def _checkpoint(source: _Source, options: ImportOptions, text_folder: Path) -> Checkpoint:
    """Return the source as one of our checkpoints; text_folder gets links to its tokenizer files, or new files."""
    text = _text(source, text_folder)
    for file in text.files:
        if (source.folder / file).is_file() and not (text_folder / file).exists():
            (text_folder / file).symlink_to((source.folder / file).resolve())
    tokenizer = open_tokenizer(text_folder, text)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise SourceError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model only {source.config.vocab_size}; "
            "check that its files belong to this checkpoint"
        )
    generation = generation_defaults(source.folder, source.settings, source.config, text)
    compares = options.verify and source.family.reference
    return Checkpoint(
        config=source.config,
        model=_verified(source) if compares else load_model(source),
        tokenizer=tokenizer,
        text=text,
        text_folder=text_folder,
        provenance=_provenance(options, source),
        generation=generation,
    )


def _provenance(options: ImportOptions, source: _Source) -> Provenance:
    found = provenance_of(options.source, options.revision, source.folder, source.adapter)
    stated = {"licence": options.licence, "attribution": options.attribution}
    return found.model_copy(update={name: value for name, value in stated.items() if value})


def _text(source: _Source, text_folder: Path) -> TextFormat:
    """Return the text format; tokenizer files that the checkpoint has in another form are written to text_folder."""
    source.family.write_text(source.folder, source.settings, text_folder)
    try:
        return source.family.text(source.folder, source.settings, source.config)
    except NoTokenizersFile:
        convert_tokenizer(source.folder, text_folder)
        return source.family.text(text_folder, source.settings, source.config)


def _inspect(options: ImportOptions) -> _Source:
    """Read everything except the tensors' data, and compare names and shapes with our model. Raises SourceError."""
    folder = find_checkpoint(options.source, options.revision)
    _refuse_adapter(folder)
    family = family_in(folder)
    settings = with_start_tokens(folder, family.read_settings(folder))
    _refuse_remote_code(settings)
    adapter = None if options.adapter is None else _adapter(options, family)
    if adapter is not None:
        settings = with_trained_head(settings, adapter)
    with _open_weights(folder, family, adapter) as weights:
        settings = family.resolve(settings, weights)
    config = _limited(family.configure(settings), options)
    with _open_weights(folder, family, adapter, on_meta=True) as shapes, torch.device("meta"):
        family.load(Transformer(config), shapes, settings)
        shapes.check(family.name)
    return _Source(folder=folder, settings=settings, family=family, config=config, adapter=adapter)


def _adapter(options: ImportOptions, family: Family) -> Adapter:
    """Return the adapter of the options; one trained on a checkpoint of another name is reported on standard error."""
    assert options.adapter is not None
    if not family.reference:
        raise SourceError(f"--adapter needs a checkpoint of transformers; {options.source} is one of {family.name}")
    adapter = open_adapter(options.adapter)
    trained_on = adapter.config.base_model_name_or_path
    if trained_on and Path(trained_on).name != Path(options.source).resolve().name:
        print(f"antiphon import: note: the adapter was trained on {trained_on}", file=sys.stderr)
    return adapter


def _open_weights(folder: Path, family: Family, adapter: Adapter | None, *, on_meta: bool = False) -> SourceWeights:
    """Return the tensors of a checkpoint, after an adapter's changes. Raises SourceError."""
    weights = family.open_weights(folder, on_meta=on_meta)
    if adapter is not None:
        adapter.apply(weights, family.input_first)
    return weights


def _refuse_adapter(folder: Path) -> None:
    """Raise SourceError if an adapter is in the checkpoint's directory: transformers would apply it where peft is."""
    if (folder / CONFIG_NAME).is_file():
        raise SourceError(
            f"{folder} has an adapter ({CONFIG_NAME}): import the checkpoint that it was trained on, from a directory "
            "of its own, and give this one as --adapter"
        )


def _refuse_remote_code(settings: Settings) -> None:
    for name in ("auto_map", "custom_code"):
        if settings.get(name):
            raise SourceError(
                f"config.json: {name} needs code from the checkpoint, which is never run; "
                "only models that are part of transformers can be imported"
            )


def _limited(config: ModelConfig, options: ImportOptions) -> ModelConfig:
    """Return the configuration with the requested lengths. Raises SourceError beyond the learned positions."""
    requested = {side: getattr(options, side) for side in ("max_source_len", "max_target_len")}
    for side, length in requested.items():
        rows = getattr(config, side)
        if length is not None and config.positions == "learned" and length > rows:
            raise SourceError(f"--{side.replace('_', '-')} is {length}; the checkpoint has learned {rows} positions")
    changed = {side: length for side, length in requested.items() if length is not None}
    return describe(**{**config.model_dump(), **changed}) if changed else config


def _verified(source: _Source) -> Transformer:
    """Return the model after a comparison with the original, whose memory is freed before our model is loaded."""
    batches = random_batches(source.config)
    reference = _reference(source)
    with tqdm(total=2, desc="compare with transformers", unit="model", disable=None) as progress:
        expected = run_original(source.folder, reference, source.config, batches, source.adapter)
        progress.update()
        model = load_model(source)
        errors = compare_with_original(model, batches, expected)
        progress.update()
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    tokens = sum(int(batch.lens.sum()) for batch in batches)
    print(f"{source.family.name}: as in transformers over {tokens} random tokens; largest relative error: {shown}")
    return model


def _reference(source: _Source) -> str:
    """Return the transformers class for the original; for an encoder-only model that of config.json, with heads."""
    import transformers

    class_name = (source.settings.get("architectures") or [""])[0]
    original_class = getattr(transformers, str(class_name), None)
    is_model = isinstance(original_class, type) and issubclass(original_class, transformers.PreTrainedModel)
    return class_name if is_model and source.config.architecture == "encoder" else source.family.reference


def load_model(source: _Source) -> Transformer:
    """Return our model with the checkpoint's weights, in evaluation mode, without a second copy in memory.

    Raises SourceError if a tensor is missing, left over, of another shape, or has values that are not finite.
    """
    with _NoRandomWeights():
        model = Transformer(source.config).eval().requires_grad_(requires_grad=False)
    with source.open_weights() as weights:
        source.family.load(model, weights, source.settings)
        weights.check(source.family.name)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum()):
            raise SourceError(f"the tensors for {name} have values that are not finite numbers")
    return model


class _NoRandomWeights(TorchFunctionMode):
    """Context in which modules initialise weights with NaN instead of random numbers, which saves time.

    A weight that is not filled afterwards stays NaN and is detected.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0].fill_(torch.nan)
        return func(*args, **(kwargs or {}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source", metavar="DIRECTORY_OR_HUB_NAME", help="a checkpoint; an existing directory takes precedence"
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="directory to write, for `antiphon serve`")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="a LoRA adapter that peft saved, to merge into the weights"
    )
    parser.add_argument("--name", help="the model's name for clients (default: the bundle directory's name)")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=ALL_PRECISIONS,
        help="default: float32 int8, and bfloat16 with --lowering cuda",
    )
    parser.add_argument(
        "--lowering",
        nargs="+",
        choices=("native", "cuda"),
        default=["native"],
        help="graphs for CPUs (native, the default), for an NVIDIA GPU (cuda), or both",
    )
    parser.add_argument(
        "--cache-type",
        choices=CACHE_TYPES,
        help="type of cached keys and values (default: float16 with integer weights, else float32)",
    )
    parser.add_argument(
        "--explain",
        action=argparse.BooleanOptionalAction,
        help="export the graph that returns attention weights (default: for models up to "
        f"{_EXPLAINED_PARAMETERS // 1_000_000} million parameters)",
    )
    for side in ("source", "target"):
        parser.add_argument(f"--max-{side}-len", type=int, help=f"longest {side} in tokens (default: the checkpoint's)")
    parser.add_argument("--overwrite", action="store_true", help="replace BUNDLE if it is a bundle")
    parser.add_argument("--revision", help="branch, tag or commit of a checkpoint on the hub")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare with the original")
    parser.add_argument("--licence", help="licence of the weights (default: that of the checkpoint's README.md)")
    parser.add_argument("--attribution", help="authors to name with the weights")


def _options(args: argparse.Namespace) -> ImportOptions:
    return ImportOptions(
        source=args.source,
        target=args.bundle,
        name=args.name,
        precisions=chosen_precisions(args.precision, args.lowering),
        lowerings=tuple(dict.fromkeys(args.lowering)),
        cache=args.cache_type,
        adapter=args.adapter,
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
    """Import a checkpoint; return 0 when the bundle is written, 2 after an error, with one line on standard error."""
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
    described = ", ".join(f"{graphs.lowering} {graphs.precision}" for graphs in bundle.manifest.graphs)
    print(f"{bundle.path}: {described}; {size / 1e6:.1f} MB, graphs verified against the model")
    return 0
