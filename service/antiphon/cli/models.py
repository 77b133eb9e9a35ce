"""`antiphon models`: lists, loads and unloads the models of a running server. A client; loads no model itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from antiphon.cli.common import aligned, report_error
from antiphon.cli.connection_flags import (
    add_connection_flags,
    add_target_flag,
    connection_problem,
    read_connection,
    server_problem,
)
from antiphon.client import Client, ServerError
from antiphon.client.admin_client import DEFAULT_ADMIN_TARGET, AdminClient, Limits
from antiphon.v1 import admin_pb2, inference_pb2

_LIMITS = {
    "max_num_seqs": "rows that run together",
    "kv_cache_blocks": "cache blocks of 16 tokens",
    "threads": "maximum cores of one step",
    "max_queued_requests": "maximum waiting requests",
}
_PRECISION = inference_pb2.Precision.DESCRIPTOR.values_by_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `antiphon models` and their flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="list the served models, the default first")
    add_target_flag(listing)
    loading = actions.add_parser("load", help="serve another bundle")
    loading.add_argument("name", metavar="NAME", help="name for requests")
    loading.add_argument("path", metavar="PATH", help="directory of the bundle, on the server's disk")
    for limit, meaning in _LIMITS.items():
        loading.add_argument(
            f"--{limit.replace('_', '-')}", type=int, metavar="N", help=f"{meaning} (default: server's)"
        )
    unloading = actions.add_parser("unload", help="stop serving a model")
    unloading.add_argument("name", metavar="NAME", help="name of the model")
    unloading.add_argument(
        "--grace-s", type=float, metavar="S", help="time for its running requests to end (default: server's)"
    )
    memory = actions.add_parser("memory", help="show the memory of each model, in bytes, of the memory budget")
    cache = actions.add_parser("cache", help="show the cache blocks of each model, and the requests that hold them")
    for action in (loading, unloading, memory, cache):
        action.add_argument(
            "--admin-target",
            default=DEFAULT_ADMIN_TARGET,
            metavar="HOST:PORT",
            help="admin service of a server with --admin-port (default: %(default)s)",
        )
    for action in (listing, loading, unloading, memory, cache):
        add_connection_flags(action)


def run(arguments: argparse.Namespace) -> int:
    """Do one action and return the exit code."""
    target = arguments.target if arguments.action == "list" else arguments.admin_target
    try:
        _ACTIONS[arguments.action](arguments, target)
    except ServerError as error:
        return report_error("models", _explain(error, target, arguments.action))
    except ValueError as error:  # a file of the connection, or a number out of its field's range
        return report_error("models", connection_problem(error))
    return 0


def _list(arguments: argparse.Namespace, target: str) -> None:
    with Client(target, connection=read_connection(arguments)) as client:
        models = client.list_models()
    _print_rows(
        ("name", "precision", "source", "target", "default"),
        [
            (
                model.name,
                _PRECISION[model.precision].name.removeprefix("PRECISION_").lower(),
                str(model.limits.max_source_len),
                str(model.limits.max_target_len),
                "yes" if index == 0 else "",
            )
            for index, model in enumerate(models)
        ],
    )


def _load(arguments: argparse.Namespace, target: str) -> None:
    limits = Limits(**{limit: getattr(arguments, limit) for limit in _LIMITS})
    with AdminClient(target, connection=read_connection(arguments)) as client:
        # A relative path refers to this directory, which the server also has if both run on one machine.
        model = client.load_model(arguments.name, str(Path(arguments.path).absolute()), limits)
    print(f"{model.name} is served")


def _unload(arguments: argparse.Namespace, target: str) -> None:
    with AdminClient(target, connection=read_connection(arguments)) as client:
        has_drained = client.unload_model(arguments.name, grace_s=arguments.grace_s)
    print(f"{arguments.name} is gone" + ("" if has_drained else "; requests that still ran were ended"))


def _memory(arguments: argparse.Namespace, target: str) -> None:
    with AdminClient(target, connection=read_connection(arguments)) as client:
        response = client.get_memory()
    rows = [(model.name, *map(str, _parts(model)), str(sum(_parts(model)))) for model in response.models]
    total = sum(sum(_parts(model)) for model in response.models)
    _print_rows(("name", "weights", "cache", "workspace", "together"), [*rows, ("all", "", "", "", str(total))])
    print(f"budget: {response.budget_bytes}" if response.HasField("budget_bytes") else "no budget")


def _cache(arguments: argparse.Namespace, target: str) -> None:
    with AdminClient(target, connection=read_connection(arguments)) as client:
        caches = client.get_cache().caches
    rows = []
    for cache in caches:
        process = (cache.model, str(cache.worker))
        num_free = cache.num_blocks
        for holder in cache.holders:
            counts = (len(holder.source_blocks), len(holder.target_blocks))
            rows.append((*process, f"request {holder.request_number}", *map(str, counts), str(sum(counts))))
            num_free -= sum(counts)
        rows.append((*process, "free", "", "", str(num_free)))
    _print_rows(("name", "process", "holder", "source", "target", "blocks"), rows)


_ACTIONS: dict[str, Callable[[argparse.Namespace, str], None]] = {
    "list": _list,
    "load": _load,
    "unload": _unload,
    "memory": _memory,
    "cache": _cache,
}


def _parts(model: admin_pb2.ModelMemory) -> tuple[int, int, int]:
    return model.weight_bytes, model.cache_bytes, model.workspace_bytes


def _print_rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print("\n".join(aligned([header, *rows])))


def _explain(error: ServerError, target: str, action: str) -> str:
    command = "antiphon serve" if action == "list" else f"antiphon serve --admin-port {target.rpartition(':')[2]}"
    return server_problem(error, target, command=command, participle="listening")
