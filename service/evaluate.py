"""`antiphon evaluate`: translate a test set with a bundle's engine, or a checkpoint in PyTorch, and score it.

The bundle runs through the same engine as in the server, without the network. torch is imported for checkpoints only.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from tqdm import tqdm

from antiphon.model.bundle import MANIFEST_NAME, BundleError, load_bundle
from antiphon.model.corpus import Pair, load_corpus
from antiphon.model.graph import GraphError
from antiphon.model.ops.workspace import WorkspaceError
from antiphon.model.recipe import FineTuneRecipe, RecipeError, load_any_recipe, load_recipe
from antiphon.model.text_format import TextFormat
from antiphon.model.text_template import LanguageIds
from antiphon.model.tokenizer import Tokenizer, TokenizerError, encode_sources, open_tokenizer
from antiphon.service.encoder_runner import EncoderRunner
from antiphon.service.engine import Engine, EngineConfig
from antiphon.service.errors import InvalidArgument
from antiphon.service.evaluate_labels import evaluate_labels
from antiphon.service.languages import RequestLanguages, named_languages
from antiphon.service.metric_families import MetricFamilies
from antiphon.service.metrics import Metrics
from antiphon.service.quality import record_bleu
from antiphon.service.request import Request, SamplingParams
from antiphon.service.runner import Runner
from antiphon.service.runners import open_runner
from antiphon.service.stream import OutputStream

Decode = Callable[[Sequence[list[int]]], list[list[int]]]

_NO_LANGUAGES = RequestLanguages()


class EvaluationError(Exception):
    """The evaluation cannot run; the message names the argument or file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One system on one test set. bleu and chrf are sacreBLEU's; tokens_per_s counts target tokens."""

    system: str
    bleu: float
    chrf: float
    sentences: int
    too_long: int
    seconds: float
    tokens_per_s: float
    bleu_signature: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSet:
    """Sources with their references. is_tokenised: the text is tokenised already, so scoring must not do it again."""

    pairs: list[Pair]
    is_tokenised: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """How one model's texts become ids and back; languages None: its default ones."""

    tokenizer: Tokenizer
    text: TextFormat
    max_source_len: int
    languages: LanguageIds | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `antiphon evaluate`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a bundle, or a checkpoint to run in PyTorch")
    parser.add_argument("--recipe", help="score the held-out part of this recipe's data (with --data)")
    parser.add_argument("--data", type=Path, help="folder that holds the files the recipe names")
    parser.add_argument("--part", choices=("test", "valid"), default="test", help="part of the recipe's data")
    parser.add_argument("--source", type=Path, help="or: a file of sources, one a line, plain or .gz")
    parser.add_argument("--reference", type=Path, help="and its references, line by line")
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-language", default="", metavar="CODE", help="of a bundle of several (default: the model's)"
        )
    parser.add_argument(
        "--precision", choices=("float32", "int8", "int4"), help="graphs of the bundle (default: int8 if held)"
    )
    parser.add_argument(
        "--lowering", choices=("native", "contrib"), help="operators of the graphs (default: native if held)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rows", type=int, default=32, help="sentences that run together")
    parser.add_argument("--ctranslate2", action="store_true", help="for a checkpoint: also CTranslate2, same weights")
    parser.add_argument(
        "--record", action="store_true", help="score every precision of a bundle, and write the BLEU into its manifest"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="with --record: what the bundle was exported from, if it has no float32 graphs"
    )
    parser.add_argument("--output", type=Path, help="write the translations here, one a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object a system instead of a table")


def run(args: argparse.Namespace) -> int:
    """Entry point of `antiphon evaluate`; returns the exit code."""
    try:
        for option in ("threads", "rows"):
            if getattr(args, option) < 1:
                raise EvaluationError(f"--{option} is {getattr(args, option)}; it must be at least 1")
        if recipe := _labelling_recipe(args):
            return _evaluate_labels(args, recipe)
        test_set = _test_set(args)
        is_bundle = (args.model / MANIFEST_NAME).is_file()
        if is_bundle and args.ctranslate2:
            raise EvaluationError("--ctranslate2 compares a checkpoint's weights; give the checkpoint, not a bundle")
        if args.output is not None and not args.output.parent.is_dir():
            raise EvaluationError(f"--output is {args.output}, but there is no directory {args.output.parent}")
        if args.record:
            scores = _record(args, test_set)
        else:
            scores = _evaluate_bundle(args, test_set) if is_bundle else _evaluate_checkpoint(args, test_set)
    except (EvaluationError, RecipeError, BundleError, TokenizerError, GraphError, WorkspaceError, OSError) as error:
        print(f"antiphon evaluate: {error}", file=sys.stderr)
        return 2
    for score in scores:
        print(json.dumps(asdict(score)) if args.json else _row(score))
    return 0


def _labelling_recipe(args: argparse.Namespace) -> FineTuneRecipe | None:
    """The recipe, if it is one of labels and not of translations."""
    recipe = load_any_recipe(args.recipe) if args.recipe and args.data else None
    return recipe if isinstance(recipe, FineTuneRecipe) else None


def _evaluate_labels(args: argparse.Namespace, recipe: FineTuneRecipe) -> int:
    bundle = load_bundle(args.model)
    runner = open_runner(bundle, max_rows=args.rows, threads=args.threads, precision=args.precision)
    if not isinstance(runner, EncoderRunner):
        raise EvaluationError(f"recipe {recipe.name!r} has task {recipe.task!r}; {args.model} is no encoder alone")
    score = evaluate_labels(bundle, runner, recipe, args.data, args.part)
    print(json.dumps(asdict(score)) if args.json else score.row)
    return 0


def _row(score: Score) -> str:
    left_out = f", {score.too_long} too long" if score.too_long else ""
    return (
        f"{score.system:<24} BLEU {score.bleu:5.2f}  chrF {score.chrf:5.2f}  {score.sentences} sentences{left_out}  "
        f"{score.tokens_per_s:,.0f} tokens/s  {score.bleu_signature}"
    )


def _test_set(args: argparse.Namespace) -> TestSet:
    if args.recipe and args.data:
        recipe = load_recipe(args.recipe)
        corpus = load_corpus(recipe.data, args.data)
        pairs = _first_references(corpus.test if args.part == "test" else corpus.valid)
        return TestSet(pairs=pairs, is_tokenised=recipe.data.preprocess == "moses-lower")
    if args.source and args.reference:
        sources, references = _read(args.source), _read(args.reference)
        if len(sources) != len(references):
            raise EvaluationError(
                f"{args.source} has {len(sources)} lines, {args.reference} has {len(references)}; they must match"
            )
        return TestSet(pairs=list(zip(sources, references, strict=True)), is_tokenised=False)
    raise EvaluationError("give --recipe with --data, or --source with --reference")


def _first_references(pairs: Sequence[Pair]) -> list[Pair]:
    """Each source once, with the first of its references."""
    return list(dict(reversed(pairs)).items())[::-1]


def _read(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from None
    return text.removesuffix("\n").split("\n")


def _record(args: argparse.Namespace, test_set: TestSet) -> list[Score]:
    """Score every precision of a bundle and write what it scores into the manifest. Nothing is written if one fails."""
    if args.recipe or args.precision or args.output:
        raise EvaluationError("--record scores every precision on --source and --reference; leave out the rest")
    bundle = load_bundle(args.model)
    if bundle.manifest.model.architecture != "encoder-decoder":
        raise EvaluationError(f"--record scores translations; {args.model} is {bundle.manifest.model.architecture!r}")
    precisions = list(dict.fromkeys(graphs.precision for graphs in bundle.manifest.graphs))
    if "float32" not in precisions and args.checkpoint is None:
        raise EvaluationError(
            f"{args.model} has no float32 graphs to compare with; --checkpoint names what it was exported from"
        )
    options = vars(args)
    scores = [
        _evaluate_bundle(argparse.Namespace(**{**options, "precision": name}), test_set)[0] for name in precisions
    ]
    exact = scores[precisions.index("float32")] if "float32" in precisions else None
    if exact is None:
        exact = _evaluate_checkpoint(argparse.Namespace(**{**options, "model": args.checkpoint}), test_set)[0]
        scores.append(exact)
    found = {name: score.bleu for name, score in zip(precisions, scores, strict=False)}
    record_bleu(bundle, found, exact.bleu, (args.source, args.reference))
    return scores


def _evaluate_bundle(args: argparse.Namespace, test_set: TestSet) -> list[Score]:
    bundle = load_bundle(args.model)
    if (architecture := bundle.manifest.model.architecture) != "encoder-decoder":
        raise EvaluationError(f"{args.model} is a model with architecture={architecture!r}, which translates nothing")
    text = bundle.manifest.text
    languages = _languages(text, args)
    limit = bundle.manifest.model.max_source_len
    reader = Reader(open_tokenizer(bundle.path, text), text, limit, languages.ids)
    runner = open_runner(
        bundle, max_rows=args.rows, threads=args.threads, precision=args.precision, lowering=args.lowering
    )

    def decode(sources: Sequence[list[int]]) -> list[list[int]]:
        return asyncio.run(run_engine(runner, sources, languages))

    return [_score(f"antiphon {runner.precision}", decode, reader, test_set, args.output)]


def _languages(text: TextFormat, args: argparse.Namespace) -> RequestLanguages:
    try:
        return named_languages(text, args.source_language, args.target_language)
    except InvalidArgument as error:
        flag = f"--{error.field.replace('_', '-')}"
        raise EvaluationError(f"{flag} is {error.value!r}; it must be {error.allowed}") from None


async def run_engine(
    runner: Runner, sources: Sequence[list[int]], languages: RequestLanguages = _NO_LANGUAGES
) -> list[list[int]]:
    """Greedy target ids of sources as the model reads them, in their order, all asked for at once."""
    tokens = sum(len(source) for source in sources)
    config = EngineConfig(max_queued_requests=len(sources) + 1, max_queued_tokens=tokens + 1)
    engine = Engine(runner, config, Metrics(MetricFamilies(CollectorRegistry()), "offline"))
    engine.start()
    try:
        streams = []
        for index, source in enumerate(sources):
            stream = OutputStream(str(index))
            request = Request(
                request_id=str(index),
                source_ids=tuple(source),
                begin_id=languages.begin_id,
                params=languages.params(SamplingParams(), ()),
                arrival_s=engine.clock(),
            )
            engine.submit(request, stream)
            streams.append(stream)
        return [list((await stream.collect())[0].token_ids) for stream in tqdm(streams, unit="sentence", disable=None)]
    finally:
        await asyncio.to_thread(engine.stop)


def _evaluate_checkpoint(args: argparse.Namespace, test_set: TestSet) -> list[Score]:
    import torch

    from antiphon.model.checkpoint import CheckpointError, load_checkpoint
    from antiphon.model.greedy import greedy

    torch.set_num_threads(args.threads)
    try:
        checkpoint = load_checkpoint(args.model)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None
    reader = Reader(checkpoint.tokenizer, checkpoint.text, checkpoint.config.max_source_len)

    def decode(sources: Sequence[list[int]]) -> list[list[int]]:
        max_new_tokens = checkpoint.config.max_target_len
        return _in_batches(sources, args.rows, lambda part: greedy(checkpoint.model, part, max_new_tokens))

    systems: list[tuple[str, Decode]] = [("pytorch float32", decode)]
    with TemporaryDirectory() as folder:
        if args.ctranslate2:
            systems += _twins(checkpoint, Path(folder), args)
        return [
            _score(name, system, reader, test_set, args.output if index == 0 else None)
            for index, (name, system) in enumerate(systems)
        ]


def _twins(checkpoint: object, folder: Path, args: argparse.Namespace) -> list[tuple[str, Decode]]:
    try:
        import ctranslate2
    except ModuleNotFoundError:
        raise EvaluationError("--ctranslate2: it is not installed; run: pip install ctranslate2") from None

    from antiphon.model.checkpoint import Checkpoint, CheckpointError
    from antiphon.model.ctranslate2_twin import save_twin, translate

    assert isinstance(checkpoint, Checkpoint)
    try:
        save_twin(checkpoint, folder)
    except CheckpointError as error:
        raise EvaluationError(f"--ctranslate2: {error}") from None

    def system(compute_type: str) -> Decode:
        translator = ctranslate2.Translator(str(folder), compute_type=compute_type, intra_threads=args.threads)
        limit = checkpoint.config.max_target_len
        return lambda sources: translate(translator, sources, max_batch_size=args.rows, max_decoding_length=limit)

    return [(f"ctranslate2 {name}", system(name)) for name in ("float32", "int8")]


def _in_batches(sources: Sequence[list[int]], rows: int, decode: Decode) -> list[list[int]]:
    """Decode in batches of neighbours in length; results in the order of the sources."""
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    results: dict[int, list[int]] = {}
    for start in tqdm(range(0, len(order), rows), unit="batch", disable=None):
        part = order[start : start + rows]
        results.update(zip(part, decode([sources[index] for index in part]), strict=True))
    return [results[index] for index in range(len(sources))]


def _score(system: str, decode: Decode, reader: Reader, test_set: TestSet, output: Path | None) -> Score:
    texts = [source for source, _ in test_set.pairs]
    encoded = encode_sources(reader.tokenizer, reader.text, texts, reader.languages)
    # A source the model cannot take counts as an empty translation: leaving it out would flatter the score.
    fitting = [index for index, ids in enumerate(encoded) if 0 < len(ids) <= reader.max_source_len]
    started = time.perf_counter()
    targets = decode([encoded[index] for index in fitting])
    seconds = time.perf_counter() - started
    hypotheses = [""] * len(encoded)
    for index, ids in zip(fitting, targets, strict=True):
        hypotheses[index] = reader.tokenizer.decode(ids)
    if output is not None:
        output.write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    references = [[reference for _, reference in test_set.pairs]]
    bleu = BLEU(tokenize="none" if test_set.is_tokenised else "13a", force=test_set.is_tokenised)
    result = bleu.corpus_score(hypotheses, references)
    return Score(
        system=system,
        bleu=round(result.score, 2),
        chrf=round(CHRF().corpus_score(hypotheses, references).score, 2),
        sentences=len(hypotheses),
        too_long=len(encoded) - len(fitting),
        seconds=round(seconds, 2),
        tokens_per_s=round(sum(len(ids) + 1 for ids in targets) / seconds, 1),
        bleu_signature=str(bleu.get_signature()),
    )
