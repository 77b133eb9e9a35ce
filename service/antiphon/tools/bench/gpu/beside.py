"""Other sides of the GPU benchmark: `transformers.generate` on the same card, and clients of a server.

Both decode a fixed number of tokens for each source, greedily.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.architecture.config import ModelConfig
from antiphon.tools.bench.processes.server import Served, run_client


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
        given = [list(source) for source in sources]
        run_client(server.target, given[:streams], concurrency=streams, max_new_tokens=num_steps)  # warms up
        speed, _ = run_client(server.target, given, concurrency=streams, max_new_tokens=num_steps)
    return {"streams": streams, "sources": len(given), "tokens_per_s": speed.num_tokens / speed.seconds}
