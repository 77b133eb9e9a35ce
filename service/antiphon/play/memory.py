"""Memory of the server now: caches, workspace by length, queue, and the requests that hold cache blocks."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from antiphon.client import ServerError
from antiphon.play.messages import Json, problem
from antiphon.play.model_server import ModelServer

_TIMEOUT_S = 3.0
_MAX_BYTES = 1 << 24
_PREFIX = "antiphon_"
# Per model: key of the page, metric.
_NUMBERS = {
    "waiting": "num_requests_waiting",
    "running": "num_requests_running",
    "cache_usage": "kv_cache_usage_ratio",
    "workspace_measured_max": "encoder_workspace_measured_max_bytes",
}
_BY_LABEL = {
    "blocks": ("kv_cache_blocks", "use"),
    "cache_bytes": ("kv_cache_bytes", "use"),
    "memory": ("model_memory_bytes", "kind"),
    "fit": ("encoder_workspace_fit_coefficient", "term"),
    "lone_runs": ("encoder_lone_runs_total", "source_len"),
    "lone_tokens": ("encoder_lone_tokens_total", "source_len"),
}


async def memory(server: ModelServer) -> Json:
    """Return metrics and holders of blocks; where one of them cannot be had, the reason stands in its place."""
    answer: Json = {"metrics": None, "metrics_problem": None, "caches": None, "caches_problem": None}
    try:
        answer["metrics"] = read_metrics(await fetch_metrics(server.addresses.metrics_url, server.metrics_context))
    except NoMetrics as error:
        answer["metrics_problem"] = str(error)
    try:
        caches = await server.caches()
    except ServerError as error:
        answer["caches_problem"] = problem(error)["message"]
        return answer
    if caches is not None:
        answer["caches"] = [
            {
                "model": cache.model,
                "worker": cache.worker,
                "num_blocks": cache.num_blocks,
                "holders": [
                    {
                        "request": holder.request_number,
                        "source_blocks": list(holder.source_blocks),
                        "target_blocks": list(holder.target_blocks),
                    }
                    for holder in cache.holders
                ],
            }
            for cache in caches
        ]
    return answer


class NoMetrics(Exception):
    """The metrics cannot be read; the message says why."""


async def fetch_metrics(url: str, context: ssl.SSLContext | None) -> str:
    """Return the text of /metrics. Raises NoMetrics."""
    return await asyncio.to_thread(_fetch, url, context)


def _fetch(url: str, context: ssl.SSLContext | None) -> str:
    # A proxy named in the environment cannot reach the loopback of this machine.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([] if context is None else [urllib.request.HTTPSHandler(context=context)])
    )
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            text: bytes = response.read(_MAX_BYTES)
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise NoMetrics(f"{url} cannot be read: {error}") from None
    return text.decode("utf-8", errors="replace")


def read_metrics(text: str) -> dict[str, Any]:
    """Return memory, caches and load of each model, and the memory of the process, as numbers. Raises NoMetrics."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise NoMetrics(f"the metrics cannot be read: {error}") from None
    by_model: dict[str, list[Sample]] = defaultdict(list)
    process: dict[str, float] = {}
    for sample in samples:
        if "model_name" in sample.labels:
            by_model[sample.labels["model_name"]].append(sample)
        elif not sample.labels:
            process[sample.name] = sample.value
    return {
        "resident_bytes": process.get("process_resident_memory_bytes"),
        "machine_bytes": process.get(f"{_PREFIX}machine_memory_bytes"),
        "models": {name: _model(of_model) for name, of_model in by_model.items() if name},
    }


def _model(samples: Iterable[Sample]) -> dict[str, Any]:
    named: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        named[sample.name.removeprefix(_PREFIX)].append(sample)
    figures: dict[str, Any] = {key: named[name][0].value if named[name] else None for key, name in _NUMBERS.items()}
    for key, (name, label) in _BY_LABEL.items():
        figures[key] = {sample.labels[label]: sample.value for sample in named[name]}
    figures["workspace_by_length"] = _workspace(named["encoder_lone_workspace_bytes_total"], figures)
    return figures


def _workspace(sums: Iterable[Sample], figures: dict[str, Any]) -> list[dict[str, float]]:
    """Return, for each length class with runs, the mean tokens, and mean bytes of each kind of workspace."""
    totals: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in sums:
        totals[sample.labels["source_len"]][sample.labels["kind"]] = sample.value
    rows = []
    for length, kinds in totals.items():
        runs = figures["lone_runs"].get(length, 0.0)
        if runs:
            means = {kind: value / runs for kind, value in kinds.items()}
            rows.append({"tokens": figures["lone_tokens"][length] / runs, "runs": runs, **means})
    return sorted(rows, key=lambda row: row["tokens"])
