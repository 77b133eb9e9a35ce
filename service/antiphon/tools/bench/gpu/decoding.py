"""Decoding that the GPU benchmark measures: by a runner, by `transformers.generate`, and by clients of a server.

Every target has the same number of tokens. Weights are random, because speed depends on shapes, not on what a model
knows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.manifest import MANIFEST_NAME, Bundle, Lowering, Precision, load_bundle
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.export.export import add_metadata, write_graphs
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.sampling import greedy_sampling
from antiphon.runtime.runner import DecodeBatch, Runner
from antiphon.tools.bench.make_models import pair_tokenizer, random_model
from antiphon.tools.bench.processes import Served, run_client

BART_LARGE: dict[str, object] = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12, num_heads=16, d_ff=4096, activation="gelu",
    positions="learned", positions_offset=2, scale_embeddings=False, embedding_norm=True, max_source_len=1024,
    max_target_len=256,
)  # fmt: skip
"""Shape of facebook/bart-large (Lewis et al. 2020): 406 million weights."""
SHAPES = ("bart-large", "base", "big", "tiny")
THIN = "bart-large-thin"
"""Lengths and vocabulary of bart-large with few weights, for a device that does not compute."""


def shape_of(name: str) -> ModelConfig:
    """Return `bart-large`, THIN, or a preset of the paper; `tiny` with heads and a vocabulary large enough."""
    if name == "bart-large":
        return ModelConfig.model_validate(BART_LARGE)
    if name == THIN:
        few = dict(d_model=32, encoder_layers=1, decoder_layers=1, num_heads=2, d_ff=64)
        return ModelConfig.model_validate(BART_LARGE | few)
    return preset(name, **(dict(num_heads=2, vocab_size=320) if name == "tiny" else {}))


def random_bundle(name: str, precisions: Sequence[Precision], lowerings: Sequence[Lowering], folder: Path) -> Bundle:
    """Write a bundle of a shape whose greedy targets never end. Its graphs are not compared with the model."""
    config, checkpoint, bundle = shape_of(name), folder / "checkpoint", folder / "bundle"
    bundle.mkdir(parents=True)
    tokenizer = pair_tokenizer(config.vocab_size)
    save_checkpoint(checkpoint, config=config, weights=weights_of(random_model(config)), tokenizer=tokenizer)
    loaded = load_checkpoint(checkpoint)
    graphs = write_graphs(loaded.model, bundle, precisions, lowerings)
    add_metadata(loaded, bundle, graphs, f"random-{name}")
    return load_bundle(bundle)


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


def decode(runner: Runner, load: Load, seed: int = 0) -> tuple[Times, NDArray[np.int64]]:
    """Encode random sources and decode greedily; return the times, and the tokens [steps, rows].

    The tokens per second are the most that an engine could reach.
    """
    random = np.random.default_rng(seed)
    sources = random.integers(4, runner.facts.source_vocab_size, (load.rows, load.source_len)).tolist()
    blocks = np.arange(load.num_blocks, dtype=np.int32).reshape(load.rows, -1)
    cross, own = np.split(blocks, [blocks_for(load.source_len)], axis=1)
    began_s = time.perf_counter()
    runner.encode(sources, cross.tolist(), keep_memory=False)
    _first(runner, load, own, cross)  # waits for the encoder
    encoded_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = _steps(runner, load, own, cross)
    times = Times(
        encode_s=encoded_s - began_s,
        decode_s=time.perf_counter() - encoded_s,
        host_s=time.process_time() - cpu_s,
    )
    return times, tokens


def _first(runner: Runner, load: Load, own: NDArray[np.int32], cross: NDArray[np.int32]) -> None:
    """Decode the first token of one row, which the timed steps decode again with the same result."""
    runner.decode(_batch(runner, np.full(1, runner.facts.bos_id), 0, own[:1], cross[:1], load.source_len))


def _steps(runner: Runner, load: Load, own: NDArray[np.int32], cross: NDArray[np.int32]) -> NDArray[np.int64]:
    batch = _batch(runner, np.full(load.rows, runner.facts.bos_id), 0, own, cross, load.source_len)
    tokens = np.empty((load.num_steps, load.rows), np.int64)
    for step in range(load.num_steps):
        tokens[step] = runner.decode(batch).token_ids
        batch.token_ids[:] = np.maximum(tokens[step], 0)
        batch.positions[:] += 1
    return tokens


def _batch(
    runner: Runner,
    token_ids: NDArray[np.int64],
    position: int,
    own: NDArray[np.int32],
    cross: NDArray[np.int32],
    source_len: int,
) -> DecodeBatch:
    rows = len(token_ids)
    return DecodeBatch(
        token_ids=token_ids.astype(np.int64),
        positions=np.full(rows, position, np.int32),
        offsets=np.arange(rows + 1, dtype=np.int32),
        self_tables=own,
        cross_tables=cross,
        source_lens=np.full(rows, source_len, np.int32),
        sampling=greedy_sampling(np.arange(rows, dtype=np.int32)),
    )


def bytes_of_step(runner: Runner, load: Load, weight_bytes: int) -> int:
    """Return the bytes that a step in the middle reads at least: its weights once, and every cached token."""
    cached = load.source_len + load.num_steps // 2
    assert runner.facts.block_size == BLOCK_SIZE
    return weight_bytes + load.rows * cached * runner.facts.cache_bytes_per_token


def generate_with_transformers(
    config: ModelConfig, sources: Sequence[Sequence[int]], num_steps: int, *, device: str, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Measure random BART weights of this shape in bfloat16; batches: sizes of the static batches, 1 is one by one.

    All sources have one length. Needs torch and transformers.
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
        for part in ids.split(batch):
            model.generate(part, attention_mask=torch.ones_like(part), generation_config=settings).cpu()
        return time.perf_counter() - began_s

    figures = []
    with torch.inference_mode():
        for batch in batches:
            seconds_of(batch)  # warms up
            figures.append({"batch": batch, "tokens_per_s": len(sources) * num_steps / seconds_of(batch)})
    return figures


def serve_streams(
    bundle: Path, sources: Sequence[Sequence[int]], num_steps: int, *, device: str, streams: int
) -> dict[str, Any]:
    """Serve a bundle in a process of its own, and measure a client that keeps a number of streams open.

    Raises BenchFailure if the server does not start or the client fails.
    """
    flags = ("--device", device, "--max-num-seqs", str(streams), "--port", "0", "--metrics-port", "0")
    with Served("antiphon.cli", "serve", str(bundle), *flags, "--log-level", "error") as server:
        ids = [list(source) for source in sources]
        run_client(server.target, ids[:streams], concurrency=streams, max_new_tokens=num_steps)  # warms up
        speed = run_client(server.target, ids, concurrency=streams, max_new_tokens=num_steps).speed
    return {"streams": streams, "sources": len(ids), "tokens_per_s": speed.num_tokens / speed.seconds}
