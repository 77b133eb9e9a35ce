"""Decoding that `make card` measures: by a runner, by `transformers.generate`, and by clients of a server.

Every target has the same number of tokens. Weights are random, because speed depends on shapes, not on what a model
knows. Only making a model and `transformers.generate` need torch.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.manifest import MANIFEST_NAME, Bundle, Lowering, Precision, load_bundle
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.sampling import FLOAT_PARAMS, SamplingArrays, greedy_sampling
from antiphon.runtime.runner import DecodeBatch, Runner
from antiphon.tools.bench.processes import Served, run_client
from antiphon.tools.bench.report import Speed

BART_LARGE: dict[str, object] = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12, num_heads=16, d_ff=4096, activation="gelu",
    positions="learned", positions_offset=2, scale_embeddings=False, embedding_norm=True, max_source_len=1024,
    max_target_len=256,
)  # fmt: skip
"""Shape of facebook/bart-large (Lewis et al. 2020): 406 million weights."""
SHAPES = ("bart-large", "base", "big", "tiny")
THIN = "bart-large-thin"
"""Lengths and vocabulary of bart-large with few weights, for a device that does not compute."""
_SEED = 1


def shape_of(name: str) -> ModelConfig:
    """Return `bart-large`, THIN, or a preset; `tiny` with heads and a vocabulary large enough.

    `PRESET-ssru` has an SSRU decoder. `bert-base` and `bert-tiny` are encoders whose special tokens have our ids.
    """
    if name == "bart-large":
        return ModelConfig.model_validate(BART_LARGE)
    if name == THIN:
        few = dict(d_model=32, encoder_layers=1, decoder_layers=1, num_heads=2, d_ff=64)
        return ModelConfig.model_validate(BART_LARGE | few)
    if name.startswith("bert"):
        few = dict(vocab_size=320, d_model=32, encoder_layers=1, num_heads=2, d_ff=64, max_source_len=64)
        bert = preset("bert-base", heads=[], bos_id=1, eos_id=2, unk_id=3)
        return bert if name == "bert-base" else ModelConfig.model_validate(bert.model_dump() | few)
    size, _, decoder_self = name.partition("-")
    overrides: dict[str, object] = dict(decoder_self=decoder_self or "attention")
    return preset(size, **overrides, **(dict(num_heads=2, vocab_size=320) if size == "tiny" else {}))


def random_bundle(name: str, precisions: Sequence[Precision], lowerings: Sequence[Lowering], folder: Path) -> Bundle:
    """Write a bundle of a shape whose greedy targets never end to folder/bundle, completely or not at all.

    Its graphs are not compared with the model. Needs torch.
    """
    from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
    from antiphon.export.export import add_metadata, write_graphs
    from antiphon.tools.bench.make_models import pair_tokenizer, random_model
    from antiphon.transformer.random_model import random_transformer

    config = shape_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".bundle.", dir=folder))
    try:
        checkpoint, bundle = work / "checkpoint", work / "bundle"
        bundle.mkdir()
        model = random_model(config) if config.decoder_layers else random_transformer(config, _SEED)
        save_checkpoint(
            checkpoint, config=config, weights=weights_of(model), tokenizer=pair_tokenizer(config.vocab_size)
        )
        loaded = load_checkpoint(checkpoint)
        graphs = write_graphs(loaded.model, bundle, precisions, lowerings)
        add_metadata(loaded, bundle, graphs, f"random-{name}")
        bundle.rename(folder / "bundle")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return load_bundle(folder / "bundle")


def kept_bundle(folder: Path) -> Bundle | None:
    """Return the bundle that `random_bundle` wrote to this folder before, or None."""
    bundle = folder / "bundle"
    return load_bundle(bundle) if (bundle / MANIFEST_NAME).is_file() else None


def step_weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of bfloat16 weights that one decoder step reads: its products, and that over the vocabulary.

    For ungated models whose heads together are as wide as the states. Keys and values of sources are computed once by
    the encoder's pass, so the products of cross attention are those of queries and outputs.
    """
    attention, feed_forward = (4 + 2) * config.d_model**2, 2 * config.d_model * config.d_ff
    return 2 * (config.decoder_layers * (attention + feed_forward) + config.vocab_size * config.d_model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Rows that decode together, tokens of each source, and tokens that each row decodes."""

    rows: int
    source_len: int
    num_steps: int

    @property
    def num_blocks(self) -> int:
        """Cache blocks of all rows."""
        return self.rows * (blocks_for(self.source_len) + blocks_for(self.num_steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Wall-clock seconds of encoding and of decoding, and CPU seconds of this process while it decoded."""

    encode_s: float
    decode_s: float
    host_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Times of one run, its tokens [steps, rows], and their log-probabilities [steps, rows], 0 if not asked for."""

    times: Times
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def decode(runner: Runner, load: Load, sampling: Mapping[str, float] | None = None) -> Decoded:
    """Encode random sources and decode; the sources depend on the load only.

    sampling: parameters of every row, by the names of ops/sampling.py; None is greedy, without log-probabilities.
    The tokens per second are the most that an engine could reach.
    """
    random = np.random.default_rng(0)
    sources = random.integers(4, runner.facts.source_vocab_size, (load.rows, load.source_len)).tolist()
    num_cross, num_own = blocks_for(load.source_len), blocks_for(load.num_steps, runner.facts.target_block_size)
    blocks = np.arange(load.rows * (num_cross + num_own), dtype=np.int32).reshape(load.rows, -1)
    cross, own = np.split(blocks, [num_cross], axis=1)
    batch = _batch(runner, load, own, cross, _sampling_of(load.rows, sampling or {}))
    began_s = time.perf_counter()
    runner.encode(sources, cross.tolist(), keep_memory=False)
    _first(runner, load, own, cross)  # waits for the encoder
    encoded_s, cpu_s = time.perf_counter(), time.process_time()
    tokens, logprobs = _steps(runner, load, batch)
    times = Times(
        encode_s=encoded_s - began_s,
        decode_s=time.perf_counter() - encoded_s,
        host_s=time.process_time() - cpu_s,
    )
    return Decoded(times=times, tokens=tokens, logprobs=logprobs)


def _sampling_of(rows: int, parameters: Mapping[str, float]) -> SamplingArrays:
    """Return greedy sampling with these parameters changed, and a seed of its own for each row."""
    arrays = greedy_sampling(np.arange(rows, dtype=np.int32))
    arrays.seeds[:] = np.arange(rows)
    for name, value in parameters.items():
        column = arrays.floats(name) if name in FLOAT_PARAMS else arrays.ints(name)
        column[:] = value
    return arrays


def _first(runner: Runner, load: Load, own: NDArray[np.int32], cross: NDArray[np.int32]) -> None:
    """Decode the first token of one row, which the timed steps decode again with the same result."""
    runner.decode(_batch(runner, load, own[:1], cross[:1], _sampling_of(1, {})))


def _steps(runner: Runner, load: Load, batch: DecodeBatch) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    tokens = np.empty((load.num_steps, load.rows), np.int64)
    logprobs = np.empty((load.num_steps, load.rows), np.float32)
    for step in range(load.num_steps):
        samples = runner.decode(batch)
        tokens[step], logprobs[step] = samples.token_ids, samples.logprobs
        batch.token_ids[:] = np.maximum(tokens[step], 0)
        batch.positions[:] += 1
    return tokens, logprobs


def _batch(
    runner: Runner, load: Load, own: NDArray[np.int32], cross: NDArray[np.int32], sampling: SamplingArrays
) -> DecodeBatch:
    """Return the batch of a first step, whose rows hold all their blocks already."""
    rows = len(own)
    return DecodeBatch(
        token_ids=np.full(rows, runner.facts.bos_id, np.int64),
        positions=np.zeros(rows, np.int32),
        offsets=np.arange(rows + 1, dtype=np.int32),
        self_tables=own,
        cross_tables=cross,
        source_lens=np.full(rows, load.source_len, np.int32),
        sampling=sampling,
        num_own=np.full(rows, own.shape[1], np.int32),
    )


def bytes_of_step(runner: Runner, load: Load, weight_bytes: int) -> int:
    """Return the bytes that a step in the middle reads at least: its weights once, and every cached token."""
    cached = load.source_len + load.num_steps // 2
    assert runner.facts.block_size == BLOCK_SIZE
    return weight_bytes + load.rows * cached * runner.facts.cache_bytes_per_token


def generate_with_transformers(
    config: ModelConfig, sources: Sequence[Sequence[int]], num_steps: int, *, device: str, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Measure random BART weights of this shape in bfloat16, one static batch of each size in `batches`.

    All sources have one length; there are at least as many as the largest batch. Needs torch and transformers.
    """
    import torch
    from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

    shape = BartConfig(
        vocab_size=config.vocab_size, d_model=config.d_model, encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers, encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads, encoder_ffn_dim=config.d_ff, decoder_ffn_dim=config.d_ff,
        max_position_embeddings=max(config.max_source_len, config.max_target_len), forced_eos_token_id=None,
    )  # fmt: skip
    made: Any = BartForConditionalGeneration(shape)
    model = made.to(device=device, dtype=torch.bfloat16).eval()
    settings_of: Any = GenerationConfig
    settings = settings_of(
        max_new_tokens=num_steps, min_new_tokens=num_steps, do_sample=False, num_beams=1, decoder_start_token_id=2,
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    ids: Any = torch.tensor(sources, device=device)

    def seconds_of(batch: int) -> float:
        began_s = time.perf_counter()
        part = ids[:batch]
        model.generate(part, attention_mask=torch.ones_like(part), generation_config=settings).cpu()
        return time.perf_counter() - began_s

    figures = []
    with torch.inference_mode():
        for batch in batches:
            seconds_of(batch)  # warms up
            figures.append({"batch": batch, "tokens_per_s": batch * num_steps / seconds_of(batch)})
    return figures


def serve(
    bundle: Path,
    sources: Sequence[Sequence[int]],
    num_steps: int,
    *,
    device: str,
    rows: int,
    flags: Sequence[str] = (),
    kinds: Sequence[str] = ("streams", "many"),
) -> Iterator[tuple[str, Speed]]:
    """Serve a bundle in a process of its own; yield the speed of a client that keeps `rows` requests open, by its kind.

    kinds: as in bench/client.py. flags: further flags of `antiphon serve`. Each kind runs once before it is measured.
    Raises BenchFailure if the server does not start or the client fails.
    """
    settings = ("--device", device, "--max-num-seqs", str(rows), "--port", "0", "--metrics-port", "0")
    with Served("antiphon.cli", "serve", str(bundle), *settings, "--log-level", "error", *flags) as server:
        ids = [list(source) for source in sources]
        for kind in kinds:
            run_client(server.target, ids[:rows], kind=kind, concurrency=rows, max_new_tokens=num_steps)
            run = run_client(server.target, ids, kind=kind, concurrency=rows, max_new_tokens=num_steps)
            yield kind, run.speed
