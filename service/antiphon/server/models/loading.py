"""Builds an engine from a bundle on disk. Finds every reason not to serve it before it is served."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial

from antiphon.bundle.graph import GraphError
from antiphon.bundle.manifest import Bundle, BundleError, GraphSet, load_bundle
from antiphon.bundle.position_tables import read_position_tables
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.engine.engine import Engine
from antiphon.engine.scheduling.admission import limits_of
from antiphon.observability.metrics.engine_metrics import Metrics
from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_of_longest
from antiphon.ops.cuda.driver import CudaDevice, CudaError
from antiphon.ops.workspace import WorkspaceError
from antiphon.rpc.v1.inputs import LongTexts
from antiphon.rpc.v1.model_info import ModelInfo, describe
from antiphon.rpc.v1.models import LoadedModel
from antiphon.rpc.v1.servicer import InferenceServicer
from antiphon.rpc.v1.streaming import Pacing
from antiphon.runtime.explain import Explainer, NextTokenScorer
from antiphon.runtime.lanes import (
    AnyRunner,
    fastest_num_lanes,
    open_cuda_runner,
    open_lanes,
    open_runner,
    possible_lanes,
)
from antiphon.runtime.warm_up import NotFinite, warm_up
from antiphon.server.models.machine import check_memory
from antiphon.server.models.memory import (
    LIMIT_MARGIN,
    MemoryBudget,
    ModelMemory,
    Need,
    block_bytes_of,
    encode_budget,
    need_of,
    weight_bytes,
)
from antiphon.server.models.model_settings import ModelPlan
from antiphon.text.tokenizer import Tokenizer, TokenizerError, open_tokenizer
from antiphon.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)


class StartupError(Exception):
    """A bundle cannot be served with these settings. The message names the file or field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Parts that the models of a process share.

    machine_bytes: memory of the machine; None if unknown. num_workers: processes that serve the same models.
    device: GPU on which models run; None is the processor. needs_device: False to run a model on the processor if its
    bundle has no cuda graphs.
    """

    families: MetricFamilies
    pacing: Pacing
    budget: MemoryBudget
    machine_bytes: int | None = None
    num_workers: int = 1
    device: CudaDevice | None = None
    needs_device: bool = True
    long_texts: LongTexts = field(default_factory=LongTexts)


def load(plan: ModelPlan, shared: Shared) -> LoadedModel:
    """Verify the bundle, load its graphs and tokenizer, and build an engine without starting it.

    Raises StartupError, or OverBudget before any graph is loaded; then everything is released.
    """
    try:
        bundle = load_bundle(plan.path)
        name = plan.name or bundle.manifest.name
        graphs = _graphs(bundle, plan, shared)
        need = _need(bundle, graphs, plan, shared)
        shared.budget.take(name, need)
        try:
            check_memory(shared.budget.held, shared.machine_bytes)
            return _open(bundle, graphs, name, plan, shared, need.memory)
        except BaseException:
            shared.budget.give_back(name)
            raise
    except (BundleError, TokenizerError, GraphError, WorkspaceError, CudaError, ValueError) as error:
        raise StartupError(str(error)) from error


def _graphs(bundle: Bundle, plan: ModelPlan, shared: Shared) -> GraphSet:
    """Return the graphs to serve: on the device if there is one. Raises BundleError if the bundle has none for it."""
    if shared.device is None:
        return bundle.graph_set(plan.precision)
    try:
        return bundle.graph_set(plan.precision, "cuda")
    except BundleError as error:
        if shared.needs_device:
            raise
        log.info("%s runs on the processor: %s", bundle.manifest.name, error)
        return bundle.graph_set(plan.precision)


def _need(bundle: Bundle, graphs: GraphSet, plan: ModelPlan, shared: Shared) -> Need:
    """Return the memory of this machine that the model needs. The memory of a GPU is no part of it."""
    if graphs.lowering == "cuda":
        nothing = ModelMemory(weight_bytes=0, cache_bytes=0, workspace_bytes=0)
        return Need(memory=nothing, num_blocks=0, block_bytes=0, fewest_blocks=0)
    num_lanes = max(_possible_lanes(bundle, plan))
    return need_of(bundle, graphs, plan.limits, num_lanes, num_workers=shared.num_workers)


def _open(
    bundle: Bundle, graphs: GraphSet, name: str, plan: ModelPlan, shared: Shared, memory: ModelMemory
) -> LoadedModel:
    tokenizer = _tokenizer(bundle)
    limits = plan.limits
    if graphs.lowering == "cuda":
        assert shared.device is not None
        runners = _cuda_runners(bundle, graphs, plan, shared.device)
        memory = _device_memory(bundle, graphs, runners[0])
    else:
        _encode_budget(bundle, plan, 1)  # no source may fit, which must be said before graphs are loaded
        runners = _runners(bundle, plan)
        limits = replace(limits, encode_budget=_encode_budget(bundle, plan, len(runners)))
    runner, *further = runners
    for one in runners:
        _warm_up(bundle, graphs, one)
    description = _described(bundle, runner, tokenizer, limits, plan)
    description.name = name
    explainer = Explainer(bundle, precision=runner.facts.precision)
    positions = bundle.manifest.positions
    model = ModelInfo(
        description=description,
        tokenizer=tokenizer,
        text=bundle.manifest.text,
        config=bundle.manifest.model,
        explainer=explainer if explainer.is_available else None,
        scorer=_scorer(bundle, graphs, plan) if runner.facts.has_decoder else None,
        read_position_tables=None if positions is None else partial(read_position_tables, bundle.file(positions)),
        generation=bundle.manifest.generation,
    )
    metrics = _metrics(Metrics(shared.families, name), bundle, graphs, memory)
    metrics.watch_arena(*(one.workspace for one in runners))
    engine = Engine(runner, limits, metrics, further=further)
    return LoadedModel(
        name=name,
        precision=runner.facts.precision,
        servicer=InferenceServicer(model, engine, shared.pacing, shared.long_texts),
        engine=engine,
        description=description,
        metrics=metrics,
    )


def _scorer(bundle: Bundle, graphs: GraphSet, plan: ModelPlan) -> NextTokenScorer | None:
    """Return the scorer of next tokens, which opens the same graphs at its first call; None on a GPU."""
    if graphs.lowering == "cuda":
        return None
    limit_bytes = plan.limits.workspace_limit_bytes
    return NextTokenScorer(
        partial(
            open_runner, bundle, max_rows=1, threads=1, precision=graphs.precision, workspace_limit_bytes=limit_bytes
        )
    )


def _device_memory(bundle: Bundle, graphs: GraphSet, runner: AnyRunner) -> ModelMemory:
    """Return the bytes of a GPU that a model holds; the workspace is not known before its first runs."""
    cache_bytes = (
        runner.facts.num_blocks * block_bytes_of(bundle.manifest.model, graphs) if runner.facts.num_blocks else 0
    )
    return ModelMemory(weight_bytes=weight_bytes(bundle, graphs), cache_bytes=cache_bytes, workspace_bytes=0)


def _metrics(metrics: Metrics, bundle: Bundle, graphs: GraphSet, memory: ModelMemory) -> Metrics:
    """Return the metrics of a model after reporting its memory, precision and workspace fit."""
    metrics.holds(weights=memory.weight_bytes, cache=memory.cache_bytes, workspace=memory.workspace_bytes)
    architecture = bundle.manifest.model.architecture
    metrics.is_served(precision=graphs.precision, lowering=graphs.lowering, architecture=architecture)
    if (fit := bundle.memory_fit(graphs)) is not None:
        metrics.predicts_by(fit)
    return metrics


def _described(
    bundle: Bundle, runner: AnyRunner, tokenizer: Tokenizer, limits: EngineLimits, plan: ModelPlan
) -> pb.Model:
    longest = limits_of(runner, limits).facts.max_source_len
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


def _warm_up(bundle: Bundle, graphs: GraphSet, runner: AnyRunner) -> None:
    try:
        warm_up(runner)
    except NotFinite as error:
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


def _cuda_runners(bundle: Bundle, graphs: GraphSet, plan: ModelPlan, device: CudaDevice) -> tuple[AnyRunner, ...]:
    """Return the runner of the one lane of a GPU. Raises StartupError if more are set."""
    if plan.lanes not in (1, "auto"):
        raise StartupError(f"lanes is {plan.lanes}; on a GPU it must be 1")
    _check_blocks(bundle, plan)
    limit_bytes = plan.limits.workspace_limit_bytes
    runner = open_cuda_runner(
        bundle,
        device,
        max_rows=plan.limits.max_num_seqs,
        precision=graphs.precision,
        num_blocks=plan.limits.kv_cache_blocks,
        memory_limit_bytes=None if limit_bytes is None else limit_bytes + weight_bytes(bundle, graphs),
    )
    return (runner,)


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
