"""Panels of memory, and of its growth with a source's length or the square of the length."""

from __future__ import annotations

from deploy.dashboards.queries import (
    REPLICA,
    REPLICA_LEGEND,
    mean,
    of_model,
    of_process,
    quantile,
    rate,
    rising,
    total,
)
from deploy.dashboards.shapes import BAD, GOOD, WARNING, About, Panel, curves, lines, listing, rows

CURVES = {"measured": "measured", "predicted fused": "predicted_fused", "materialised": "predicted_materialised"}
RANGE = "$__range"


HELD = About(
    title="Cache bytes",
    text="Kept for sources (cross), constant while a request runs, and for targets (self), one token more each step.",
    unit="bytes",
)
BLOCKS = About(
    title="Cache blocks",
    text="The same in blocks. Good: some are free; without free blocks, requests wait and some are preempted.",
    unit="none",
)
USAGE = About(
    title="Cache use",
    text="Share of the cache blocks in use, for each replica. Above 0.8, autoscaling adds replicas.",
    unit="percentunit",
    runbook="AntiphonCacheFull",
)


def cache_panels() -> list[Panel]:
    """Return panels of the cache's blocks by use."""
    limits = [(0, GOOD), (0.8, WARNING), (0.95, BAD)]
    return [
        lines(HELD, {"{{use}}": total(of_model("kv_cache_bytes"), "use")}, is_stacked=True),
        lines(BLOCKS, {"{{use}}": total(of_model("kv_cache_blocks"), "use")}, is_stacked=True),
        lines(USAGE, {REPLICA_LEGEND: f"max by ({REPLICA}) ({of_model('kv_cache_usage_ratio')})"}, limits=limits),
    ]


CURVE = About(
    title="T²: attention workspace by source length",
    text="Workspace of an encoder run with one source, by the length of the source, in the chosen time range. Both "
    "axes are logarithmic. Measured and predicted fused rise with slope 1. Materialised (the score matrices of "
    "one layer, if they were stored) rises with slope 2. Good: measured lies on predicted fused. Select one model.",
    unit="bytes",
    width=12,
    height=11,
    runbook="AntiphonWorkspaceAboveFit",
)
FIGURES = About(
    title="T² in figures",
    text="The same as a table, with a row for each doubling of the length (source_len: maximum number of tokens).",
    unit="bytes",
    width=12,
    height=11,
)


def workspace_panels() -> list[Panel]:
    """Return panels of the encoder's workspace: by length, over time, and compared with its prediction."""
    tokens = f"{_of_lone('encoder_lone_tokens_total')} / {rising(_of_lone('encoder_lone_runs_total'))}"
    queries = {"tokens": tokens} | {legend: _bytes_a_run(kind) for legend, kind in CURVES.items()}
    runs = {"runs": rising(_of_lone("encoder_lone_runs_total"))}
    return [
        curves(CURVE, queries, key="source_len", x="tokens"),
        rows(FIGURES, queries | runs, key="source_len", units={"tokens": "none", "runs": "none"}),
        *_workspace_over_time(),
    ]


RUNS = About(
    title="Workspace of every run",
    text="Mean over all encoder runs, with one source or several, and the largest so far, which is the minimum for "
    "workspace_limit_bytes. Materialised: score matrices of one layer, if they were stored.",
    unit="bytes",
    width=12,
)
RATIO = About(
    title="Measured / predicted workspace",
    text="Measured divided by predicted workspace: mean and p99. Good: near 1. Above 1, admission assumes too little "
    "memory: profile the bundle again.",
    unit="none",
    width=12,
    runbook="AntiphonWorkspaceAboveFit",
)


def _workspace_over_time() -> list[Panel]:
    workspace = "encoder_workspace"
    means = {
        "measured": mean(f"{workspace}_measured_run_bytes"),
        "predicted fused": mean(f"{workspace}_predicted_fused_run_bytes"),
        "materialised": mean(f"{workspace}_predicted_materialised_run_bytes"),
        "largest measured": f"max({of_model(f'{workspace}_measured_max_bytes')})",
    }
    quotient = f"{workspace}_measured_to_predicted_ratio"
    limits = [(0, GOOD), (1.1, WARNING), (1.25, BAD)]
    return [
        lines(RUNS, means, is_logarithmic=True),
        lines(RATIO, {"mean": mean(quotient), "p99": quantile(0.99, quotient)}, limits=limits),
    ]


def process_panels() -> list[Panel]:
    """Return panels of the memory and CPU of the process."""
    return [*_resident(), *_held(), *_machine()]


RESIDENT = About(title="Resident memory", text="Of each replica. Good: constant over days.", unit="bytes", width=6)
SHARE = About(
    title="Resident memory, share of the limit",
    text="Resident memory divided by the memory of the container or machine. Good: below 0.8; at 1 it is killed.",
    unit="percentunit",
    width=6,
    runbook="AntiphonMemoryNearLimit",
)


def _resident() -> list[Panel]:
    taken = of_process("process_resident_memory_bytes")
    of_all = f"{taken} / {of_process('antiphon_machine_memory_bytes')}"
    return [
        lines(
            RESIDENT,
            {
                REPLICA_LEGEND: taken,
                f"unread answers {REPLICA_LEGEND}": of_process("antiphon_unsent_answer_bytes"),
            },
        ),
        lines(SHARE, {REPLICA_LEGEND: of_all}, limits=[(0, GOOD), (0.8, WARNING), (0.9, BAD)]),
    ]


ARENA = About(
    title="Arena",
    text="Allocator of the graphs: bytes in use, reserved from the system, and cached; peak of bytes in use; limit (0: "
    "none). Good: bytes in use fall back between requests.",
    unit="bytes",
    width=6,
)
PARTS = About(
    title="Models in the memory budget",
    text="Bytes of each model in the memory budget, which memory_limit_bytes sets.",
    unit="bytes",
    width=6,
)


def _held() -> list[Panel]:
    kinds = ("in_use", "reserved", "cached", "peak", "limit")
    queries = {
        "{{model_name}}, {{kind}}": total(of_model("model_memory_bytes"), "model_name, kind"),
        "budget": total(of_process("antiphon_memory_budget_bytes")),
    }
    return [
        lines(ARENA, {kind.replace("_", " "): total(of_model(f"arena_{kind}_bytes")) for kind in kinds}),
        lines(PARTS, queries),
    ]


CORES = About(
    title="Cores",
    text="CPU seconds per second of each replica. Not a measure of load: any running request keeps the cores busy.",
    unit="none",
)
MACHINE_BLOCKS = About(
    title="Arena blocks",
    text="Allocations per second, and those refused because of a limit. Good: none refused; a refusal is a failed run.",
    unit="none",
    runbook="AntiphonArenaRefusing",
)
SERVED = About(title="Served models", text="Version, model and precision of each replica.", unit="none")


def _machine() -> list[Panel]:
    build = f"max by (instance, version) ({of_process('antiphon_build_info')})"
    models = f"max by ({REPLICA}, model_name, precision, lowering, architecture) ({of_model('model_info')})"
    return [
        lines(CORES, {REPLICA_LEGEND: rate(of_process("process_cpu_seconds_total"))}),
        lines(
            MACHINE_BLOCKS,
            {
                "given": total(rate(of_model("arena_allocations_total"))),
                "refused": total(rate(of_model("arena_refusals_total"))),
            },
        ),
        listing(SERVED, f"{models} * on (instance) group_left (version) {build}"),
    ]


def _of_lone(name: str, labels: str = "") -> str:
    return total(f"increase({of_model(name, labels)}[{RANGE}])", "source_len")


def _bytes_a_run(kind: str) -> str:
    """Return a query for the mean bytes of a run. It omits zeros, which a logarithmic axis cannot show."""
    name = "encoder_lone_workspace_bytes_total"
    num_bytes = _of_lone(name, f'kind="{kind}"')
    return f"{rising(num_bytes)} / {rising(_of_lone('encoder_lone_runs_total'))}"
