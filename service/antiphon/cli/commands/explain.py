"""`antiphon explain`: attention of a served model, as tables and as a plot. A client; loads no model.

Uses the attention maps that the server sends, in plain Python: a client installation has no NumPy. The alignment is the
cross-attention, so only encoder-decoder models have one.

Axes: S source pieces, T decoder queries. Query t has read target pieces 0 to t, the begin token first, and predicts the
next one.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from antiphon.cli.connection_flags import add_call_flags, add_connection_flags, connection_problem, read_terms
from antiphon.client import DEFAULT_TARGET, Client, ServerError
from antiphon.v1 import inference_pb2 as pb

EXIT_USER_ERROR = 2
# Prediction of the last query; it is not a piece of the target.
END = "(end)"
WORD_BEGINS = "\u2581"

Matrix = list[list[float]]


class Refused(Exception):
    """Nothing can be shown; the message contains the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon explain`."""
    parser.add_argument("text", metavar="TEXT", help="source text")
    parser.add_argument("--target-text", metavar="TEXT", help="target to explain (default: the model's answer)")
    parser.add_argument("--pair", metavar="TEXT", help="second text, for an encoder-only model")
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")
    parser.add_argument("--model", default="", metavar="NAME", help="model that answers (default: the server's first)")
    parser.add_argument("--layer", type=int, metavar="N", help="decoder layer of the alignment, from 0 (default: last)")
    parser.add_argument("--head", type=int, metavar="N", help="head of this layer, from 0 (default: mean of all heads)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the alignment to FILE (needs matplotlib)")
    add_call_flags(parser)
    add_connection_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the entropy of every head and the alignment; plot it with --png. Return the exit code."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8")  # pieces are text in any language; the locale does not matter
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
    except Refused as refused:
        print(f"antiphon explain: {refused}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Check the flags before the server is asked. The command line reports a missing matplotlib."""
    for option in ("layer", "head"):
        if (value := getattr(arguments, option)) is not None and value < 0:
            raise Refused(f"--{option} is {value}; it must be at least 0")
    if arguments.png is None:
        return
    if not arguments.png.parent.is_dir():
        raise Refused(f"--png is {arguments.png}, but there is no directory {arguments.png.parent}")
    import matplotlib  # noqa: F401


def _check_without_alignment(arguments: argparse.Namespace) -> None:
    """Refuse the flags of the alignment, which this model does not have."""
    for option in ("layer", "head", "png"):
        if (value := getattr(arguments, option)) is not None:
            raise Refused(f"--{option} is {value}; it must be absent: this model has no cross-attention to align")


def _ask(arguments: argparse.Namespace) -> pb.ExplainResponse:
    try:
        asking = Client(arguments.target, model=arguments.model, **read_terms(arguments))
    except ValueError as error:
        raise Refused(connection_problem(error)) from None
    try:
        with asking as client:
            return client.explain(arguments.text, arguments.target_text, pair=arguments.pair)
    except ServerError as error:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            raise Refused(
                f"{arguments.target} is unavailable ({error.message}); is a server running there? "
                "start one with: antiphon serve"
            ) from None
        raise Refused(f"{arguments.target} answers {error}") from None
    except ValueError as error:
        raise Refused(f"the text cannot be sent: {error}") from None


def entropy_table(response: pb.ExplainResponse) -> list[str]:
    """Return lines with the entropy of every head, in nats, for each attention that the model has and each layer."""
    attentions = {"encoder self": response.encoder_self, "decoder self": response.decoder_self, "cross": response.cross}
    num_heads = 1 + max(each.head for maps in attentions.values() for each in maps)
    lines = [f"{'entropy, nats':<24}" + "".join(f"{f'head {head}':>9}" for head in range(num_heads))]
    for name, maps in attentions.items():
        for layer in range(1 + max((each.layer for each in maps), default=-1)):
            entropies = {each.head: each.entropy for each in maps if each.layer == layer}
            row = "".join(f"{entropies[head]:>9.2f}" for head in range(num_heads))
            lines.append(f"{f'{name}, layer {layer}':<24}{row}")
    return lines


def alignment(response: pb.ExplainResponse, *, layer: int | None, head: int | None) -> tuple[Matrix, str]:
    """Return cross-attention weights [T, S] of a layer (None: the last) and head (None: the mean), and their title.

    Raises Refused if the model has no such layer or head.
    """
    layer = _existing("--layer", layer, {each.layer for each in response.cross})
    maps = [each for each in response.cross if each.layer == layer]
    if head is not None:
        _existing("--head", head, {each.head for each in maps})
        maps = [each for each in maps if each.head == head]
    shown = "mean over heads" if head is None else f"head {head}"
    columns = maps[0].columns
    means = [sum(column) / len(maps) for column in zip(*(each.weights for each in maps), strict=True)]
    rows = [means[start : start + columns] for start in range(0, len(means), columns)]
    return rows, f"cross-attention of decoder layer {layer}, {shown}"


def _existing(option: str, given: int | None, existing: set[int]) -> int:
    """Return the given number, or the last one if it is None."""
    if given is None:
        return max(existing)
    if given not in existing:
        raise Refused(f"{option} is {given}; the model has 0 to {max(existing)}")
    return given


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
        most = max(range(len(row)), key=row.__getitem__)
        lines.append(f"{piece:<{width}}{sources[most]:<{source_width}}{row[most]:.2f}")
    return lines


def _draw(path: Path, response: pb.ExplainResponse, weights: Sequence[Sequence[float]], title: str) -> None:
    from antiphon.cli.alignment_plot import plot_alignment

    try:
        plot_alignment(path, weights, read(response), predicted(response), title=title)
    except OSError as error:
        raise Refused(f"--png: {path} cannot be written: {error.strerror}") from None
