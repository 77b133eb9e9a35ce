"""Report of a sizing: text with the formula of every number, plain data for programs, and a Kustomize component."""

from __future__ import annotations

from typing import Any

from antiphon.tools.capacity.footprint import MIB
from antiphon.tools.capacity.sizing import Sizing

Row = tuple[str, str, str]

# Number of samples and of uncompressed bytes in one scrape of a replica with one model.
SCRAPE_SAMPLES = 1335
SCRAPE_BYTES = 156_000
SCRAPE_INTERVAL_S = 15  # deploy/components/monitoring/servicemonitor.yaml
# "An average of only 1-2 bytes per sample": https://prometheus.io/docs/prometheus/latest/storage/
SAMPLE_BYTES = 2


def as_text(sizing: Sizing) -> str:
    """Return a text about one replica, the number of replicas and their total."""
    sections = [("one replica, memory", _memory(sizing)), ("one replica, settings", _settings(sizing))]
    if sizing.replicas is not None:
        sections += [("replicas", _replicas(sizing)), ("all together", _fleet(sizing))]
    lines = [f"{sizing.bundle.manifest.name}: {sizing.bundle.path}"]
    for title, rows in sections:
        lines += ["", title, *_columns(rows)]
    if sizing.replicas is None:
        lines += ["", "For the number of replicas give --rate, with --load-result or --requests-per-s."]
    return "\n".join(lines)


def as_json(sizing: Sizing) -> dict[str, Any]:
    """Return the sizing as plain data; memory in bytes."""
    footprint, replicas = sizing.footprint, sizing.replicas
    return {
        "model": sizing.bundle.manifest.name,
        "resources": {"cpu": str(sizing.cores), "memory": sizing.memory},
        "memory_limit_bytes": footprint.limit_bytes,
        "memory_terms": [
            {"name": term.name, "formula": term.formula, "bytes": term.num_bytes} for term in footprint.terms
        ],
        "settings": sizing.settings,
        "rate_per_replica": None if sizing.rate is None else sizing.rate.requests_per_s,
        "replicas": None if replicas is None else replicas.planned,
        "replicas_needed": None if replicas is None else replicas.needed,
    }


def _memory(sizing: Sizing) -> list[Row]:
    footprint = sizing.footprint
    terms = [(term.name, _mib(term.num_bytes), term.formula) for term in footprint.terms]
    return [
        *terms,
        ("sum", _mib(footprint.sum_bytes), ""),
        ("memory", sizing.memory, "request and limit: the sum, rounded up to 16 MiB"),
    ]


def _settings(sizing: Sizing) -> list[Row]:
    settings = sizing.settings
    where = " in each worker" if sizing.workers > 1 else ""
    why = {
        "workers": f"processes: one for every {_counted(sizing.cores_per_worker, 'core')}, by the size of the model",
        "threads": "cores of each worker",
        "max_num_seqs": f"rows that decode together{where}",
        "max_num_batched_tokens": "limits the workspace of a step",
        "max_queued_requests": _queue(sizing),
        "max_queued_tokens": "waiting source tokens",
        "kv_cache_blocks": sizing.blocks_formula,
    }
    rows = [(name, f"{value:,}", why[name]) for name, value in settings.items()]
    return [("cpu", str(sizing.cores), "request and limit, whole cores"), *rows]


def _counted(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"


def _queue(sizing: Sizing) -> str:
    if sizing.rate is None:
        return "waiting requests; further ones are refused"
    drain_s = sizing.limits.max_queued_requests / sizing.rate.requests_per_s
    return f"drained in {drain_s:.1f} s at {sizing.rate.requests_per_s:,.1f} requests/s"


def _replicas(sizing: Sizing) -> list[Row]:
    rate, demand, replicas = sizing.rate, sizing.demand, sizing.replicas
    assert rate is not None
    assert demand is not None
    assert replicas is not None
    needed = f"ceil({demand.requests_per_s:,g} / ({rate.requests_per_s:,.1f} x {demand.utilisation:g}))"
    if demand.zones > 1:
        planned = f"{demand.zones} zones of {replicas.lost}; without one, {replicas.planned - replicas.lost} are left"
    else:
        planned = f"{replicas.needed} + {demand.spare} that can fail"
    carried = replicas.planned * rate.requests_per_s
    return [
        ("requests/s", f"{demand.requests_per_s:,g}", "--rate"),
        ("of one", f"{rate.requests_per_s:,.1f}", rate.origin),
        ("utilisation", f"{demand.utilisation:g}", "planned; the rest is for bursts while new replicas start"),
        ("needed", f"{replicas.needed:,}", needed),
        ("replicas", f"{replicas.planned:,}", planned),
        ("load", f"{demand.requests_per_s / carried:.2f}", "of the rate that all replicas sustain together"),
    ]


def _fleet(sizing: Sizing) -> list[Row]:
    assert sizing.replicas is not None
    count = sizing.replicas.planned
    total = count * sizing.footprint.limit_bytes
    return [
        ("cores", f"{count * sizing.cores:,}", f"{count:,} x {sizing.cores}"),
        ("memory", f"{total / (MIB << 10):,.1f} GiB", f"{count:,} x {sizing.memory}"),
        *_around(sizing, count),
    ]


def _around(sizing: Sizing, count: int) -> list[Row]:
    """Return further costs of the replicas: network, connections, Prometheus."""
    assert sizing.demand is not None
    rate, clients, call_bytes = sizing.demand.requests_per_s, sizing.demand.clients, sizing.demand.call_bytes
    series = count * SCRAPE_SAMPLES
    scraped = count * SCRAPE_BYTES / SCRAPE_INTERVAL_S
    return [
        ("network", f"{rate * call_bytes * 8 / 1e6:,.2f} Mbit/s", f"{rate:,g} requests/s x {call_bytes:,} bytes x 8"),
        (
            "connections",
            f"{clients * count:,}",
            f"{clients:,} client processes x {count:,} replicas, {clients:,} at each",
        ),
        ("series", f"{series:,}", f"{count:,} x {SCRAPE_SAMPLES:,} of Prometheus"),
        ("samples", f"{series / SCRAPE_INTERVAL_S:,.0f}/s", f"series / {SCRAPE_INTERVAL_S} s"),
        ("a day of them", f"{_day_of(series) / MIB:,.0f} MiB", f"samples x {SAMPLE_BYTES} bytes"),
        ("scrapes", f"{scraped / 1e3:,.1f} kB/s", f"{count:,} x {SCRAPE_BYTES:,} bytes / {SCRAPE_INTERVAL_S} s"),
    ]


def _day_of(series: int) -> float:
    return series / SCRAPE_INTERVAL_S * 86_400 * SAMPLE_BYTES


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


def _columns(rows: list[Row]) -> list[str]:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"  {name:<{first}}  {value:>{second}}  {why}".rstrip() for name, value, why in rows]


_COMPONENT = """\
# Size of a replica, from measurements: cores, memory, cache blocks. Made by a command that prints its formulas
# (docs/MEMORY.md). Run it again instead of editing this file:
#   {command}
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component

configMapGenerator:
  - name: antiphon
    namespace: antiphon
    behavior: merge
    literals:
{literals}

patches:
  - target:
      kind: Deployment
      name: antiphon
    patch: |-
      apiVersion: apps/v1
      kind: Deployment
      metadata:
        name: antiphon
      spec:{replicas}
        template:
          spec:
            containers:
              - name: antiphon
                # Requests equal limits, so that the pod has the class Guaranteed and is evicted last.
                resources:
                  requests:
                    cpu: "{cores}"
                    memory: {memory}
                  limits:
                    cpu: "{cores}"
                    memory: {memory}
"""


def component(sizing: Sizing, command: str) -> str:
    """Return the component as YAML. command: the command line that made it, for a comment."""
    literals = [f"      - ANTIPHON_{name.upper()}={value}" for name, value in sizing.settings.items()]
    replicas = f"\n        replicas: {sizing.replicas.planned}" if sizing.replicas is not None else ""
    return _COMPONENT.format(
        command=command, literals="\n".join(literals), replicas=replicas, cores=sizing.cores, memory=sizing.memory
    )
