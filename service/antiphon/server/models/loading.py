"""Builds an engine from a bundle on disk. Finds every reason not to serve it before it is served."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial

from antiphon.bundle.manifest import Bundle, GraphSet, load_bundle
from antiphon.bundle.position_tables import read_position_tables
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.engine.admission import limits_of
from antiphon.engine.engine import Engine
from antiphon.engine.remote import EngineLink, RemoteEngine
from antiphon.errors import BundleError, ModelError
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.ops.cache_geometry import blocks_of_longest
from antiphon.ops.cuda.driver import CudaDevice
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
from antiphon.runtime.runner import ModelFacts
from antiphon.runtime.warm_up import NotFinite, warm_up
from antiphon.server.models.memory import (
    LIMIT_MARGIN,
    MemoryBudget,
    ModelMemory,
    Need,
    block_bytes_of,
    check_memory,
    encode_budget,
    need_of,
    weight_bytes,
)
from antiphon.server.settings import ModelPlan
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

# Time for the engine's process to serve a model that a front loads: it loads it first.
_ENGINE_PATIENCE_S = 60.0


class StartupError(Exception):
    """A bundle cannot be served with these settings. The message names the file or field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedResources:
    """Objects that the models of a process share."""

    families: MetricFamilies
    pacing: Pacing
    budget: MemoryBudget
    machine_bytes: int | None = None
    """Memory of the machine; None if unknown."""
    num_workers: int = 1
    """Processes that serve the same models."""
    device: CudaDevice | None = None
    """GPU on which models run; None is the processor."""
    needs_device: bool = True
    """False to run a model on the processor if its bundle has no cuda graphs."""
    long_texts: LongTexts = field(default_factory=LongTexts)
    engine_link: EngineLink | None = None
    """Link of a front to the process of the engines; None where the engines are in this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenGraphs:
    """Opened graphs of a model."""

    runners: tuple[AnyRunner, ...]
    """One for each lane."""
    limits: EngineLimits
    memory: ModelMemory
    """Bytes that the model holds, in the memory where it runs."""
    scorer: NextTokenScorer | None = None
    """Opens the same graphs at its first call; None without a decoder and on a GPU."""


@dataclass(frozen=True, slots=True)
class _Processor:
    """Runs the graphs of a model on the processor, in one or several lanes."""

    bundle: Bundle
    graphs: GraphSet
    plan: ModelPlan
    num_workers: int

    def need(self) -> Need:
        """Return the memory of this machine that the model needs."""
        num_lanes = max(_possible_lanes(self.bundle, self.plan))
        return need_of(self.bundle, self.graphs, self.plan.limits, num_lanes, num_workers=self.num_workers)

    def open(self, need: Need) -> _OpenGraphs:
        """Open the graphs of every lane. Raises StartupError."""
        bundle, plan, limits = self.bundle, self.plan, self.plan.limits
        _encode_budget(bundle, plan, 1)  # no source may fit, which must be said before graphs are loaded
        _check_blocks(bundle, plan)
        rows, threads, precision = limits.max_num_seqs, plan.threads, plan.precision
        num_lanes = fastest_num_lanes(
            bundle, _possible_lanes(bundle, plan), max_rows=rows, threads=threads, precision=precision
        )
        runners = open_lanes(
            bundle,
            num_lanes=num_lanes,
            max_rows=rows,
            threads=threads,
            precision=precision,
            num_blocks=limits.kv_cache_blocks,
            workspace_limit_bytes=limits.workspace_limit_bytes,
        )
        return _OpenGraphs(
            runners=runners,
            limits=replace(limits, encode_budget=_encode_budget(bundle, plan, len(runners))),
            memory=need.memory,
            scorer=self.scorer() if runners[0].facts.has_decoder else None,
        )

    def scorer(self) -> NextTokenScorer:
        """Return the scorer of next tokens, which opens the graphs at its first call."""
        limit_bytes, precision = self.plan.limits.workspace_limit_bytes, self.graphs.precision
        return NextTokenScorer(
            partial(
                open_runner, self.bundle, max_rows=1, threads=1, precision=precision, workspace_limit_bytes=limit_bytes
            )
        )


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Runs the graphs of a model on a GPU, in one lane."""

    bundle: Bundle
    graphs: GraphSet
    plan: ModelPlan
    device: CudaDevice

    def need(self) -> Need:
        """Return no need: the budget counts the memory of this machine."""
        nothing = ModelMemory(weight_bytes=0, cache_bytes=0, workspace_bytes=0)
        return Need(memory=nothing, num_blocks=0, block_bytes=0, fewest_blocks=0)

    def open(self, need: Need) -> _OpenGraphs:
        """Open the graphs of the lane. Raises StartupError if more lanes are set."""
        bundle, limits = self.bundle, self.plan.limits
        if self.plan.lanes not in (1, "auto"):
            raise StartupError(f"lanes is {self.plan.lanes}; on a GPU it must be 1")
        _check_blocks(bundle, self.plan)
        weights, limit_bytes = weight_bytes(bundle, self.graphs), limits.workspace_limit_bytes
        runner = open_cuda_runner(
            bundle,
            self.device,
            max_rows=limits.max_num_seqs,
            precision=self.graphs.precision,
            num_blocks=limits.kv_cache_blocks,
            memory_limit_bytes=None if limit_bytes is None else limit_bytes + weights,
        )
        num_blocks = runner.facts.num_blocks
        cache_bytes = num_blocks * block_bytes_of(bundle.manifest.model, self.graphs) if num_blocks else 0
        # The workspace is not known before the first runs.
        memory = ModelMemory(weight_bytes=weights, cache_bytes=cache_bytes, workspace_bytes=0)
        return _OpenGraphs(runners=(runner,), limits=limits, memory=memory)


def _backend(bundle: Bundle, plan: ModelPlan, resources: SharedResources) -> _Processor | _Gpu:
    """Return the GPU if there is one, else the processor. Raises BundleError if the bundle has no graphs for it."""
    if resources.device is not None:
        try:
            return _Gpu(bundle, bundle.graph_set(plan.precision, "cuda"), plan, resources.device)
        except BundleError as error:
            if resources.needs_device:
                raise
            log.info("%s runs on the processor: %s", bundle.manifest.name, error)
    return _Processor(bundle, bundle.graph_set(plan.precision), plan, resources.num_workers)


def load(plan: ModelPlan, resources: SharedResources) -> LoadedModel:
    """Verify the bundle, load its graphs and tokenizer, and build an engine without starting it.

    Raises StartupError, or OverBudget before any graph is loaded; then everything is released.
    """
    try:
        bundle = load_bundle(plan.path)
        name = plan.name or bundle.manifest.name
        if resources.engine_link is not None:
            return _open_remote(bundle, name, plan, resources, resources.engine_link)
        backend = _backend(bundle, plan, resources)
        need = backend.need()
        resources.budget.reserve(name, need)
        try:
            check_memory(resources.budget.reserved, resources.machine_bytes)
            return _open(bundle, name, plan, resources, backend, need)
        except BaseException:
            resources.budget.release(name)
            raise
    except (ModelError, ValueError) as error:
        raise StartupError(str(error)) from error


def open_shortlist(bundle: Bundle) -> Shortlist | None:
    """Map the bundle's shortlist. Raises BundleError if it does not fit the model."""
    config, name = bundle.manifest.model, bundle.manifest.text.shortlist
    if name is None:
        return None
    return Shortlist.read(
        bundle.file(name), num_sources=config.resolved_source_vocab_size, num_targets=config.vocab_size
    )


def _open(
    bundle: Bundle, name: str, plan: ModelPlan, resources: SharedResources, backend: _Processor | _Gpu, need: Need
) -> LoadedModel:
    tokenizer = _tokenizer(bundle)
    graphs, opened = backend.graphs, backend.open(need)
    runner = opened.runners[0]
    for lane_runner in opened.runners:
        _warm_up(bundle, graphs, lane_runner)
    description = _described(bundle, runner, tokenizer, opened.limits, plan)
    description.name = name
    model = _model_info(bundle, description, tokenizer, runner.facts, opened.scorer)
    metrics = _metrics(Metrics(resources.families, name), bundle, graphs, opened.memory)
    metrics.watch_arena(*(lane_runner.workspace for lane_runner in opened.runners))
    engine = Engine(runner, opened.limits, metrics, more_runners=opened.runners[1:])
    return LoadedModel(
        name=name,
        precision=runner.facts.precision,
        servicer=InferenceServicer(model, engine, resources.pacing, resources.long_texts),
        engine=engine,
        description=description,
        metrics=metrics,
    )


def _open_remote(
    bundle: Bundle, name: str, plan: ModelPlan, resources: SharedResources, link: EngineLink
) -> LoadedModel:
    """Return a model whose engine is in another process. Raises StartupError if that does not serve it in time."""
    remote = link.model(name, _ENGINE_PATIENCE_S)
    if remote is None:
        raise StartupError(f"the process of the engine does not serve a model {name!r}")
    tokenizer, facts = _tokenizer(bundle), remote.facts
    description = pb.Model.FromString(remote.description)
    scorer = None
    if facts.lowering == "native" and facts.has_decoder:
        scorer = _Processor(bundle, bundle.graph_set(plan.precision), plan, resources.num_workers).scorer()
    metrics = Metrics(resources.families, name)
    engine = RemoteEngine(name, link, remote, tokenizer, metrics)
    model = _model_info(bundle, description, tokenizer, facts, scorer)
    return LoadedModel(
        name=name,
        precision=facts.precision,
        servicer=InferenceServicer(model, engine, resources.pacing, resources.long_texts),
        engine=engine,
        description=description,
        metrics=metrics,
    )


def _model_info(
    bundle: Bundle, description: pb.Model, tokenizer: Tokenizer, facts: ModelFacts, scorer: NextTokenScorer | None
) -> ModelInfo:
    explainer = Explainer(bundle, precision=facts.precision)
    positions = bundle.manifest.positions
    return ModelInfo(
        description=description,
        tokenizer=tokenizer,
        text=bundle.manifest.text,
        config=bundle.manifest.model,
        explainer=explainer if explainer.is_available else None,
        scorer=scorer,
        read_position_tables=None if positions is None else partial(read_position_tables, bundle.file(positions)),
        generation=bundle.manifest.generation,
        shortlist=open_shortlist(bundle) if facts.lowering == "native" else None,  # GPUs have no kernel for it
    )


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
        value, expected = getattr(tokenizer, name), getattr(model, name)
        if value != expected:
            raise BundleError(f"{bundle.path / (text.source or '')}: {name} is {value}; the model's is {expected}")
    return tokenizer


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
    needed = blocks_of_longest(model)
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
