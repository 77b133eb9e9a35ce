"""Conversion of a public checkpoint to a bundle, after a comparison with the original model and tokenizer.

Owns the order of the steps. checkpoints/source_weights.py reads tensors, checkpoints/families/ interprets them, and
export/export.py writes the bundle. The command is service/antiphon/tools/import_command.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle, CacheType, GenerationDefaults, Lowering, Precision, Provenance
from antiphon.checkpoints.adapter import CONFIG_NAME, Adapter, open_adapter
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.checkpoints.families.family import Family, family_in
from antiphon.checkpoints.gguf_files import is_gguf
from antiphon.checkpoints.sentence_transformers import load_dense, lower_first, with_declared_parts
from antiphon.checkpoints.settings import Settings, describe, read_json, with_class_defaults
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import NoTokenizersFile, SourceError, TokenizerError
from antiphon.export.export import PRECISIONS, check_target, export_bundle
from antiphon.importer.compare_pipeline import PipelineAnswer, compare_pipeline, run_pipeline
from antiphon.importer.generation_settings import (
    comparable_generation,
    generation_defaults,
    resolved_generation,
    sampling_settings,
    with_start_and_end,
)
from antiphon.importer.hub import find_checkpoint, provenance_of
from antiphon.importer.original import (
    OriginalAnswer,
    Prompt,
    compare_with_original,
    random_batches,
    run_formulas,
    run_original,
)
from antiphon.importer.original_tokenizer import TEXTS, compare_texts, open_original_tokenizer, write_tokenizer
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import Tokenizer, encode_sources, open_tokenizer
from antiphon.transformer.transformer import Transformer

# Larger models have no explain graph unless --explain is given, because it is traced and verified separately.
EXPLAINED_PARAMETERS = 150_000_000
# Texts whose answers are compared with those of the original.
_NUM_ANSWERS = 3
# Settings of the labels, which are taken from the adapter's config.json if it is there.
_OF_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")

CheckAnswers = Callable[[Path, Sequence[OriginalAnswer]], None]
"""Check of a complete bundle before it appears, which gets its directory and the answers of the original."""


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
    """A checkpoint whose settings and tensor shapes are checked, without the tensors' data.

    generation: settings that transformers' `generate` has for it, without those that are None.
    notes: differences from transformers that are on purpose, which are printed.
    """

    folder: Path
    settings: Settings
    family: Family
    config: ModelConfig
    adapter: Adapter | None
    generation: Settings = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def has_original(self) -> bool:
        """Return whether there is an original to compare with: in transformers, or the family's formulas."""
        return bool(self.family.reference) or self.family.original is not None

    @property
    def compared_with(self) -> str:
        """Name of the program that the checkpoint is compared with."""
        return "transformers" if self.family.original is None else "the original's formulas"

    @property
    def num_rows(self) -> int:
        """Rows of the larger embedding; a token with a larger id cannot be read or written."""
        return max(self.config.vocab_size, self.config.resolved_source_vocab_size)

    def open_weights(self) -> SourceWeights:
        """Return the tensors, after the adapter's changes. Raises SourceError."""
        return _open_weights(self.folder, self.family, self.adapter)


def import_checkpoint(options: ImportOptions, check: CheckAnswers | None = None) -> Bundle:
    """Write the bundle of a public checkpoint. The bundle is written completely and verified, or not at all.

    check: further check of the complete bundle. Differences from the original that are on purpose are printed on
    standard error. Raises SourceError, TokenizerError, ExportError, BundleError or VerificationError.
    """
    name = options.target.resolve().name if options.name is None else options.name
    check_target(options.target.resolve(), name, overwrite=options.overwrite)
    source = _inspect(options)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, answers = _convert(source, options, Path(directory))
        _print_notes(source)
        is_small = checkpoint.model.num_parameters <= EXPLAINED_PARAMETERS
        return export_bundle(
            checkpoint,
            options.target,
            precisions=options.precisions,
            lowerings=options.lowerings,
            cache=options.cache,
            explain=is_small if options.explain is None else options.explain,
            name=name,
            overwrite=options.overwrite,
            check=None if check is None else lambda path: check(path, answers),
        )


def _print_notes(source: _Source) -> None:
    if source.notes:
        print(f"note: differences from {source.folder} in {source.compared_with}:", file=sys.stderr)
        for note in source.notes:
            print(f"  - {note}", file=sys.stderr)


def open_original(source: str, text_folder: Path) -> Checkpoint:
    """Return a public checkpoint as one of ours, without comparison, for further training.

    text_folder: directory that gets its tokenizer files.
    Raises SourceError or TokenizerError.
    """
    options = ImportOptions(source=source, target=text_folder, verify=False)
    return _convert(_inspect(options), options, text_folder)[0]


def _convert(source: _Source, options: ImportOptions, text_folder: Path) -> tuple[Checkpoint, list[OriginalAnswer]]:
    """Return the source as one of our checkpoints, and answers of the original to compare the bundle with.

    text_folder gets links to its tokenizer files, or new files.
    """
    compares = options.verify and source.has_original
    original = _original_tokenizer(source) if source.family.reference else None
    text = _text(source, original, text_folder)
    for file in text.files:
        if (source.folder / file).is_file() and not (text_folder / file).exists():
            (text_folder / file).symlink_to((source.folder / file).resolve())
    tokenizer = open_tokenizer(text_folder, text)
    if options.verify and original is not None:
        compare_texts(original, tokenizer, text, source.num_rows, source.notes)
    generation = generation_defaults(source.generation, source.config, text, source.notes)
    model, answers = _compared(source, original, tokenizer, text, generation) if compares else (load_model(source), [])
    checkpoint = Checkpoint(
        config=source.config,
        model=model,
        tokenizer=tokenizer,
        text=text,
        text_folder=text_folder,
        provenance=_provenance(options, source),
        generation=generation,
    )
    return checkpoint, answers


def _provenance(options: ImportOptions, source: _Source) -> Provenance:
    provenance = provenance_of(options.source, options.revision, source.folder, source.adapter)
    stated = {"licence": options.licence, "attribution": options.attribution}
    return provenance.model_copy(update={name: value for name, value in stated.items() if value})


def _original_tokenizer(source: _Source) -> Any:
    """Return the tokenizer of transformers; None, with a note, if only we can open the checkpoint's files.

    Raises TokenizerError if we cannot open them either.
    """
    try:
        original = open_original_tokenizer(source.folder)
        lower_first(original, source.folder)
        return original
    except TokenizerError as error:
        try:
            source.family.text(source.folder, source.settings, source.config)
        except NoTokenizersFile:
            raise error from None
        source.notes.append(f"{error}; its files are read as they are, and its texts are not compared")
        return None


def _text(source: _Source, original: Any, text_folder: Path) -> TextFormat:
    """Return the text format; tokenizer files that the checkpoint has in another form are written to text_folder.

    The tokenizer of transformers becomes a tokenizer.json if it has that form. Tokens without rows are left out.
    """
    family, settings, config = source.family, source.settings, source.config
    family.write_text(source.folder, settings, text_folder)
    try:
        text = family.text(source.folder, settings, config)
        is_converted = original is not None and text.kind == "tokenizers"
    except NoTokenizersFile:
        is_converted = True
    if is_converted:
        if original is not None:
            write_tokenizer(original, text_folder, source.num_rows, source.notes)
        text = family.text(text_folder, settings, config)
    return _with_rows(text, source.num_rows)


def _with_rows(text: TextFormat, num_rows: int) -> TextFormat:
    """Return the text format without tokens that have no row in the model."""

    def within(ids: dict[str, int]) -> dict[str, int]:
        return {name: index for name, index in ids.items() if index < num_rows}

    languages = within(text.languages)
    source, target = (
        code if code in languages else None for code in (text.default_source_language, text.default_target_language)
    )
    return text.model_copy(
        update=dict(
            added_tokens=within(text.added_tokens),
            special_ids=tuple(index for index in text.special_ids if index < num_rows),
            languages=languages,
            default_source_language=source,
            default_target_language=target,
            mask_id=text.mask_id if text.mask_id is not None and text.mask_id < num_rows else None,
        )
    )


def _inspect(options: ImportOptions) -> _Source:
    """Read everything except the tensors' data, and compare names and shapes with our model. Raises SourceError."""
    folder = find_checkpoint(options.source, options.revision)
    _refuse_adapter(folder)
    family = family_in(folder)
    settings = generation = family.read_settings(folder)
    notes: list[str] = []
    _refuse_remote_code(settings)
    if family.reference:
        settings = with_class_defaults(settings)
        stated = resolved_generation(folder).to_dict()
        generation = {name: value for name, value in stated.items() if value is not None}
        settings = with_start_and_end(settings, generation, notes)
    adapter = None if options.adapter is None else _adapter(options, family, folder)
    if adapter is not None:
        settings = _with_trained_head(settings, adapter)
    with _open_weights(folder, family, adapter) as weights:
        settings = family.resolve(settings, weights)
    config = _limited(family.configure(settings), options)
    config = with_declared_parts(config, folder, notes, keeps_len=options.max_source_len is not None)
    with _open_weights(folder, family, adapter, on_meta=True) as shapes, torch.device("meta"):
        model = Transformer(config)
        family.load(model, shapes, settings)
        shapes.check(family.name)
        load_dense(model, folder, on_meta=True)
    return _Source(
        folder=folder,
        settings=settings,
        family=family,
        config=config,
        adapter=adapter,
        generation=generation,
        notes=notes,
    )


def _adapter(options: ImportOptions, family: Family, folder: Path) -> Adapter:
    """Return the adapter of the options; one trained on a checkpoint of another name is reported on standard error."""
    assert options.adapter is not None
    if not family.reference:
        raise SourceError(f"--adapter needs a checkpoint of transformers; {options.source} is one of {family.name}")
    if is_gguf(folder):
        raise SourceError(f"--adapter needs the checkpoint that it was trained on; {options.source} is a GGUF file")
    adapter = open_adapter(options.adapter)
    trained_on = adapter.config.base_model_name_or_path
    if trained_on and Path(trained_on).name != Path(options.source).resolve().name:
        print(f"antiphon import: note: the adapter was trained on {trained_on}", file=sys.stderr)
    return adapter


def _with_trained_head(settings: Settings, adapter: Adapter) -> Settings:
    """Return the settings with the architecture and the labels of the model that the adapter was trained in.

    An adapter for labels usually starts from a checkpoint without them, whose config.json describes other heads. The
    class of the trained model is in adapter_config.json. Number and names of the labels are in the config.json that the
    user saved beside the adapter, because peft does not save them.
    """
    if own := read_json(adapter.folder / "config.json"):
        kept = {name: value for name, value in settings.items() if name not in _OF_LABELS}
        settings = {**kept, **{name: own[name] for name in _OF_LABELS if name in own}}
    trained = _trained_class(str(settings.get("model_type")), adapter)
    return {**settings, "architectures": [trained]} if trained else settings


def _trained_class(model_type: str, adapter: Adapter) -> str | None:
    """Return the class of transformers that the adapter was trained in if it has a head for a task; else None."""
    named = str((adapter.config.auto_mapping or {}).get("base_model_class", ""))
    if named.endswith(_HEADS):
        return named
    return _classes(adapter.config.task_type).get(model_type)


def _classes(task_type: str | None) -> Mapping[str, str]:
    """Return the class of each model type for a task of peft; empty for tasks that keep the checkpoint's head."""
    from transformers.models.auto import modeling_auto

    tables: dict[str, Mapping[str, str]] = {
        "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    }
    return tables.get(task_type or "", {})


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


def _compared(
    source: _Source, original: Any, tokenizer: Tokenizer, text: TextFormat, generation: GenerationDefaults
) -> tuple[Transformer, list[OriginalAnswer]]:
    """Return the model after a comparison with the original, and answers of the original.

    original: its tokenizer; None: texts are not compared. The original's memory is freed before our model is loaded.
    """
    batches = random_batches(source.config)
    is_encoder = source.config.architecture == "encoder"
    prompts = () if is_encoder else _prompts(source, tokenizer, text)
    stated = comparable_generation(source.generation, source.config, text, generation)
    read: list[PipelineAnswer] = []
    with tqdm(total=2, desc="compare with the original", unit="model", disable=None) as progress:
        if source.family.original is not None:
            formulas = source.family.original(source.folder)
            expected = run_formulas(formulas, source.config, batches, prompts, stated)
            del formulas
        else:
            reference = _reference(source)
            expected = run_original(
                source.folder,
                reference,
                source.config,
                batches,
                source.adapter,
                prompts=prompts,
                generation=stated,
                sampling=sampling_settings(source.generation, generation),
            )
            if is_encoder and original is not None:
                read = run_pipeline(original, source.folder, reference, source.config, source.adapter)
        progress.update()
        model = load_model(source)
        errors = compare_with_original(model, batches, expected.outputs)
        compare_pipeline(model, tokenizer, text, read)
        progress.update()
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    tokens = sum(int(batch.lens.sum()) for batch in batches)
    print(
        f"{source.family.name}: as in {source.compared_with} over {tokens} random tokens; "
        f"largest relative error: {shown}"
    )
    return model, expected.answers


def _prompts(source: _Source, tokenizer: Tokenizer, text: TextFormat) -> list[Prompt]:
    """Return the first few texts that fit the model, with their tokens."""
    config = source.config
    longest = config.max_target_len // 2 if config.architecture == "decoder" else config.max_source_len
    encoded = zip(TEXTS, encode_sources(tokenizer, text, TEXTS), strict=True)
    prompts = [Prompt(text=sample, ids=tuple(ids)) for sample, ids in encoded if 0 < len(ids) <= longest]
    return prompts[:_NUM_ANSWERS]


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
    load_dense(model, source.folder)
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
