"""The packed encoder and the paged decoder in PyTorch compared with the Transformer, for every variant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.export.bundle_model import reserve
from antiphon.export.packed import PackedEncoder, PagedDecoder, PagedRows
from antiphon.ops.cache_geometry import pool_axes
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.operators import ints, ramp
from tests.parity.conftest import VARIANTS
from tests.parity.exports import small_config

ALL_VARIANTS: dict[str, dict[str, object]] = {
    "paper": {},
    **VARIANTS,
    "none_untied": dict(
        positions="none", tie_output=False, tie_source_target=False, scale_embeddings=False, head_dim=10
    ),
    "t5_post_short_reach": dict(
        positions="t5_relative", relative_buckets=8, relative_max_distance=12, activation="gelu", attention_scale=0.7
    ),
    "rope_gated_post": dict(positions="rope", gated=True, norm="rmsnorm", head_dim=6),
    "embedding_norm_pre": dict(embedding_norm=True, norm="rmsnorm", norm_placement="pre"),
    "m2m_100": dict(norm_placement="pre", sinusoids="fairseq", positions_offset=2),
    "silu_gated": dict(activation="silu", gated=True),
    "uneven_heads": dict(
        module_heads=dict(encoder_self=[4, 2], decoder_self=[1, 3], decoder_cross=[2, 1]), norm_placement="pre"
    ),
    "uneven_heads_rope": dict(
        module_heads=dict(encoder_self=[1, 3], decoder_self=[2, 1], decoder_cross=[3, 4]), positions="rope"
    ),
    "capped": dict(
        positions="rope", norm="rmsnorm", norm_placement="pre", post_norms=True, attention_cap=0.5, output_cap=1.0,
        activation="gelu_tanh", gated=True, bias=False, attention_scale=0.4,
    ),
    "alibi_six_heads": dict(positions="alibi", num_heads=6, head_dim=8, bias=False, norm_placement="pre"),
}  # fmt: skip
SOURCE_LENS = (1, 16, 33, 7)
# New tokens of each row in each step: prefixes and single tokens.
CHUNKS = ((1, 4, 17, 2), (3, 1, 1, 1), (1, 1, 2, 14))
TOLERANCE = 1e-5  # float32 sums in another order, over two layers


def expected_logits(model: Transformer, sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(source[None], target[None])[0] for source, target in zip(sources, targets, strict=True)]


@pytest.mark.parametrize("name", ALL_VARIANTS)
def test_packed_and_paged_modules_equal_the_transformer(name: str) -> None:
    config = small_config(max_target_len=40, **ALL_VARIANTS[name])
    model = random_transformer(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randint(4, config.vocab_size, (length,), generator=generator) for length in SOURCE_LENS]
    totals = [sum(counts) for counts in zip(*CHUNKS, strict=True)]
    targets = [torch.randint(4, config.vocab_size, (total,), generator=generator) for total in totals]
    pool = reserve(ints(*SOURCE_LENS), max(totals), pool_axes(config), np.dtype("float32"))
    self_tables, cross_tables, cache = map(torch.from_numpy, (pool.self_tables, pool.cross_tables, pool.cache))
    offsets, source_lens = torch.from_numpy(ramp(SOURCE_LENS)), torch.tensor(SOURCE_LENS, dtype=torch.int32)
    encoder, decoder = PackedEncoder(model).eval(), PagedDecoder(model).eval()
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in SOURCE_LENS])
    with torch.no_grad():
        written, memory, cache = encoder(torch.cat(sources), positions, offsets, cross_tables, cache)
        encoded = torch.cat([model.encode(source[None])[0] for source in sources])
    assert written.tolist() == [sum(SOURCE_LENS)]
    torch.testing.assert_close(memory, encoded, atol=TOLERANCE, rtol=TOLERANCE)
    wanted = expected_logits(model, sources, targets)
    held = [0] * len(sources)
    for counts in CHUNKS:
        pieces = [range(start, start + count) for start, count in zip(held, counts, strict=True)]
        rows = PagedRows(
            positions=torch.tensor([position for piece in pieces for position in piece], dtype=torch.int32),
            offsets=torch.from_numpy(ramp(counts)),
            self_tables=self_tables,
            cross_tables=cross_tables,
            source_lens=source_lens,
            cache=cache,
        )
        ids = torch.cat([target[piece.start : piece.stop] for target, piece in zip(targets, pieces, strict=True)])
        with torch.no_grad():
            logits = model.logits(decoder.step(ids, rows))
        cache, held = rows.cache, [piece.stop for piece in pieces]
        reference = torch.cat([row[piece.start : piece.stop] for row, piece in zip(wanted, pieces, strict=True)])
        torch.testing.assert_close(logits, reference, atol=TOLERANCE, rtol=TOLERANCE)
