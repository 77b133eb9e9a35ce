"""`antiphon size`: resource requests, limits, settings and replicas for a bundle and a rate, with every formula."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.bundle.manifest import load_bundle
from antiphon.cli.common import report_error, write_problem
from antiphon.domain.limits import EngineLimits
from antiphon.errors import BundleError
from antiphon.server.models.memory import block_bytes_of, weight_bytes
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.capacity.flags import CapacityError, add_limit_flag, number, whole
from antiphon.tools.capacity.size_report import as_json, as_text, component
from antiphon.tools.capacity.sizing import (
    SIZED_LIMITS,
    Demand,
    Lengths,
    Replica,
    ServiceRate,
    Sizing,
    blocks_of,
    open_profiled,
    read_load_result,
    size,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of one replica's card."""

    model: str
    precision: str
    weight_bytes: int
    cache_blocks: int
    """0 without a decoder."""
    block_bytes: int
    formula: str
    """Of the number of blocks."""

    @property
    def total_bytes(self) -> int:
        """Bytes of weights and cache."""
        return self.weight_bytes + self.cache_blocks * self.block_bytes


def device_memory_of(path: Path, max_num_seqs: int, lengths: Lengths) -> DeviceMemory:
    """Return what the cuda graphs of a bundle need. Raises CapacityError if it has none."""
    try:
        bundle = load_bundle(path)
        graphs = bundle.graph_set(lowering="cuda")
    except BundleError as error:
        raise CapacityError(str(error)) from None
    model = bundle.manifest.model
    blocks, formula = blocks_of(model, max_num_seqs, lengths)
    return DeviceMemory(
        model=bundle.manifest.name,
        precision=graphs.precision,
        weight_bytes=weight_bytes(bundle, graphs),
        cache_blocks=blocks or 0,
        block_bytes=block_bytes_of(model, graphs) if blocks else 0,
        formula=formula,
    )


def device_memory_as_text(memory: DeviceMemory) -> str:
    """Return a text with the formula of every number."""
    cache = f"{memory.cache_blocks} blocks of {memory.block_bytes} bytes: {memory.formula}"
    return "\n".join(
        [
            f"{memory.model}, {memory.precision}: memory of one replica's GPU",
            f"  weights    {memory.weight_bytes:>15,} bytes",
            f"  cache      {memory.cache_blocks * memory.block_bytes:>15,} bytes  {cache}",
            f"  together   {memory.total_bytes:>15,} bytes, and workspace, for which the server leaves a fifth",
        ]
    )


def device_memory_as_json(memory: DeviceMemory) -> dict[str, Any]:
    """Return the same as plain data."""
    return {**asdict(memory), "total_bytes": memory.total_bytes}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon size`."""
    parser.add_argument(
        "bundle",
        type=Path,
        nargs="?",
        default=SHIPPED_BUNDLE,
        metavar="BUNDLE",
        help="directory of the exported model (default: the English-German one)",
    )
    _add_demand_flags(parser.add_argument_group("demand"))
    _add_replica_flags(parser.add_argument_group("one replica, as in antiphon serve"))
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--kustomize", type=Path, metavar="FILE", help="write a Kustomize component; - prints it")


def _add_demand_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rate", type=number(0, 1e9), metavar="R", help="total requests per second, at the peak")
    rate = group.add_mutually_exclusive_group()
    rate.add_argument(
        "--load-result",
        type=Path,
        metavar="FILE",
        help="rate that one replica sustains: JSON of `antiphon load --search` against one with the same cores",
    )
    rate.add_argument("--requests-per-s", type=number(0, 1e9), metavar="R", help="the same, as a number")
    group.add_argument(
        "--utilisation",
        type=number(0, 1),
        default=0.7,
        metavar="U",
        help="share of that rate to plan with (default: %(default)s)",
    )
    group.add_argument(
        "--spare",
        type=whole(0, 1000),
        default=1,
        metavar="N",
        help="number of replicas that can fail (default: %(default)s)",
    )
    group.add_argument(
        "--zones",
        type=whole(1, 100),
        default=1,
        metavar="Z",
        help="number of zones, of which one can fail (default: %(default)s, no zone can fail)",
    )
    group.add_argument(
        "--clients",
        type=whole(1, 1_000_000),
        default=20,
        metavar="N",
        help="number of client processes (default: %(default)s)",
    )
    group.add_argument(
        "--call-bytes",
        type=whole(1, 1 << 30),
        # Measured with a counting proxy: everyday sentences, streamed over HTTP/2, 100 bytes in and 420 out.
        default=520,
        metavar="N",
        help="bytes of a call in both directions (default: %(default)s, a streamed sentence of ten tokens)",
    )
    for side in ("source", "target"):
        group.add_argument(
            f"--{side}-tokens",
            type=whole(1, 1_048_576),
            metavar="N",
            help=f"length that few {side}s exceed, for the cache (default: the model's maximum)",
        )


def _add_replica_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cores", type=whole(1, 1024), default=2, metavar="N", help="cores (default: %(default)s)")
    group.add_argument(
        "--workers",
        type=_workers,
        default="auto",
        metavar="N",
        help="processes that divide the cores; auto: by cores and size of the model (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: print the memory of a GPU that the bundle's cuda graphs need (default: %(default)s)",
    )
    for name in SIZED_LIMITS:
        add_limit_flag(group, name, help_text="(default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print a sizing and return the exit code."""
    try:
        if arguments.device == "cuda":
            _print_device_memory(arguments)
            return 0
        sizing = _sized(arguments)
        if arguments.kustomize is not None:
            _write(arguments.kustomize, component(sizing, _command(arguments)))
    except CapacityError as error:
        return report_error("size", error)
    if str(arguments.kustomize) != "-":
        print(json.dumps(as_json(sizing), indent=2) if arguments.json else as_text(sizing))
    return 0


def _print_device_memory(arguments: argparse.Namespace) -> None:
    """Print the memory of a GPU. Raises CapacityError for flags that have no meaning there."""
    if arguments.rate is not None or arguments.kustomize is not None:
        raise CapacityError("--device cuda prints the memory of one GPU; leave out --rate and --kustomize")
    lengths = Lengths(source=arguments.source_tokens, target=arguments.target_tokens)
    memory = device_memory_of(arguments.bundle, arguments.max_num_seqs, lengths)
    print(json.dumps(device_memory_as_json(memory), indent=2) if arguments.json else device_memory_as_text(memory))


def _sized(arguments: argparse.Namespace) -> Sizing:
    bundle = open_profiled(arguments.bundle)
    lengths = Lengths(source=arguments.source_tokens, target=arguments.target_tokens)
    limits = EngineLimits(**{name: getattr(arguments, name) for name in SIZED_LIMITS})
    if arguments.workers != "auto" and arguments.workers > arguments.cores:
        raise CapacityError(f"--workers is {arguments.workers}; it must be at most --cores, {arguments.cores}")
    replica = Replica(cores=arguments.cores, workers=arguments.workers, limits=limits, lengths=lengths)
    return size(bundle, replica, _demand(arguments), _rate(arguments))


def _workers(text: str) -> int | str:
    return text if text == "auto" else whole(1, 256)(text)


def _rate(arguments: argparse.Namespace) -> ServiceRate | None:
    if arguments.load_result is not None:
        return read_load_result(arguments.load_result)
    if arguments.requests_per_s is not None:
        return ServiceRate(requests_per_s=arguments.requests_per_s, origin="--requests-per-s")
    if arguments.rate is not None:
        raise CapacityError(
            "--rate needs the rate that one replica sustains: --requests-per-s, or --load-result with a file that "
            "`antiphon load --search --objective-p99-ms 250 --duration 30 --json FILE` wrote for the same cores"
        )
    return None


def _demand(arguments: argparse.Namespace) -> Demand | None:
    if arguments.rate is None:
        return None
    return Demand(
        requests_per_s=arguments.rate,
        utilisation=arguments.utilisation,
        spare=arguments.spare,
        zones=arguments.zones,
        clients=arguments.clients,
        call_bytes=arguments.call_bytes,
    )


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that makes the same component, with the paths as they were given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    words = ["antiphon", "size"]
    if arguments.bundle != defaults.pop("bundle"):
        words.append(str(arguments.bundle))
    for name, default in defaults.items():
        value = getattr(arguments, name)
        if value != default and name != "json":
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def _write(path: Path, content: str) -> None:
    if str(path) == "-":
        print(content, end="")
        return
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise CapacityError(write_problem("--kustomize", path, error)) from None
