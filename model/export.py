"""`antiphon export`: a checkpoint becomes a bundle, verified against the model before it appears.

Owns the order of work and the directory. Tracing, quantisation, storage and verification are modules of their own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from tqdm import tqdm

from antiphon.model.bundle import (
    MANIFEST_NAME,
    NAME_PATTERN,
    Bundle,
    BundleError,
    GraphSet,
    Lowering,
    Manifest,
    Precision,
    Provenance,
    file_entry,
    load_bundle,
    write_manifest,
)
from antiphon.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from antiphon.model.ops.contrib_lowering import LoweringError
from antiphon.model.quantize import quantize
from antiphon.model.tokenizer import TokenizerError
from antiphon.model.trace import trace_decoder, trace_encoder
from antiphon.model.transformer import Transformer
from antiphon.model.verify import VerificationError, verify
from antiphon.model.weights_file import WeightsFile

PRECISIONS: tuple[Precision, ...] = ("float32", "int8")


class ExportError(Exception):
    """A checkpoint cannot be exported; the message names what is in the way."""


def export_bundle(
    checkpoint: Checkpoint,
    target: Path,
    *,
    precisions: Sequence[Precision] = PRECISIONS,
    lowerings: Sequence[Lowering] = ("contrib",),
    name: str | None = None,
    overwrite: bool = False,
) -> Bundle:
    """Write the bundle of a checkpoint at `target`, whole and verified or not at all.

    name defaults to the directory's. A target that is not empty is refused; with `overwrite`, unless it is a bundle.
    Raises ExportError, BundleError, or VerificationError when a graph disagrees with the model.
    """
    target = target.resolve()
    name = target.name if name is None else name
    _check(checkpoint, target, name, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        work.chmod(0o755)
        graphs = _write_graphs(checkpoint.model, work, precisions, lowerings)
        for graph_set in tqdm(graphs, desc="verify", unit="graph set", disable=None):
            verify(work, graph_set, checkpoint.model)
        _describe(checkpoint, work, graphs, name)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return load_bundle(target)


def _check(checkpoint: Checkpoint, target: Path, name: str, *, overwrite: bool) -> None:
    if checkpoint.config.architecture != "encoder-decoder":
        raise ExportError(f"architecture={checkpoint.config.architecture!r} cannot be exported yet")
    if not re.match(NAME_PATTERN, name):
        raise ExportError(f"name={name!r} must match {NAME_PATTERN}; --name chooses another than the directory's")
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} exists and is not a directory")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise ExportError(f"{target} exists and is not empty; --overwrite replaces a bundle")
        if not (target / MANIFEST_NAME).is_file():
            raise ExportError(f"{target} is not a bundle ({MANIFEST_NAME} is missing) and will not be replaced")


def _write_graphs(
    model: Transformer, directory: Path, precisions: Sequence[Precision], lowerings: Sequence[Lowering]
) -> list[GraphSet]:
    traced = {
        (lowering, part): trace(model, lowering)
        for lowering in tqdm(lowerings, desc="trace", unit="lowering", disable=None)
        for part, trace in (("encoder", trace_encoder), ("decoder", trace_decoder))
    }
    sets = []
    for precision in precisions:
        with WeightsFile(directory / f"weights.{precision}.bin") as weights:
            for lowering in lowerings:
                names = {part: f"{part}.{lowering}.{precision}.onnx" for part in ("encoder", "decoder")}
                for part, file_name in names.items():
                    weights.save(_at_precision(traced[lowering, part], precision), directory / file_name)
                sets.append(GraphSet(precision=precision, lowering=lowering, **names))
    return sets


def _at_precision(model: ir.Model, precision: Precision) -> ir.Model:
    copy = model.clone()
    if precision == "int8":
        quantize(copy)
    return copy


def _describe(checkpoint: Checkpoint, directory: Path, graphs: Sequence[GraphSet], name: str) -> None:
    """Add the tokenizer, the notice and the manifest to the graphs."""
    shutil.copyfile(checkpoint.tokenizer_path, directory / "tokenizer.json")
    if checkpoint.provenance is not None:
        (directory / "NOTICE").write_text(_notice(checkpoint.provenance), encoding="utf-8")
    files = {path.name: file_entry(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(
        name=name, model=checkpoint.config, graphs=tuple(graphs), files=files, provenance=checkpoint.provenance
    )
    write_manifest(directory, manifest)


def _notice(provenance: Provenance) -> str:
    return (
        f"The weights in this directory were trained on: {provenance.source}\n"
        f"Licence of that data: {provenance.licence}\n"
        f"{provenance.attribution}\n"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory that `antiphon train` wrote")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="directory to write, for `antiphon serve`")
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: every one"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="add graphs with the score matrix in plain sight, the baseline that `antiphon profile` measures against",
    )
    parser.add_argument("--name", help="the model's name for clients (default: the bundle directory's name)")
    parser.add_argument("--overwrite", action="store_true", help="replace BUNDLE if it is one already")


def run(args: argparse.Namespace) -> int:
    """Export; 0 when the bundle is written, 2 with one line on standard error when it cannot be."""
    try:
        bundle = export_bundle(
            load_checkpoint(args.checkpoint),
            args.bundle,
            precisions=tuple(dict.fromkeys(args.precision)),
            lowerings=("contrib", "eager") if args.eager else ("contrib",),
            name=args.name,
            overwrite=args.overwrite,
        )
    except (
        ExportError,
        CheckpointError,
        TokenizerError,
        BundleError,
        LoweringError,
        VerificationError,
        OSError,
    ) as error:
        print(f"antiphon export: {error}", file=sys.stderr)
        return 2
    size = sum(entry.size for entry in bundle.manifest.files.values())
    held = ", ".join(f"{graphs.lowering} {graphs.precision}" for graphs in bundle.manifest.graphs)
    print(f"{bundle.path}: {held}; {size / 1e6:.1f} MB, verified against the checkpoint")
    return 0
