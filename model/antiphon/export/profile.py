"""`antiphon profile`: measure the working memory of a bundle's encoder graphs over a grid, and fit it.

Beside them it measures an encoder of the same shape that stores its score matrices, whose memory grows with T^2.
Owns the grid, the manifest's memory profile and the table. The counting allocator (ops/workspace.py) measures exactly,
so one run of each point is enough. A random model of a preset replaces the bundle for sources that are too long for any
bundle. Does not know the serving code that reads the fit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.graph import Graph
from antiphon.bundle.machine import available_bytes, processor_name
from antiphon.bundle.manifest import (
    Bundle,
    CacheType,
    Manifest,
    MemoryFit,
    MemoryProfile,
    load_bundle,
    write_manifest,
)
from antiphon.bundle.memory_fit import MIN_LENGTHS, Measurement, fit_memory
from antiphon.bundle.onnx_runtime import ort
from antiphon.errors import GraphError, ModelError
from antiphon.ops.cache_geometry import blocks_for, pool_axes
from antiphon.ops.workspace import Workspace
from antiphon.text.format import TextFormat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_ROWS = (1, 4, 16)
RANDOM_LONGEST = 4096
_SHORTEST = 16
_MIB = 1 << 20
# Name of the encoder that is measured for comparison.
EAGER = "eager-float32"


class ProfileError(ModelError):
    """The profile cannot be made with these options; the message names the option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Source lengths and numbers of rows, of which every pair is measured, and the memory limit of one run."""

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    threads: int
    budget_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `antiphon profile`."""
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "bundle", type=Path, metavar="BUNDLE", nargs="?", help="directory written by `antiphon export`"
    )
    subject.add_argument(
        "--random",
        metavar="PRESET",
        help=f"measure a random model of this size (base, big, tiny), up to {RANDOM_LONGEST} tokens",
    )
    parser.add_argument(
        "--lengths", metavar="N,N,...", help="source lengths in tokens (default: powers of two up to the model's limit)"
    )
    parser.add_argument(
        "--rows",
        metavar="N,N,...",
        help=f"numbers of rows (default: {','.join(map(str, DEFAULT_ROWS))}; 1 for a random model)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG to write (default: BUNDLE.memory.png beside BUNDLE)"
    )


def run(args: argparse.Namespace) -> int:
    """Run `antiphon profile` and return the exit code."""
    from matplotlib.figure import Figure  # first, so that a missing matplotlib costs no measurement

    try:
        with _subject(args) as bundle:
            plot = _plot_path(args, bundle)
            grid = _grid(args, bundle)
            measurements = measure_bundle(bundle, grid)
            fits = {name: fit_memory(points, packed=name.startswith("native")) for name, points in measurements.items()}
            if args.bundle:
                memory = MemoryProfile(
                    fits={name: fit for name, fit in fits.items() if name != EAGER},
                    machine=f"{processor_name()}, {grid.threads} threads, onnxruntime {ort.__version__}",
                )
                write_manifest(bundle.path, bundle.manifest.model_copy(update={"memory": memory}))
        plot_memory(
            Figure(figsize=(7, 5), layout="constrained"),
            plot,
            measurements,
            fits,
            num_heads=bundle.manifest.model.num_heads,
            title=f"{bundle.manifest.name} encoder",
        )
    except (ModelError, OSError) as error:
        print(f"antiphon profile: {error}", file=sys.stderr)
        return 2
    _print_table(measurements, fits)
    print(f"written: {bundle.path / 'manifest.json'}, {plot}" if args.bundle else f"written: {plot}")
    return 0


@contextmanager
def _subject(args: argparse.Namespace) -> Iterator[Bundle]:
    """Yield the bundle that the flags name, or graphs of a random model that exist during the measurement only."""
    if args.bundle:
        bundle = load_bundle(args.bundle)
        if bundle.manifest.model.architecture == "decoder":
            raise ProfileError(f"{args.bundle} is decoder-only; only encoders are measured")
        yield bundle
        return
    from antiphon.export.export import write_graphs
    from antiphon.transformer.random_model import random_transformer

    longest = max(_numbers("--lengths", args.lengths)) if args.lengths else RANDOM_LONGEST
    try:
        model = random_transformer(preset(args.random, vocab_size=512, max_source_len=longest))
    except ValueError as error:
        raise ProfileError(f"--random: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        graphs = write_graphs(model, Path(folder), ("float32",), ("native",))
        manifest = Manifest(
            name=f"random-{args.random}",
            model=model.config,
            text=TextFormat(template=("$text",)),
            graphs=tuple(graphs),
            files={},
        )
        yield Bundle(path=Path(folder), manifest=manifest)


def measure_bundle(bundle: Bundle, grid: Grid) -> dict[str, list[Measurement]]:
    """Measure the encoder of every graph set of the bundle that runs on a CPU, and EAGER of the same shape.

    Keys are `<lowering>-<precision>`. A run that exceeds the grid's budget is reported on standard error and left out.
    Raises GraphError, WorkspaceError, or ProfileError when too little of the grid fits in the budget.
    """
    config = bundle.manifest.model
    names = {
        f"{graphs.lowering}-{graphs.precision}": (bundle.file(graphs.encoder_file), graphs.cache)
        for graphs in bundle.manifest.graphs
        if graphs.lowering != "cuda"
    }
    workspace = Workspace(threads=grid.threads)
    try:
        measured = {}
        for name, (path, cache) in sorted(names.items()):
            inputs = partial(encoder_inputs, config, cache)
            measured[name] = _measure_graph(path, name, inputs, grid, workspace)
        with tempfile.TemporaryDirectory() as folder:
            path = write_eager_encoder(config, Path(folder))
            eager = _measure_graph(path, EAGER, partial(eager_inputs, config), grid, workspace)
        return {EAGER: eager} | measured
    finally:
        workspace.limit_growth(None)


def write_eager_encoder(config: ModelConfig, folder: Path) -> Path:
    """Write the graph of a random float32 encoder of this shape that stores its score matrices, and return its path.

    Its memory grows with T^2. It shows what the served graphs save, and is measured only here. The working memory does
    not depend on the weights.
    """
    import torch

    from antiphon.export.trace import OPSET, quiet_exporter
    from antiphon.transformer.random_model import random_transformer

    encoder = random_transformer(config).encoder
    assert encoder is not None
    path = folder / "encoder.eager.onnx"
    with quiet_exporter(), torch.no_grad():
        torch.onnx.export(
            encoder,
            (torch.zeros(3, min(7, config.max_source_len), dtype=torch.int64), None),
            path,
            dynamo=True,
            input_names=["input_ids"],
            output_names=["memory"],
            dynamic_shapes=({0: "batch", 1: "source"}, None),
            opset_version=OPSET,
            verbose=False,
        )
    return path


def _measure_graph(
    path: Path,
    name: str,
    inputs_of: Callable[[int, int], Mapping[str, NDArray[Any]]],
    grid: Grid,
    workspace: Workspace,
) -> list[Measurement]:
    workspace.limit_growth(None)
    encoder = Graph(path, "encoder", workspace)
    workspace.limit_growth(grid.budget_bytes)
    measured = []
    cells = [(rows, length) for rows in grid.rows for length in grid.lengths]
    for rows, length in tqdm(cells, desc=name, unit="run", leave=False, disable=None):
        refusals = workspace.stats().refusals
        try:
            peak = measure_peak(encoder, workspace, inputs_of(rows, length))
        except GraphError:
            if workspace.stats().refusals == refusals:
                raise
            _report(f"{name}: {rows} x {length} tokens needs over {grid.budget_bytes / _MIB:.0f} MiB; left out")
        else:
            measured.append(Measurement(rows=rows, length=length, peak_bytes=peak))
    if len({m.length for m in measured if m.rows == grid.rows[0]}) < MIN_LENGTHS:
        raise ProfileError(f"--lengths: fewer than {MIN_LENGTHS} fit in memory for {name}; give shorter ones")
    return measured


def measure_peak(encoder: Graph, workspace: Workspace, inputs: Mapping[str, NDArray[Any]]) -> int:
    """Return the peak workspace in bytes of one encoder run, with outputs, without inputs and weights.

    Raises GraphError.
    """
    before = workspace.reset_peak()
    encoder.run(inputs, encoder.output_names)
    return workspace.peak() - before


def eager_inputs(config: ModelConfig, rows: int, length: int) -> dict[str, NDArray[Any]]:
    """Return `rows` sources of `length` tokens as inputs of EAGER."""
    return {"input_ids": np.full((rows, length), config.eos_id, np.int64)}


def encoder_inputs(config: ModelConfig, cache: CacheType | None, rows: int, length: int) -> dict[str, NDArray[Any]]:
    """Return `rows` sources of `length` tokens as inputs of an encoder graph of this cache type."""
    packed: dict[str, NDArray[Any]] = {
        "input_ids": np.full(rows * length, config.eos_id, np.int64),
        "positions": np.tile(np.arange(length, dtype=np.int32), rows),
        "offsets": np.arange(rows + 1, dtype=np.int32) * length,
    }
    if config.architecture == "encoder":
        return packed | ({"type_ids": np.zeros(rows * length, np.int64)} if config.token_types else {})
    blocks = blocks_for(length)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    return packed | {"block_tables": tables, "cache": np.zeros((rows * blocks, *pool_axes(config)), cache)}


def _plot_path(args: argparse.Namespace, bundle: Bundle) -> Path:
    directory = bundle.path.resolve() if args.bundle else Path(bundle.manifest.name).resolve()
    plot: Path = args.plot or directory.with_name(f"{directory.name}.memory.png")
    if not plot.parent.is_dir():
        raise ProfileError(f"--plot is {plot}, but there is no directory {plot.parent}")
    return plot


def _grid(args: argparse.Namespace, bundle: Bundle) -> Grid:
    limit = bundle.manifest.model.max_source_len
    lengths = _numbers("--lengths", args.lengths) if args.lengths else _default_lengths(limit)
    rows = _numbers("--rows", args.rows) if args.rows else (DEFAULT_ROWS if args.bundle else DEFAULT_ROWS[:1])
    threads = len(os.sched_getaffinity(0)) if args.threads is None else args.threads
    if threads < 1:
        raise ProfileError(f"--threads is {threads}; it must be at least 1")
    if lengths[-1] > limit:
        raise ProfileError(f"--lengths has {lengths[-1]}; the model supports sources of up to {limit} tokens")
    if len(lengths) < MIN_LENGTHS:
        raise ProfileError(f"--lengths has {len(lengths)} different lengths; a fit needs {MIN_LENGTHS}")
    return Grid(lengths=lengths, rows=rows, threads=threads, budget_bytes=available_bytes() // 2)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ProfileError(f"{option} is {text!r}; it must be whole numbers joined by commas") from None
    if numbers[0] < 1:
        raise ProfileError(f"{option} has {numbers[0]}; each must be at least 1")
    return tuple(numbers)


def _default_lengths(limit: int) -> tuple[int, ...]:
    shortest = min(_SHORTEST, max(1, limit // 4))
    powers = [shortest << k for k in range(limit.bit_length()) if shortest << k < limit]
    return (*powers, limit)


def _report(message: str) -> None:
    print(f"antiphon profile: {message}", file=sys.stderr)


def _print_table(measurements: dict[str, list[Measurement]], fits: dict[str, MemoryFit]) -> None:
    lengths = sorted({m.length for points in measurements.values() for m in points})
    print("peak workspace of the encoder, MiB, by source length T; fitted: a + B * (b * T + c * T^2) bytes of B rows")
    head = "".join(f"{length:>9}" for length in lengths)
    print(f"{'graphs':<18}{'rows':>5}{head}{'exponent':>10}{'b':>9}{'c':>7}{'residual':>10}")
    for name, points in measurements.items():
        fit = fits[name]
        for rows in sorted({m.rows for m in points}):
            peaks = {m.length: f"{m.peak_bytes / _MIB:.2f}" for m in points if m.rows == rows}
            cells = "".join(f"{peaks.get(length, '-'):>9}" for length in lengths)
            fitted = f"{fit.exponent:>10.2f}{fit.b:>9.0f}{fit.c:>7.1f}{fit.residual:>10.1%}"
            print(f"{name:<18}{rows:>5}{cells}{fitted}")


def plot_memory(
    figure: Figure,
    path: Path,
    measurements: Mapping[str, Sequence[Measurement]],
    fits: Mapping[str, MemoryFit],
    *,
    num_heads: int,
    title: str,
) -> None:
    """Write one log-log panel at the largest number of rows; the dashed line is one layer's float32 score matrix."""
    axes = figure.subplots()
    rows = max(m.rows for measured in measurements.values() for m in measured)
    lengths = np.array(sorted({m.length for measured in measurements.values() for m in measured}))
    for name, measured in measurements.items():
        shown = [m for m in measured if m.rows == rows]
        points = axes.plot([m.length for m in shown], [m.peak_bytes / _MIB for m in shown], "o")
        curve = [fits[name].predict(rows, int(length)) / _MIB for length in lengths]
        label = f"{name}: T^{fits[name].exponent:.2f}"
        axes.plot(lengths, curve, color=points[0].get_color(), label=label)
    scores = rows * num_heads * lengths.astype(float) ** 2 * 4 / _MIB
    axes.plot(lengths, scores, "k--", linewidth=1, label="score matrix of one layer")
    axes.set(
        xscale="log", yscale="log", xlabel="source length T, tokens", ylabel=f"peak workspace, MiB, {rows} rows",
        title=title,
    )  # fmt: skip
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
