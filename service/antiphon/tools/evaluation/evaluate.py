"""`antiphon evaluate`: runs a bundle, or a checkpoint in PyTorch, on a test set, and scores it.

This module reads the flags, opens bundles and test sets, and records scores in manifests. translations.py, labels.py,
texts.py, vectors.py and checkpoints.py compute the scores. A bundle runs in the same engine as in the server, without
the network. torch is imported for checkpoints only.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from antiphon.bundle.manifest import (
    MANIFEST_NAME,
    Bundle,
    GenerationDefaults,
    Measure,
    Precision,
    Quality,
    load_bundle,
    write_manifest,
)
from antiphon.cli.common import report_error
from antiphon.cli.connection_flags import add_call_flags, add_connection_flags, connection_problem, read_client_flags
from antiphon.client import Options, ServerError
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.limits import ALLOWED
from antiphon.domain.sampling_params import SamplingParams
from antiphon.errors import ModelError
from antiphon.rpc.v1.languages import RequestLanguages, named_languages
from antiphon.rpc.v1.options import NO_DEFAULTS, with_defaults
from antiphon.runtime.lanes import open_runner
from antiphon.runtime.native import EncoderRunner
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import open_tokenizer
from antiphon.tools.evaluation import EvaluationError
from antiphon.tools.evaluation.checkpoints import evaluate_checkpoint, score_text_in_pytorch
from antiphon.tools.evaluation.labels import LabelScore, evaluate_labels
from antiphon.tools.evaluation.texts import NoTextError, TextScore, evaluate_texts
from antiphon.tools.evaluation.translations import Reader, Score, TestSet, evaluate_server, run_engine, score_system
from antiphon.tools.evaluation.vectors import VectorScore, evaluate_vectors
from antiphon.training.corpus import Pair, load_corpus, read_running_text
from antiphon.training.recipe import FineTuneRecipe, LanguageModelRecipe, load_any_recipe, load_recipe

AnyScore = TypeVar("AnyScore", LabelScore, TextScore)

# Options of translations and labels, which --text excludes.
_NOT_BESIDE_TEXT = (
    "recipe", "data", "collection", "source", "reference", "source_language", "target_language", "ctranslate2",
    "checkpoint", "output",
)  # fmt: skip
# Options of a model on this machine, which --target excludes.
_NOT_OF_SERVER = ("model", "text", "precision", "ctranslate2", "record", "checkpoint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon evaluate`."""
    parser.add_argument(
        "model", type=Path, nargs="?", metavar="MODEL", help="a bundle, or a checkpoint to run in PyTorch"
    )
    parser.add_argument("--target", metavar="HOST:PORT", help="or: a running server, whose default model is scored")
    parser.add_argument("--recipe", help="score the held-out part of this recipe's data (with --data)")
    parser.add_argument("--data", type=Path, help="folder of the recipe's data files")
    parser.add_argument("--part", choices=("test", "valid"), default="test", help="part of the recipe's data")
    parser.add_argument(
        "--collection", nargs="+", metavar="NAME", help="only these collections of the recipe's data, together"
    )
    parser.add_argument("--source", type=Path, help="or: a file of sources, one per line, plain or .gz")
    parser.add_argument("--reference", type=Path, help="and its references, line by line")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="or, for a decoder-only model: a file of texts whose perplexity is measured, plain or .gz. Each line is "
        "a text. Its first token (the begin token if the model has one there) is given and the others are scored; "
        "long texts are split into windows of the model's length; blank lines and single tokens are skipped. For an "
        "encoder-only model: texts whose vectors are compared with those of the float32 graphs",
    )
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-language",
            default="",
            metavar="CODE",
            help="language, for a bundle of several (default: the model's)",
        )
    parser.add_argument(
        "--precision", choices=("float32", "int8", "int4"), help="graphs of the bundle (default: int8 if it has them)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rows", type=int, default=32, help="sentences that run together")
    parser.add_argument("--beam-width", type=int, default=1, help="live beams of a beam search (default: 1, greedy)")
    parser.add_argument(
        "--use-shortlist", action="store_true", help="with --target: choose only among the candidates of each source"
    )
    parser.add_argument(
        "--ctranslate2", action="store_true", help="for a checkpoint: also run CTranslate2, same weights"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="score every precision of a bundle and write the scores into its manifest",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="with --record: checkpoint from which a translation bundle was exported, if it has no float32 graphs",
    )
    parser.add_argument("--output", type=Path, help="write the translations to this file, one per line")
    parser.add_argument("--json", action="store_true", help="print one JSON object per system instead of a table")
    add_call_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run `antiphon evaluate` and return the exit code."""
    try:
        for option in ("threads", "rows"):
            if getattr(args, option) < 1:
                raise EvaluationError(f"--{option} is {getattr(args, option)}; it must be at least 1")
        if not ALLOWED["max_num_seqs"].holds(args.rows):
            raise EvaluationError(f"--rows is {args.rows}; it must be {ALLOWED['max_num_seqs'].words}")
        scores = _scores(args)
    except (EvaluationError, ModelError, OSError) as error:
        return report_error("evaluate", error)
    for score in scores:
        print(json.dumps(asdict(score)) if args.json else score.row)
    return 0


def _scores(args: argparse.Namespace) -> Sequence[Score | LabelScore | TextScore | VectorScore]:
    if args.target is not None:
        return [_evaluate_server(args)]
    if args.model is None:
        raise EvaluationError("give a MODEL, or --target with the address of a server")
    if args.use_shortlist:
        raise EvaluationError("--use-shortlist needs --target with the address of a server")
    if args.text is not None:
        return _evaluate_texts(args)
    recipe = load_any_recipe(args.recipe) if args.recipe and args.data else None
    if isinstance(recipe, FineTuneRecipe):
        return _evaluate_labels(args, recipe)
    if isinstance(recipe, LanguageModelRecipe):
        return _evaluate_running_text(args, recipe)
    test_set = _test_set(args)
    is_bundle = (args.model / MANIFEST_NAME).is_file()
    if is_bundle and args.ctranslate2:
        raise EvaluationError("--ctranslate2 compares a checkpoint's weights; give the checkpoint, not a bundle")
    _check_output(args)
    if args.record:
        return _record(args, test_set)
    return _evaluate_bundle(args, test_set) if is_bundle else evaluate_checkpoint(args, test_set)


def _evaluate_server(args: argparse.Namespace) -> Score:
    if excluded := [name for name in _NOT_OF_SERVER if getattr(args, name)]:
        raise EvaluationError(f"--target scores a running server; leave out {_flag(excluded[0])}")
    _check_output(args)
    languages = (args.source_language, args.target_language)
    try:
        options = Options(beam_width=_params(args).beam_width, use_shortlist=args.use_shortlist or None)
        return evaluate_server(args.target, languages, read_client_flags(args), options, _test_set(args), args.output)
    except ServerError as error:
        raise EvaluationError(f"{args.target}: {error}") from None
    except ValueError as error:
        raise EvaluationError(connection_problem(error)) from None


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _check_output(args: argparse.Namespace) -> None:
    if args.output is not None and not args.output.parent.is_dir():
        raise EvaluationError(f"--output is {args.output}, but there is no directory {args.output.parent}")


def _evaluate_texts(args: argparse.Namespace) -> Sequence[TextScore | VectorScore]:
    measured = "--text measures decoder-only and encoder-only models"
    if excluded := [name for name in _NOT_BESIDE_TEXT if getattr(args, name)]:
        raise EvaluationError(f"{measured}; leave out {_flag(excluded[0])}")
    texts, bundle = _read(args.text), load_bundle(args.model)
    if bundle.manifest.model.architecture == "encoder":
        return _evaluate_vectors(args, bundle, texts)
    bundle = _decoder_only(args, measured)
    try:
        return _score_texts(args, bundle, texts, [args.text])
    except NoTextError as error:
        raise EvaluationError(f"{args.text}: {error}") from None


def _evaluate_vectors(args: argparse.Namespace, bundle: Bundle, texts: Sequence[str]) -> list[VectorScore]:
    """Compare the vectors of every other precision with those of float32. Raises EvaluationError."""
    if args.record or args.precision:
        raise EvaluationError("--text compares the vectors of every precision; leave out --record and --precision")
    precisions = _bundle_precisions(bundle)
    if "float32" not in precisions:
        raise EvaluationError(f"{args.model} has no float32 graphs to compare with")

    def open_graphs(precision: Precision) -> EncoderRunner:
        runner = open_runner(bundle, max_rows=args.rows, threads=args.threads, precision=precision)
        assert isinstance(runner, EncoderRunner)
        return runner

    integer_graphs = [open_graphs(precision) for precision in precisions if precision != "float32"]
    return evaluate_vectors(bundle, open_graphs("float32"), integer_graphs, texts)


def _evaluate_running_text(args: argparse.Namespace, recipe: LanguageModelRecipe) -> list[TextScore]:
    """Score a part of a recipe's running text, which is one text, with a bundle or a checkpoint."""
    if args.record and args.part != "test":
        raise EvaluationError(f"--record scores the recipe's test part; leave out --part {args.part}")
    text = read_running_text(recipe.data, args.data)[args.part]
    try:
        if not (args.model / MANIFEST_NAME).is_file():
            return [score_text_in_pytorch(args.model, args.threads, text)]
        bundle = _decoder_only(args, f"recipe {recipe.name!r} has task {recipe.task!r}")
        return _score_texts(args, bundle, [text], [args.data / file.path for file in recipe.data.text])
    except NoTextError as error:
        raise EvaluationError(f"data.split, {args.part} part: {error}") from None


def _decoder_only(args: argparse.Namespace, reason: str) -> Bundle:
    """Open the bundle. Raises EvaluationError, with the reason, unless the model is decoder-only."""
    bundle = load_bundle(args.model)
    if (architecture := bundle.manifest.model.architecture) != "decoder":
        raise EvaluationError(f"{reason}; {args.model} has architecture={architecture!r}")
    return bundle


def _score_texts(args: argparse.Namespace, bundle: Bundle, texts: Sequence[str], files: list[Path]) -> list[TextScore]:
    """Score the asked precisions, and record the scores if asked. Raises NoTextError if no text has two tokens."""

    def score(precision: Precision | None) -> TextScore:
        runner = open_runner(bundle, max_rows=args.rows, threads=args.threads, precision=precision)
        return evaluate_texts(bundle, runner, texts)

    return _recorded(args, bundle, {precision: score(precision) for precision in _precisions(args, bundle)}, files)


def _evaluate_labels(args: argparse.Namespace, recipe: FineTuneRecipe) -> list[LabelScore]:
    bundle = load_bundle(args.model)
    if args.record and args.part != "test":
        raise EvaluationError(f"--record scores the recipe's test files; leave out --part {args.part}")

    def score(precision: Precision | None) -> LabelScore:
        runner = open_runner(bundle, max_rows=args.rows, threads=args.threads, precision=precision)
        if not isinstance(runner, EncoderRunner):
            raise EvaluationError(
                f"recipe {recipe.name!r} has task {recipe.task!r}; {args.model} is not an encoder-only model"
            )
        return evaluate_labels(bundle, runner, recipe, args.data, args.part)

    scores = {precision: score(precision) for precision in _precisions(args, bundle)}
    return _recorded(args, bundle, scores, [args.data / file.path for file in recipe.data.test])


def _precisions(args: argparse.Namespace, bundle: Bundle) -> list[Precision | None]:
    """Return the precisions to score: all of the bundle's with --record, else the given one."""
    if not args.record:
        return [args.precision]
    if args.precision or args.checkpoint or args.output:
        raise EvaluationError("--record scores every precision; leave out --precision, --checkpoint and --output")
    precisions = _bundle_precisions(bundle)
    if "float32" not in precisions:
        raise EvaluationError(
            f"{args.model} has no float32 graphs to compare with; export it also with --precision float32"
        )
    return [*precisions]


def _bundle_precisions(bundle: Bundle) -> list[Precision]:
    """Return the precisions that a processor can run."""
    return list(dict.fromkeys(graphs.precision for graphs in bundle.manifest.graphs if graphs.lowering != "cuda"))


def _recorded(
    args: argparse.Namespace, bundle: Bundle, scores: dict[Precision | None, AnyScore], files: list[Path]
) -> list[AnyScore]:
    """Write the scores into the manifest if --record is given. Return them."""
    if args.record:
        measure, exact = scores["float32"].quality
        record(bundle, measure, {name: score.quality[1] for name, score in scores.items() if name}, exact, files)
    return list(scores.values())


def _test_set(args: argparse.Namespace) -> TestSet:
    if args.recipe and args.data:
        recipe = load_recipe(args.recipe)
        corpus = load_corpus(recipe.data, args.data, args.collection)
        pairs = _first_references(corpus.test if args.part == "test" else corpus.valid)
        return TestSet(pairs=pairs, is_tokenised=recipe.data.preprocess == "moses-lower")
    if args.source and args.reference:
        sources, references = _read(args.source), _read(args.reference)
        if len(sources) != len(references):
            raise EvaluationError(
                f"{args.source} has {len(sources)} lines, {args.reference} has {len(references)}; they must match"
            )
        return TestSet(pairs=list(zip(sources, references, strict=True)), is_tokenised=False)
    raise EvaluationError("give --recipe with --data, or --source with --reference; for a decoder-only model --text")


def _first_references(pairs: Sequence[Pair]) -> list[Pair]:
    """Return each source once, with the first of its references."""
    return list(dict(reversed(pairs)).items())[::-1]


def _read(path: Path) -> list[str]:
    """Return the lines of a file, plain or .gz, without their ends. Raises EvaluationError."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _record(args: argparse.Namespace, test_set: TestSet) -> list[Score]:
    """Score every precision of a bundle and write the scores into the manifest. Nothing is written if one fails."""
    if args.recipe or args.precision or args.output:
        raise EvaluationError("--record scores every precision on --source and --reference; leave out the rest")
    bundle = load_bundle(args.model)
    if bundle.manifest.model.architecture != "encoder-decoder":
        raise EvaluationError(f"{args.model} does not translate; for it --record needs --text, or a --recipe of labels")
    precisions = _bundle_precisions(bundle)
    if "float32" not in precisions and args.checkpoint is None:
        raise EvaluationError(
            f"{args.model} has no float32 graphs to compare with; give the exported checkpoint with --checkpoint"
        )
    options = vars(args)
    scores = [
        _evaluate_bundle(argparse.Namespace(**{**options, "precision": name}), test_set)[0] for name in precisions
    ]
    exact = scores[precisions.index("float32")] if "float32" in precisions else None
    if exact is None:
        exact = evaluate_checkpoint(argparse.Namespace(**{**options, "model": args.checkpoint}), test_set)[0]
        scores.append(exact)
    values = {name: score.bleu for name, score in zip(precisions, scores, strict=False)}
    record(bundle, "bleu", values, exact.bleu, (args.source, args.reference))
    return scores


def _evaluate_bundle(args: argparse.Namespace, test_set: TestSet) -> list[Score]:
    bundle = load_bundle(args.model)
    if (architecture := bundle.manifest.model.architecture) != "encoder-decoder":
        raise EvaluationError(f"{args.model} has architecture={architecture!r}, which does not translate")
    text = bundle.manifest.text
    languages = _languages(text, args)
    limit = bundle.manifest.model.max_source_len
    reader = Reader(open_tokenizer(bundle.path, text), text, limit, languages.ids)
    runner = open_runner(bundle, max_rows=args.rows, threads=args.threads, precision=args.precision)
    params = _params(args, bundle.manifest.generation)

    def decode(sources: Sequence[list[int]]) -> list[list[int]]:
        return asyncio.run(run_engine(runner, sources, params, languages))

    return [score_system(f"antiphon {runner.facts.precision}", decode, reader, test_set, args.output)]


def _params(args: argparse.Namespace, generation: GenerationDefaults = NO_DEFAULTS) -> SamplingParams:
    """Return the parameters of every request, with the model's defaults as in a server. Raises EvaluationError."""
    try:
        params = with_defaults({"beam_width": args.beam_width}, {}, generation).params
    except InvalidArgument as error:
        raise EvaluationError(f"--beam-width is {error.value}; it must be {error.allowed}") from None
    if params.num_rows > args.rows:
        raise EvaluationError(f"--beam-width is {params.num_rows}; it must be at most --rows, {args.rows}")
    return params


def _languages(text: TextFormat, args: argparse.Namespace) -> RequestLanguages:
    try:
        return named_languages(text, args.source_language, args.target_language)
    except InvalidArgument as error:
        flag = f"--{error.field.replace('_', '-')}"
        raise EvaluationError(f"{flag} is {error.value!r}; it must be {error.allowed}") from None


def file_name(paths: Sequence[Path]) -> str:
    """Return the names of the scored files, in order. For translations: sources, then references."""
    *names, last = (path.name for path in paths)
    return f"{', '.join(names)} and {last}" if names else last


def sha256_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (hex) of the concatenated bytes of the files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(
    bundle: Bundle, measure: Measure, scores: Mapping[Precision, float], float32: float, paths: Sequence[Path]
) -> None:
    """Write the score of each precision, atomically. It replaces earlier scores of the same measure and files.

    float32: score of the model whose weights these precisions round. Other entries and all hashes stay unchanged.
    """
    name, sha256 = file_name(paths), sha256_of(paths)
    added = tuple(
        Quality(precision=precision, measure=measure, value=value, float32=float32, file=name, sha256=sha256)
        for precision, value in scores.items()
    )
    kept = tuple(
        entry
        for entry in bundle.manifest.quality
        if entry.measure != measure or entry.sha256 != sha256 or entry.precision not in scores
    )
    write_manifest(bundle.path, bundle.manifest.model_copy(update={"quality": (*kept, *added)}))
