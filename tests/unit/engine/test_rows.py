"""Arrays of running rows compared with their sequences, under random joins, ends and prefixes."""

import asyncio
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.controls.table import MAX_SEED
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.batch import RunningRows
from antiphon.engine.kv_cache import BlockPool
from antiphon.engine.sequence import Sequence, SequenceGroup
from antiphon.engine.stream import OutputStream
from antiphon.ops.cache_geometry import blocks_for
from antiphon.runtime.runner import DecodeBatch
from tests.fakes import BOS_ID, request_of, source_of

MAX_ROWS = 6
BLOCK_SIZE = 4
MAX_LEN = 20


class Model:
    """Rows, and lists of the tokens that each sequence has fed and is to feed next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        width = blocks_for(MAX_LEN, BLOCK_SIZE)
        self.rows = RunningRows(MAX_ROWS, self_width=width, cross_width=width)
        self.pool = BlockPool(2 * width * MAX_ROWS, BLOCK_SIZE)
        self.loop = loop
        self.order: list[Sequence] = []
        self.pending: dict[str, list[int]] = {}
        self.fed: dict[str, int] = {}
        self.count = 0

    def add(self, params: SamplingParams, prefix: tuple[int, ...], source_len: int) -> None:
        self.count += 1
        name = str(self.count)
        request = request_of(name, source_of(target_len=3, length=source_len), params=params, prefix=prefix)
        group = SequenceGroup(
            request=request,
            stream=OutputStream(name, loop=self.loop),
            max_new_tokens=3,
            num_rows=1,
            num_self_blocks=blocks_for(len(prefix) + 4, BLOCK_SIZE),
            num_cross_blocks=blocks_for(source_len, BLOCK_SIZE),
        )
        group.cross_block_table = self.pool.allocate(group.num_cross_blocks)
        blocks = self.pool.allocate(group.num_self_blocks)
        sequence = Sequence(group=group, index=0, sink=group.stream, self_block_table=blocks)
        self.rows.append([sequence], BOS_ID)
        self.order.append(sequence)
        self.pending[name], self.fed[name] = [BOS_ID, *prefix], 0

    def remove(self, row: int) -> None:
        gone, last = self.order[row], self.order.pop()
        moved = self.rows.remove(row)
        assert moved is (None if last is gone else last)
        if last is not gone:
            self.order[row] = last
        self.pool.free(gone.self_block_table + gone.group.cross_block_table)

    def decode(self, token_ids: list[int]) -> None:
        batch = self.rows.batch()
        self.check(batch)
        self.rows.advance(np.array(token_ids, np.int64))
        for sequence, token_id in zip(self.order, token_ids, strict=True):
            name = sequence.group.request_id
            self.fed[name] += len(self.pending[name])
            self.pending[name] = [token_id]

    def check(self, batch: DecodeBatch) -> None:
        assert batch.num_rows == len(self.order) == len(self.rows)
        for row, sequence in enumerate(self.order):
            group = sequence.group
            name, params = group.request_id, group.request.params
            fed = slice(batch.offsets[row], batch.offsets[row + 1])
            assert sequence.row == row
            assert batch.token_ids[fed].tolist() == self.pending[name]
            first = self.fed[name]
            assert batch.positions[fed].tolist() == list(range(first, first + len(self.pending[name])))
            assert tuple(batch.self_tables[row, : group.num_self_blocks]) == sequence.self_block_table
            assert batch.num_own is not None
            assert batch.num_own[row] == len(sequence.self_block_table)
            assert tuple(batch.cross_tables[row, : group.num_cross_blocks]) == group.cross_block_table
            assert batch.source_lens[row] == group.source_len
            chosen = batch.sampling
            assert chosen.picks[row] == batch.offsets[row + 1] - 1
            assert (chosen.floats("temperature")[row], chosen.ints("top_k")[row]) == (
                np.float32(params.temperature),
                params.top_k,
            )
            assert (chosen.floats("top_p")[row], chosen.seeds[row]) == (np.float32(params.top_p), params.seed)
            generated = self.fed[name] - len(group.request.prefix_ids)
            assert self.rows.num_generated(row) == max(generated, 0)
        assert batch.offsets[-1] == batch.num_tokens
        sinks = tuple(sequence.sink for sequence in self.order if not sequence.is_whole)
        assert self.rows.streamed(len(self.order)).sinks == sinks


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_equal_their_sequences_at_joins_and_ends(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    model = Model(loop)
    for _ in range(data.draw(st.integers(1, 12))):
        while len(model.order) < MAX_ROWS and data.draw(st.booleans()):
            params = SamplingParams(
                temperature=data.draw(st.sampled_from([0.0, 0.7])),
                top_k=data.draw(st.sampled_from([0, 5])),
                top_p=data.draw(st.sampled_from([0.9, 1.0])),
                seed=data.draw(st.sampled_from([0, MAX_SEED])),
            )
            prefix = tuple(data.draw(st.lists(st.integers(4, 60), max_size=5)))
            model.add(params, prefix, data.draw(st.integers(2, MAX_LEN)))
        if model.order:
            model.decode(data.draw(st.lists(st.integers(4, 60), min_size=len(model.order), max_size=len(model.order))))
        while data.draw(st.booleans()) and model.order:
            model.remove(data.draw(st.integers(0, len(model.order) - 1)))
        used = sum(sequence.group.num_blocks for sequence in model.order)
        assert (model.pool.num_used, model.pool.num_free + used) == (used, model.pool.num_blocks)


def test_rows_reuse_the_batch_while_only_tokens_change(loop: asyncio.AbstractEventLoop) -> None:
    model = Model(loop)
    model.add(SamplingParams(), (), 3)
    first = model.rows.batch()
    model.decode([9])
    assert model.rows.batch() is first
    assert first.token_ids.tolist() == [9]
    model.add(SamplingParams(), (7, 8), 3)
    assert model.rows.batch() is not first


def test_rows_end_a_sequence_after_its_prefix_and_new_tokens(loop: asyncio.AbstractEventLoop) -> None:
    model = Model(loop)
    model.add(SamplingParams(max_new_tokens=3), (7, 8), 3)
    for token_id in (9, 10, 11):
        assert model.rows.positions[0] < model.rows.end_positions[0]
        model.decode([token_id])
    assert model.rows.positions[0] == model.rows.end_positions[0]


def test_rows_do_not_advance_the_position_of_an_invalid_row(loop: asyncio.AbstractEventLoop) -> None:
    model = Model(loop)
    model.add(SamplingParams(), (), 3)
    model.rows.advance(np.array([-1]))
    assert model.rows.num_generated(0) == 0


def test_rows_distinguish_tiny_settings_from_settings_that_are_off(loop: asyncio.AbstractEventLoop) -> None:
    model = Model(loop)
    model.add(SamplingParams(temperature=1e-60, top_p=1e-40, top_k=2**40), (), 3)
    batch = model.rows.batch().sampling
    assert 0 < batch.floats("temperature")[0] < 1e-30
    assert 0 < batch.floats("top_p")[0] < 1e-30
    assert batch.ints("top_k")[0] == 2**40
    assert math.isinf(model.rows.expiries.times_s[0])
