"""`antiphon explain`: attention of a served model, as tables and as a plot. A client; loads no model.

Uses the attention maps that the server sends, in plain Python: a client installation has no NumPy. The alignment is the
cross-attention, so only encoder-decoder models have one.

Axes: S source pieces, T decoder queries. Query t has read target pieces 0 to t, the begin token first, and predicts the
next one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import grpc

from antiphon.cli.common import CommandError, report_error, write_problem, write_utf8
from antiphon.cli.connection_flags import (
    add_call_flags,
    add_connection_flags,
    add_model_flags,
    connection_problem,
    read_client_flags,
    server_problem,
)
from antiphon.client import Client, ServerError
from antiphon.v1 import inference_pb2 as pb

# Prediction of the last query; it is not a piece of the target.
END = "(end)"
WORD_BEGINS = "\u2581"

# Size of a plot's cell, of the labels at the axes, and maximum size of the figure, in inches.
_CELL, _MARGIN, _LONGEST = 0.32, 2.0, 60.0

Matrix = list[list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon explain`."""
    parser.add_argument("text", metavar="TEXT", help="source text")
    parser.add_argument("--target-text", metavar="TEXT", help="target to explain (default: the model's answer)")
    parser.add_argument("--pair", metavar="TEXT", help="second text, for an encoder-only model")
    add_model_flags(parser)
    parser.add_argument("--layer", type=int, metavar="N", help="decoder layer of the alignment, from 0 (default: last)")
    parser.add_argument("--head", type=int, metavar="N", help="head of this layer, from 0 (default: mean of all heads)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the alignment to FILE (needs matplotlib)")
    add_call_flags(parser)
    add_connection_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the entropy of every head and the alignment; plot it with --png. Return the exit code."""
    write_utf8()
    try:
        _check(arguments)
        response = _ask(arguments)
        if not response.cross:
            _check_without_alignment(arguments)
            print("\n".join(entropy_table(response)))
            return 0
        weights, shown = alignment(response, layer=arguments.layer, head=arguments.head)
        print("\n".join([*entropy_table(response), "", f"{shown}:", *alignment_table(response, weights)]))
        if arguments.png is not None:
            _draw(arguments.png, response, weights, shown)
    except CommandError as error:
        return report_error("explain", error)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Check the flags before the server is asked. The command line reports a missing matplotlib."""
    for option in ("layer", "head"):
        if (value := getattr(arguments, option)) is not None and value < 0:
            raise CommandError(f"--{option} is {value}; it must be at least 0")
    if arguments.png is None:
        return
    if not arguments.png.parent.is_dir():
        raise CommandError(f"--png is {arguments.png}, but there is no directory {arguments.png.parent}")
    import matplotlib  # noqa: F401


def _check_without_alignment(arguments: argparse.Namespace) -> None:
    """Refuse the flags of the alignment, which this model does not have."""
    for option in ("layer", "head", "png"):
        if (value := getattr(arguments, option)) is not None:
            raise CommandError(f"--{option} is {value}; it must be absent: this model has no cross-attention to align")


def _ask(arguments: argparse.Namespace) -> pb.ExplainResponse:
    try:
        client = Client(arguments.target, model=arguments.model, **read_client_flags(arguments))
    except ValueError as error:
        raise CommandError(connection_problem(error)) from None
    try:
        with client:
            return client.explain(arguments.text, arguments.target_text, pair=arguments.pair)
    except ServerError as error:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            raise CommandError(server_problem(error, arguments.target)) from None
        raise CommandError(f"{arguments.target} answers {error}") from None
    except ValueError as error:
        raise CommandError(f"the text cannot be sent: {error}") from None


def entropy_table(response: pb.ExplainResponse) -> list[str]:
    """Return lines with the entropy of every head, in nats, for each attention that the model has and each layer."""
    attentions = {"encoder self": response.encoder_self, "decoder self": response.decoder_self, "cross": response.cross}
    num_heads = 1 + max(attention.head for maps in attentions.values() for attention in maps)
    lines = [f"{'entropy, nats':<24}" + "".join(f"{f'head {head}':>9}" for head in range(num_heads))]
    for name, maps in attentions.items():
        for layer in range(1 + max((attention.layer for attention in maps), default=-1)):
            entropies = {attention.head: attention.entropy for attention in maps if attention.layer == layer}
            row = "".join(f"{entropies[head]:>9.2f}" for head in range(num_heads))
            lines.append(f"{f'{name}, layer {layer}':<24}{row}")
    return lines


def alignment(response: pb.ExplainResponse, *, layer: int | None, head: int | None) -> tuple[Matrix, str]:
    """Return cross-attention weights [T, S] of a layer (None: the last) and head (None: the mean), and their title.

    Raises CommandError if the model has no such layer or head.
    """
    layer = _existing("--layer", layer, {attention.layer for attention in response.cross})
    maps = [attention for attention in response.cross if attention.layer == layer]
    if head is not None:
        _existing("--head", head, {attention.head for attention in maps})
        maps = [attention for attention in maps if attention.head == head]
    shown = "mean over heads" if head is None else f"head {head}"
    columns = maps[0].columns
    means = [sum(column) / len(maps) for column in zip(*(attention.weights for attention in maps), strict=True)]
    rows = [means[start : start + columns] for start in range(0, len(means), columns)]
    return rows, f"cross-attention of decoder layer {layer}, {shown}"


def _existing(option: str, number: int | None, existing: set[int]) -> int:
    """Return the number, or the last one if it is None."""
    if number is None:
        return max(existing)
    if number not in existing:
        raise CommandError(f"{option} is {number}; the model has 0 to {max(existing)}")
    return number


def read(response: pb.ExplainResponse) -> list[str]:
    """Return the source's pieces in visible form, [S]."""
    return [_visible(piece) for piece in response.source_tokens]


def predicted(response: pb.ExplainResponse) -> list[str]:
    """Return the pieces that the queries predict, in visible form, [T]."""
    return [*(_visible(piece) for piece in response.target_tokens[1:]), END]


def _visible(piece: str) -> str:
    """Replace spaces, which begin words and would be invisible on an axis."""
    return piece.replace(" ", WORD_BEGINS)


def alignment_table(response: pb.ExplainResponse, weights: Matrix) -> list[str]:
    """Return lines with each predicted piece, the source piece of the largest weight, and this weight."""
    sources, targets = read(response), predicted(response)
    width, source_width = (max(map(len, pieces)) + 2 for pieces in (["target", *targets], ["source", *sources]))
    lines = [f"{'target':<{width}}{'source':<{source_width}}weight"]
    for piece, row in zip(targets, weights, strict=True):
        largest = max(range(len(row)), key=row.__getitem__)
        lines.append(f"{piece:<{width}}{sources[largest]:<{source_width}}{row[largest]:.2f}")
    return lines


def _draw(path: Path, response: pb.ExplainResponse, weights: Sequence[Sequence[float]], title: str) -> None:
    try:
        plot_alignment(path, weights, read(response), predicted(response), title=title)
    except OSError as error:
        raise CommandError(write_problem("--png:", path, error)) from None


def plot_alignment(
    path: Path,
    weights: Sequence[Sequence[float]],
    source_pieces: Sequence[str],
    target_pieces: Sequence[str],
    *,
    title: str,
) -> None:
    """Write the heat map of weights [T, S]: T target pieces from top to bottom, S source pieces from left to right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = (min(_CELL * len(pieces) + _MARGIN, _LONGEST) for pieces in (source_pieces, target_pieces))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(weights, cmap="Blues", vmin=0, aspect="auto")
    # Pieces are text, not formulas: matplotlib must not interpret dollar signs.
    axes.set_xticks(range(len(source_pieces)), source_pieces, rotation=90, parse_math=False)
    axes.set_yticks(range(len(target_pieces)), target_pieces, parse_math=False)
    axes.set(xlabel="source", ylabel="target")
    axes.set_title(title, fontsize="small", wrap=True)
    figure.colorbar(image, ax=axes, label="weight")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        figure.savefig(path, format="png", dpi=120)
