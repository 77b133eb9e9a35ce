"""`antiphon export`: write the bundle of a checkpoint and verify it against the model before it is moved to its path.

Owns the order of the steps and the directory. Other modules trace, quantise, store and verify.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
from tqdm import tqdm

from antiphon.architecture.config import ModelConfig, Part
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import (
    MANIFEST_NAME,
    NAME_PATTERN,
    Bundle,
    CacheType,
    GraphSet,
    Lowering,
    Manifest,
    Precision,
    Provenance,
    file_entry,
    load_bundle,
    write_manifest,
)
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, with_lengths
from antiphon.errors import ExportError, ModelError, VerificationError
from antiphon.export.calibration import TEXTS, find_outliers
from antiphon.export.cuda_lowering import check_config, lower_for_cuda
from antiphon.export.explain import store_packed, trace_explain, verify_explain
from antiphon.export.positions import position_graph, verify_positions
from antiphon.export.trace import trace_decoder, trace_encoder, trace_head
from antiphon.export.verify import Calibration, verify, verify_encoder
from antiphon.export.weights import NO_OUTLIERS, Outliers, WeightsFile, pack_weights
from antiphon.text.tokenizer import encode_sources
from antiphon.transformer.transformer import Transformer

PRECISIONS: tuple[Precision, ...] = ("float32", "int8")  # default of a bundle
CUDA_PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float16", "float32")
ALL_PRECISIONS: tuple[Precision, ...] = (*PRECISIONS, "int4", "bfloat16", "float16")
LOWERINGS: tuple[Lowering, ...] = ("native", "cuda")
POSITIONS_NAME = "positions.onnx"
CACHE_TYPES: tuple[CacheType, ...] = ("float32", "float16")


def export_bundle(
    checkpoint: Checkpoint,
    target: Path,
    *,
    precisions: Sequence[Precision] = PRECISIONS,
    lowerings: Sequence[Lowering] = ("native",),
    cache: CacheType | None = None,
    explain: bool = True,
    name: str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Bundle:
    """Write the bundle of a checkpoint at `target`; it is written completely and verified, or not at all.

    cache: element type of the keys and values of native graphs; None: float16 with integer weights, else float32
    explain: add a graph of attention weights for each precision except int4; never for a model with module_heads
    name: name of the bundle; None: the directory's name
    overwrite: replace a bundle at `target`; any other target that is not empty is always refused
    check: further check of the complete bundle, called with its directory before it is moved to `target`
    Raises ExportError, BundleError, or VerificationError when a float32 graph, or every graph, disagrees with
    the model. Other precisions that disagree are left out with a line on standard error.
    """
    target = target.resolve()
    name = target.name if name is None else name
    _check_lowerings(checkpoint.config, lowerings, precisions)
    check_target(target, name, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        work.chmod(0o755)
        sources = encode_sources(checkpoint.tokenizer, checkpoint.text, TEXTS)
        calibration = Calibration(texts=sources, outliers=_outliers(checkpoint.model, precisions, sources))
        graphs = write_graphs(
            checkpoint.model, work, precisions, lowerings, cache, explain=explain, outliers=calibration.outliers
        )
        graphs = _verified(checkpoint.model, work, graphs, calibration)
        add_metadata(checkpoint, work, graphs, name)
        manifest = load_bundle(work).manifest
        if check is not None:
            check(work)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Bundle(path=target, manifest=manifest)


def _verified(
    model: Transformer, directory: Path, graphs: Sequence[GraphSet], calibration: Calibration
) -> list[GraphSet]:
    """Compare every graph with the model and return the sets that agree, at least one.

    A set that disagrees is left out with a line on standard error, and its files are deleted, if others are left and
    its numbers are rounded. Float32 graphs that disagree are wrong. Raises VerificationError for them, or for the last.
    """
    kept, failures = [], []
    for graph_set in tqdm(graphs, desc="verify", unit="graph set", disable=None):
        try:
            _verify(model, directory, graph_set, calibration)
        except VerificationError as error:
            if graph_set.precision == "float32":
                raise
            failures.append((graph_set, error))
        else:
            kept.append(graph_set)
    if failures and not kept:
        raise failures[0][1]
    if (directory / POSITIONS_NAME).exists():
        verify_positions(directory / POSITIONS_NAME, model)
    for graph_set, reason in failures:
        print(f"note: {graph_set.lowering} {graph_set.precision} is left out: {reason}", file=sys.stderr)
        _delete(directory, graph_set)
    return kept


def _verify(model: Transformer, directory: Path, graphs: GraphSet, calibration: Calibration) -> None:
    """Compare the graphs of a set with the model. Raises VerificationError."""
    if model.config.architecture == "encoder":
        verify_encoder(directory, graphs, model)
    else:
        verify(directory, graphs, model, calibration=calibration if graphs.lowering == "native" else None)
    if graphs.explain is not None:
        verify_explain(directory / graphs.explain, model, graphs.precision)


def _delete(directory: Path, graphs: GraphSet) -> None:
    """Delete the files of a set; its weights stay if the graph of positions reads them."""
    names = [graphs.encoder, graphs.decoder, graphs.explain, *graphs.heads.values()]
    for name in names:
        if name is not None:
            (directory / name).unlink()
    weights, positions = _weights_name(graphs.lowering, graphs.precision), directory / POSITIONS_NAME
    if not positions.exists() or weights.encode() not in positions.read_bytes():
        (directory / weights).unlink()


def check_target(target: Path, name: str, *, overwrite: bool) -> None:
    """Raise ExportError unless a bundle of this name can be written at `target`."""
    if not re.match(NAME_PATTERN, name):
        raise ExportError(f"name={name!r} must match {NAME_PATTERN}; --name gives another name than the directory's")
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} exists and is not a directory")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise ExportError(f"{target} exists and is not empty; --overwrite replaces a bundle")
        if not (target / MANIFEST_NAME).is_file():
            raise ExportError(f"{target} is not a bundle ({MANIFEST_NAME} is missing) and will not be replaced")


def _check_lowerings(config: ModelConfig, lowerings: Sequence[Lowering], precisions: Sequence[Precision]) -> None:
    """Raise ExportError for a model, precision or lowering without graphs, LoweringError for a model no GPU runs.

    Only native graphs have int8 and int4 weights, and only cuda ones bfloat16 and float16. Of other precisions a
    lowering gets those that it has.
    """
    if config.norm == "none" or not config.residual:
        raise ExportError(
            f"norm={config.norm!r}, residual={config.residual} cannot be exported: the operators add the residual and "
            "normalise"
        )
    for precision in precisions:
        if not any(_has_graphs(lowering, precision) for lowering in lowerings):
            raise ExportError(
                f"precision={precision!r} does not fit lowering={lowerings[0]!r}: bfloat16 and float16 are for cuda "
                "graphs, int8 and int4 for native ones"
            )
    for lowering in lowerings:
        if not any(_has_graphs(lowering, precision) for precision in precisions):
            raise ExportError(f"lowering={lowering!r} has no graphs at precision={', '.join(precisions)}")
    if "cuda" in lowerings:
        for precision in precisions:
            if _has_graphs("cuda", precision):
                check_config(config, precision)


def _has_graphs(lowering: Lowering, precision: Precision) -> bool:
    """Return True if an export of this lowering and precision writes graphs."""
    if lowering == "cuda":
        return precision in CUDA_PRECISIONS
    return precision not in ("bfloat16", "float16")


def write_graphs(
    model: Transformer,
    directory: Path,
    precisions: Sequence[Precision],
    lowerings: Sequence[Lowering],
    cache: CacheType | None = None,
    *,
    explain: bool = False,
    outliers: Outliers | None = None,
) -> list[GraphSet]:
    """Trace the model and write its graphs and weights; arguments as for `export_bundle`. Verifies nothing.

    outliers: of the products of integer graphs; None: those that random ids have.
    """
    parts = (*model.config.parts, *(head.task for head in model.config.heads))
    traced = {part: _trace(model, part) for part in tqdm(parts, desc="trace", unit="graph", disable=None)}
    # An explain graph needs weights that a CPU reads, and returns one tensor for layers of equal numbers of heads.
    is_explained = explain and "native" in lowerings and model.config.module_heads is None
    explain_graph = trace_explain(model) if is_explained else None
    positions = position_graph(model)
    if outliers is None:
        outliers = _outliers(model, precisions)
    sets = []
    for precision, lowering in itertools.product(precisions, lowerings):
        if not _has_graphs(lowering, precision):
            continue
        graphs = _graph_set(model.config, lowering, precision, cache)
        with WeightsFile(directory / _weights_name(lowering, precision)) as weights:
            if positions is not None and not (directory / POSITIONS_NAME).exists():
                weights.save(positions, directory / POSITIONS_NAME)
            for part in parts:
                finished = _at_precision(traced[part], part, model.config, graphs, outliers)
                weights.save(finished, directory / _graph_name(part, lowering, precision))
            if explain_graph is not None and lowering == "native" and precision != "int4":
                graphs = graphs.model_copy(update={"explain": f"explain.{precision}.onnx"})
                packed = explain_graph.clone()
                store_packed(packed, precision)
                weights.save(packed, directory / f"explain.{precision}.onnx")
        sets.append(graphs)
    return sets


def _trace(model: Transformer, part: Part | Task) -> ir.Model:
    if part == "encoder":
        return trace_encoder(model)
    return trace_decoder(model) if part == "decoder" else trace_head(model, part)


def _outliers(
    model: Transformer, precisions: Sequence[Precision], sources: Sequence[Sequence[int]] | None = None
) -> Outliers:
    has_integers = any(precision in ("int8", "int4") for precision in precisions)
    return find_outliers(model, sources) if has_integers else NO_OUTLIERS


def _graph_name(part: Part | Task, lowering: Lowering, precision: Precision) -> str:
    return f"{part}.{lowering}.{precision}.onnx"


def _weights_name(lowering: Lowering, precision: Precision) -> str:
    return f"weights.{lowering}.{precision}.bin"


def _graph_set(config: ModelConfig, lowering: Lowering, precision: Precision, cache: CacheType | None) -> GraphSet:
    names = {part: _graph_name(part, lowering, precision) for part in config.parts}
    cache_type: CacheType | None = None
    if lowering == "native" and "decoder" in names:
        cache_type = cache or ("float32" if precision == "float32" else "float16")
    return GraphSet(
        precision=precision,
        lowering=lowering,
        encoder=names.get("encoder"),
        decoder=names.get("decoder"),
        heads={head.task: _graph_name(head.task, lowering, precision) for head in config.heads},
        cache=cache_type,
    )


def _at_precision(
    model: ir.Model, part: Part | Task, config: ModelConfig, graphs: GraphSet, outliers: Outliers
) -> ir.Model:
    """Return a copy of a traced graph at the precision of its set."""
    if graphs.lowering == "cuda":
        return lower_for_cuda(model, config, part, graphs.precision)
    copy = model.clone()
    pack_weights(copy, graphs.precision, outliers)
    if graphs.cache is not None:
        _set_cache_type(copy, graphs.cache)
    return copy


def _set_cache_type(model: ir.Model, cache: CacheType) -> None:
    """Set the element type of the pool; the operators accept both types."""
    pool = next(value for value in model.graph.inputs if value.name == "cache")
    pool.type = ir.TensorType(ir.DataType.FLOAT16 if cache == "float16" else ir.DataType.FLOAT)


def add_metadata(checkpoint: Checkpoint, directory: Path, graphs: Sequence[GraphSet], name: str) -> None:
    """Add the tokenizer, the notice and the manifest to the graphs."""
    for file in checkpoint.text.files:
        shutil.copyfile(checkpoint.text_folder / file, directory / file)
    if checkpoint.provenance is not None:
        (directory / "NOTICE").write_text(_notice(checkpoint.provenance), encoding="utf-8")
    files = {path.name: file_entry(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(
        name=name,
        model=checkpoint.config,
        text=checkpoint.text,
        generation=checkpoint.generation,
        graphs=tuple(graphs),
        positions=POSITIONS_NAME if POSITIONS_NAME in files else None,
        files=files,
        provenance=checkpoint.provenance,
    )
    write_manifest(directory, manifest)


def _notice(provenance: Provenance) -> str:
    origin = "were trained on" if provenance.recipe is not None else "come from"
    return (
        f"The weights in this directory {origin}: {provenance.source}\n"
        f"Licence: {provenance.licence}\n"
        f"{provenance.attribution}\n"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory that `antiphon train` wrote")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="directory to write, for `antiphon serve`")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=ALL_PRECISIONS,
        help="default: float32 int8, and bfloat16 with --lowering cuda; only cuda graphs can be bfloat16 or float16, "
        "and they cannot be int8 or int4",
    )
    parser.add_argument(
        "--lowering",
        nargs="+",
        choices=LOWERINGS,
        default=["native"],
        help="native: for processors (default); cuda: for an NVIDIA GPU",
    )
    parser.add_argument(
        "--cache-type",
        choices=CACHE_TYPES,
        help="type of cached keys and values of native graphs (default: float16 beside integer weights, else float32)",
    )
    parser.add_argument(
        "--no-explain", dest="explain", action="store_false", help="omit the graph that returns attention weights"
    )
    for name in ("source", "target"):
        parser.add_argument(
            f"--max-{name}-len",
            type=int,
            metavar="N",
            help=f"{name} tokens that the bundle takes (default: as trained)",
        )
    parser.add_argument("--name", help="the model's name for clients (default: the bundle directory's name)")
    parser.add_argument("--overwrite", action="store_true", help="replace BUNDLE if it is a bundle")


def chosen_precisions(given: Sequence[Precision] | None, lowerings: Sequence[Lowering]) -> tuple[Precision, ...]:
    """Return the precisions of --precision, each once, or the default ones of the lowerings."""
    if given is not None:
        return tuple(dict.fromkeys(given))
    defaults = PRECISIONS if "native" in lowerings else ()
    return (*defaults, "bfloat16") if "cuda" in lowerings else defaults


def run(args: argparse.Namespace) -> int:
    """Export; return 0 when the bundle is written, or 2 after one line on standard error when it cannot be."""
    try:
        lowerings = tuple(name for name in LOWERINGS if name in args.lowering)  # each once, in this order
        checkpoint = with_lengths(
            load_checkpoint(args.checkpoint), max_source_len=args.max_source_len, max_target_len=args.max_target_len
        )
        bundle = export_bundle(
            checkpoint,
            args.bundle,
            precisions=chosen_precisions(args.precision, lowerings),
            lowerings=lowerings,
            cache=args.cache_type,
            explain=args.explain,
            name=args.name,
            overwrite=args.overwrite,
        )
    except (ModelError, OSError) as error:
        print(f"antiphon export: {error}", file=sys.stderr)
        return 2
    size = sum(entry.size for entry in bundle.manifest.files.values())
    described = ", ".join(f"{graphs.lowering} {graphs.precision}" for graphs in bundle.manifest.graphs)
    print(f"{bundle.path}: {described}; {size / 1e6:.1f} MB, verified against the checkpoint")
    return 0
