"""From a bundle on disk to an engine that can start: every reason not to is found here, before gRPC's port opens."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.model.bundle import Bundle, BundleError, load_bundle
from antiphon.model.graph import GraphError
from antiphon.model.ops.workspace import WorkspaceError
from antiphon.model.tokenizer import Tokenizer, TokenizerError, open_tokenizer
from antiphon.service.config import ServerConfig
from antiphon.service.engine import Engine, EngineConfig
from antiphon.service.errors import InvalidArgument
from antiphon.service.explain import Explainer
from antiphon.service.kv_cache import CACHE_BLOCK_SIZE, blocks_of_longest
from antiphon.service.metric_families import MetricFamilies
from antiphon.service.metrics import Metrics
from antiphon.service.options import default_options
from antiphon.service.runners import AnyRunner, open_runner
from antiphon.service.servicer import ServedModel
from antiphon.v1 import inference_pb2 as pb

_PRECISIONS = {"float32": pb.PRECISION_FLOAT32, "int8": pb.PRECISION_INT8}


class StartupError(Exception):
    """The server cannot start with this bundle and configuration; the message names the file or field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model ready to serve: its engine is not started yet."""

    model: ServedModel
    engine: Engine
    name: str
    precision: str


def load(config: ServerConfig, families: MetricFamilies) -> Loaded:
    """Verify the bundle, load its graphs and tokenizer, and build the engine. Raises StartupError."""
    try:
        bundle = load_bundle(config.bundle)
        tokenizer = _tokenizer(bundle)
        runner = _runner(bundle, config)
        runner.warm_up()
        engine = Engine(runner, _engine_config(config), Metrics(families, bundle.manifest.name))
    except (BundleError, TokenizerError, GraphError, WorkspaceError, ValueError) as error:
        raise StartupError(str(error)) from error
    description = _describe(bundle, runner.precision, config.max_message_bytes)
    explainer = Explainer(bundle, precision=runner.precision)
    served = ServedModel(
        description=description,
        tokenizer=tokenizer,
        explainer=explainer if explainer.is_available else None,
        generation=bundle.manifest.generation,
    )
    return Loaded(
        model=served,
        engine=engine,
        name=description.name,
        precision=runner.precision,
    )


def _tokenizer(bundle: Bundle) -> Tokenizer:
    model, text = bundle.manifest.model, bundle.manifest.text
    tokenizer = open_tokenizer(bundle.path, text)
    for name in ("vocab_size", "pad_id", "bos_id", "eos_id", "unk_id"):
        found, expected = getattr(tokenizer, name), getattr(model, name)
        if found != expected:
            raise BundleError(f"{bundle.path / (text.source or '')}: {name} is {found}; the model's is {expected}")
    return tokenizer


def _runner(bundle: Bundle, config: ServerConfig) -> AnyRunner:
    _check_blocks(bundle, config)
    return open_runner(
        bundle,
        max_rows=config.max_num_seqs,
        threads=config.threads,
        precision=config.precision,
        lowering=config.lowering,
        num_blocks=config.kv_cache_blocks,
        workspace_limit_bytes=config.workspace_limit_bytes,
    )


def _check_blocks(bundle: Bundle, config: ServerConfig) -> None:
    """A pool below one longest sequence would start, and then refuse every request that sets no limit."""
    model = bundle.manifest.model
    needed = blocks_of_longest(*model.longest_cached, CACHE_BLOCK_SIZE)
    if config.kv_cache_blocks is not None and config.kv_cache_blocks < needed:
        raise StartupError(
            f"kv_cache_blocks is {config.kv_cache_blocks}; it must be at least {needed}, "
            f"what one sequence of {model.longest_cached[0]} source and {model.longest_cached[1]} target tokens needs"
        )


def _engine_config(config: ServerConfig) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )


def _default_options(bundle: Bundle) -> pb.GenerateOptions:
    """The model's own defaults among the others. Raises StartupError where the bundle's cannot be."""
    try:
        return default_options(bundle.manifest.generation)
    except InvalidArgument as error:
        raise StartupError(f"{bundle.path}: generation: {error}") from None


def _describe(bundle: Bundle, precision: str, max_message_bytes: int) -> pb.Model:
    manifest = bundle.manifest
    model = pb.Model(
        name=manifest.name,
        precision=_PRECISIONS[precision],
        vocabulary_size=manifest.model.vocab_size,
        limits=pb.Limits(
            max_source_len=manifest.model.max_source_len,
            max_target_len=manifest.model.max_target_len,
            max_message_bytes=max_message_bytes,
        ),
        default_options=_default_options(bundle),
    )
    if manifest.provenance is not None:
        model.provenance.source = manifest.provenance.source
        model.provenance.licence = manifest.provenance.licence
        model.provenance.attribution = manifest.provenance.attribution
    return model
