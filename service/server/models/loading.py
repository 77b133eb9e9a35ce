"""Builds an engine from a bundle on disk. Finds every reason not to serve it before it is served."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from antiphon.model.bundle.graph import GraphError
from antiphon.model.bundle.manifest import Bundle, BundleError, load_bundle
from antiphon.model.ops.cache_geometry import BLOCK_SIZE, blocks_of_longest
from antiphon.model.ops.workspace import WorkspaceError
from antiphon.model.text.tokenizer import Tokenizer, TokenizerError, open_tokenizer
from antiphon.service.domain.errors import InvalidArgument
from antiphon.service.domain.limits import EncodeBudget, EngineLimits
from antiphon.service.engine.engine import Engine
from antiphon.service.engine.scheduling.admission import limits_of
from antiphon.service.observability.metrics.engine_metrics import Metrics
from antiphon.service.observability.metrics.metric_families import MetricFamilies
from antiphon.service.rpc.v1.answers.pacing import Pacing
from antiphon.service.rpc.v1.describe import describe
from antiphon.service.rpc.v1.models import Served
from antiphon.service.rpc.v1.requests.long_texts import LongTexts
from antiphon.service.rpc.v1.served.served_model import ServedModel
from antiphon.service.rpc.v1.servicer import InferenceServicer
from antiphon.service.runtime.explain import Explainer
from antiphon.service.runtime.lanes import fastest_num_lanes, open_lanes, possible_lanes
from antiphon.service.runtime.runners import AnyRunner
from antiphon.service.runtime.warm_up import NotFinite, warm_up
from antiphon.service.server.models.machine import check_memory
from antiphon.service.server.models.memory import LIMIT_MARGIN, MemoryBudget, ModelMemory, encode_budget, need_of
from antiphon.service.server.models.model_settings import ModelPlan
from antiphon.v1 import inference_pb2 as pb


class StartupError(Exception):
    """A bundle cannot be served with these settings. The message names the file or field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Parts that the models of a process share.

    machine_bytes: memory of the machine; None if unknown. num_workers: processes that serve the same models.
    """

    families: MetricFamilies
    pacing: Pacing
    budget: MemoryBudget
    machine_bytes: int | None = None
    num_workers: int = 1
    long_texts: LongTexts = field(default_factory=LongTexts)


def load(plan: ModelPlan, shared: Shared) -> Served:
    """Verify the bundle, load its graphs and tokenizer, and build an engine without starting it.

    Raises StartupError, or OverBudget before any graph is loaded; then everything is released.
    """
    try:
        bundle = load_bundle(plan.path)
        name = plan.name or bundle.manifest.name
        num_lanes = max(_possible_lanes(bundle, plan))
        need = need_of(bundle, bundle.graph_set(plan.precision), plan.limits, num_lanes, num_workers=shared.num_workers)
        shared.budget.take(name, need)
        try:
            check_memory(shared.budget.held, shared.machine_bytes)
            return _open(bundle, name, plan, shared, need.memory)
        except BaseException:
            shared.budget.give_back(name)
            raise
    except (BundleError, TokenizerError, GraphError, WorkspaceError, ValueError) as error:
        raise StartupError(str(error)) from error


def _open(bundle: Bundle, name: str, plan: ModelPlan, shared: Shared, memory: ModelMemory) -> Served:
    tokenizer = _tokenizer(bundle)
    _encode_budget(bundle, plan, 1)  # no source may fit, which must be said before graphs are loaded
    runner, *further = runners = _runners(bundle, plan)
    limits = replace(plan.limits, encode_budget=_encode_budget(bundle, plan, len(runners)))
    for one in runners:
        _warm_up(bundle, one, plan)
    description = _described(bundle, runner, tokenizer, limits, plan)
    description.name = name
    explainer = Explainer(bundle, precision=runner.precision)
    model = ServedModel(
        description=description,
        tokenizer=tokenizer,
        text=bundle.manifest.text,
        config=bundle.manifest.model,
        explainer=explainer if explainer.is_available else None,
        generation=bundle.manifest.generation,
    )
    metrics = _metrics(Metrics(shared.families, name), bundle, plan, memory)
    metrics.watch_arena(*(one.workspace for one in runners))
    engine = Engine(runner, limits, metrics, further=further)
    return Served(
        name=name,
        precision=runner.precision,
        servicer=InferenceServicer(model, engine, shared.pacing, shared.long_texts),
        engine=engine,
        description=description,
        metrics=metrics,
    )


def _metrics(metrics: Metrics, bundle: Bundle, plan: ModelPlan, memory: ModelMemory) -> Metrics:
    """Return the metrics of a model after reporting its memory, precision and workspace fit."""
    metrics.holds(weights=memory.weight_bytes, cache=memory.cache_bytes, workspace=memory.workspace_bytes)
    graphs, architecture = bundle.graph_set(plan.precision), bundle.manifest.model.architecture
    metrics.is_served(precision=graphs.precision, lowering=graphs.lowering, architecture=architecture)
    if (fit := bundle.memory_fit(graphs)) is not None:
        metrics.predicts_by(fit)
    return metrics


def _described(
    bundle: Bundle, runner: AnyRunner, tokenizer: Tokenizer, limits: EngineLimits, plan: ModelPlan
) -> pb.Model:
    longest = limits_of(runner, limits).max_source_len
    try:
        return describe(
            bundle,
            runner,
            tokenizer,
            max_source_len=longest,
            max_message_bytes=plan.max_message_bytes,
            max_text_bytes=plan.max_text_bytes,
        )
    except InvalidArgument as error:
        raise StartupError(f"{bundle.path}: generation: {error}") from None


def _warm_up(bundle: Bundle, runner: AnyRunner, plan: ModelPlan) -> None:
    try:
        warm_up(runner)
    except NotFinite as error:
        graphs = bundle.graph_set(plan.precision)
        names = {"encoder": graphs.encoder, "decoder": graphs.decoder}
        name = names.get(error.part) or {str(task): file for task, file in graphs.heads.items()}[error.part]
        raise StartupError(f"{bundle.file(name)}: {error}; export the bundle again") from None


def _tokenizer(bundle: Bundle) -> Tokenizer:
    model, text = bundle.manifest.model, bundle.manifest.text
    tokenizer = open_tokenizer(bundle.path, text)
    if text.kind != "byte_bpe":  # imported: the vocabulary may be padded, and the model defines the special tokens
        return tokenizer
    for name in ("vocab_size", "pad_id", "bos_id", "eos_id", "unk_id"):
        found, expected = getattr(tokenizer, name), getattr(model, name)
        if found != expected:
            raise BundleError(f"{bundle.path / (text.source or '')}: {name} is {found}; the model's is {expected}")
    return tokenizer


def _runners(bundle: Bundle, plan: ModelPlan) -> tuple[AnyRunner, ...]:
    """Return the runner of each lane."""
    _check_blocks(bundle, plan)
    rows, threads, precision = plan.limits.max_num_seqs, plan.threads, plan.precision
    lanes = fastest_num_lanes(
        bundle, _possible_lanes(bundle, plan), max_rows=rows, threads=threads, precision=precision
    )
    return open_lanes(
        bundle,
        num_lanes=lanes,
        max_rows=rows,
        threads=threads,
        precision=precision,
        num_blocks=plan.limits.kv_cache_blocks,
        workspace_limit_bytes=plan.limits.workspace_limit_bytes,
    )


def _possible_lanes(bundle: Bundle, plan: ModelPlan) -> list[int]:
    """Return the numbers of lanes to choose from: one if it is set, else those for which no source is too long."""
    if plan.lanes != "auto":
        return [plan.lanes]
    longest = bundle.manifest.model.max_source_len
    budgets = {count: _encode_budget(bundle, plan, count) for count in possible_lanes(bundle, plan.threads)}
    return [count for count, budget in budgets.items() if count == 1 or budget is None or budget.fits(longest, longest)]


def _check_blocks(bundle: Bundle, plan: ModelPlan) -> None:
    """Raise StartupError if the longest sequence does not fit: requests without a length limit would all be refused."""
    model, num_blocks = bundle.manifest.model, plan.limits.kv_cache_blocks
    needed = blocks_of_longest(*model.longest_cached, BLOCK_SIZE)
    if num_blocks is not None and num_blocks < needed:
        raise StartupError(
            f"kv_cache_blocks is {num_blocks}; it must be at least {needed}, "
            f"which one sequence of {model.longest_cached[0]} source and {model.longest_cached[1]} target tokens needs"
        )


def _encode_budget(bundle: Bundle, plan: ModelPlan, num_lanes: int) -> EncodeBudget | None:
    """Return the memory budget of encoding in one of several lanes. Raises StartupError if no source fits it."""
    budget = encode_budget(bundle, bundle.graph_set(plan.precision), plan.limits, num_lanes)
    if budget is not None and num_lanes == 1 and not budget.fits(1, 1):
        raise StartupError(
            f"workspace_limit_bytes is {plan.limits.workspace_limit_bytes}; it must be at least "
            f"{math.ceil(LIMIT_MARGIN * budget.predict(1, 1))}, what a source of one token is predicted to need"
        )
    return budget
