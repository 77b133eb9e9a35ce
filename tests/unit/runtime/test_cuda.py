"""Steps on a GPU: their sizes, layouts and checks, and a server on a machine without one."""

import ctypes.util
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.bundle.onnx_runtime import ort
from antiphon.errors import CudaError
from antiphon.ops.cuda.driver import CudaDevice, describe
from antiphon.runtime.cuda.decoder import Bounds, candidate_bucket, check_batch, power_of_two, row_bucket
from antiphon.runtime.cuda.open_device import DeviceError, open_device
from antiphon.runtime.cuda.runner import as_elements
from antiphon.runtime.cuda.step_buffers import EDITS, StepSizes, edit_rounds, input_layout, result_layout
from antiphon.runtime.runner import DecodeBatch
from tests.batches import SampleSettings, batch_of, sampling_of

SIZES = StepSizes(tokens=7, rows=3, samples=5, edits=9, candidates=2, self_width=4, cross_width=6)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_bucket_holds_its_rows_and_never_exceeds_the_limit(num_rows: int, max_rows: int) -> None:
    num_rows = min(num_rows, max_rows)
    assert num_rows <= row_bucket(num_rows, max_rows) <= max_rows


def test_there_are_few_buckets_and_small_ones_waste_little() -> None:
    buckets = [row_bucket(rows, 256) for rows in range(1, 257)]
    assert len(set(buckets)) <= 16
    assert buckets == sorted(buckets)
    assert all(bucket < 2 * rows for rows, bucket in enumerate(buckets, 1))


@given(st.integers(0, 5000))
def test_candidates_and_powers_are_large_enough(count: int) -> None:
    assert candidate_bucket(count) >= max(count, 1)
    assert power_of_two(count) >= count
    assert power_of_two(count).bit_count() == 1


def test_arrays_of_a_layout_are_aligned_and_do_not_overlap() -> None:
    for layout in (input_layout(SIZES), result_layout(SIZES)):
        end = 0
        for _, place in layout:
            assert place.offset % 256 == 0
            assert place.offset >= end
            end = place.end
        assert end <= layout.num_bytes
    assert list(input_layout(SIZES).places)[-3:] == list(EDITS)


def test_views_of_a_layout_share_its_memory() -> None:
    layout = input_layout(SIZES)
    memory = np.zeros(layout.num_bytes, np.uint8)
    layout.views(memory)["self_tables"][2, 3] = 0x01020304
    place = layout.places["self_tables"]
    assert memory[place.offset : place.end][-4:].tolist() == [4, 3, 2, 1]


def test_a_layout_without_an_encoder_has_no_cross_arrays() -> None:
    places = input_layout(StepSizes(**{**dict.fromkeys(StepSizes.__slots__, 2), "cross_width": 0})).places
    assert not {"cross_lens", "cross_tables"} & set(places)


def test_sizes_are_joined_and_compared() -> None:
    larger = SIZES.joined(StepSizes(**dict.fromkeys(StepSizes.__slots__, 5)))
    assert larger.holds(SIZES)
    assert not SIZES.holds(larger)
    assert (larger.tokens, larger.rows, larger.edits) == (7, 5, 9)


def test_edits_of_one_token_are_in_rounds_in_their_order() -> None:
    first = SampleSettings(edits=[(4, 0, 1, 0), (9, 0, 1, 0), (4, 1, 1, 0), (4, 2, 1, 0)])
    second = SampleSettings(edits=[(4, 0, 1, 0), (9, 0, 1, 0)])
    assert edit_rounds(sampling_of([0, 1], [first, second])).tolist() == [0, 0, 1, 2, 0, 0]
    assert edit_rounds(sampling_of([0], [second])).tolist() == [0, 0]


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_elements_equal_those_of_pytorch(precision: str) -> None:
    random = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    halfway = torch.tensor([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256])  # between two numbers of bfloat16
    values = torch.cat([random, halfway])
    elements = as_elements(values.numpy(), precision)  # type: ignore[arg-type]
    expected = values.to(getattr(torch, precision))
    assert elements.tobytes() == expected.view(torch.uint8).numpy().tobytes()


HAS_DRIVER = ctypes.util.find_library("cuda") is not None
HAS_PROVIDER = "CUDAExecutionProvider" in ort.get_available_providers()


def test_the_processor_needs_nothing(tmp_path: Path) -> None:
    assert open_device("cpu", kernels=tmp_path) is None


@pytest.mark.skipif(HAS_PROVIDER, reason="onnxruntime-gpu is installed")
def test_cuda_names_the_missing_provider_and_auto_takes_the_processor(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no CUDA provider; install antiphon\[gpu\]"):
        open_device("cuda", kernels=tmp_path)
    assert open_device("auto", kernels=tmp_path) is None


@pytest.mark.skipif(HAS_DRIVER, reason="there is an NVIDIA driver")
def test_without_a_driver_every_call_is_an_error_that_names_it() -> None:
    with pytest.raises(CudaError, match=r"no NVIDIA driver: libcuda\.so\.1"):
        describe()
    with pytest.raises(CudaError, match="no NVIDIA driver"):
        CudaDevice()


BOUNDS = Bounds(
    max_rows=2, num_blocks=8, vocab_size=100, max_target_len=32, target_block_size=16, max_source_len=40,
    has_encoder=True,
)  # fmt: skip


def batch(**changes: Any) -> DecodeBatch:
    """Return a valid step: row 0 feeds three tokens from position 14 on, row 1 one token."""
    made = batch_of(
        [[5, 6, 7], [8]],
        [14, 0],
        [20, 3],
        tables=([[0, 1], [2, 99]], [[3, 4, 99], [5, 99, 99]]),
        sampling=sampling_of([2, 3], [SampleSettings(edits=[(4, 0.0, 1.0, 0.0)])] * 2),
    )
    return dataclasses.replace(made, **changes)


INT32 = np.int32


def test_a_valid_batch_is_accepted_and_unused_table_entries_are_not_looked_at() -> None:
    check_batch(batch(), BOUNDS)


def test_a_row_of_a_recurrence_has_one_block_at_any_length() -> None:
    bounds = dataclasses.replace(BOUNDS, target_block_size=32)
    check_batch(batch(self_tables=np.array([[0], [2]], INT32)), bounds)
    with pytest.raises(ValueError, match="self_tables are 2 to 8; they must be 0 to 7"):
        check_batch(batch(self_tables=np.array([[8], [2]], INT32)), bounds)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "token above": (dict(token_ids=np.array([5, 100, 7, 8])), "token_ids are 5 to 100; they must be 0 to 99"),
    "token below": (dict(token_ids=np.array([5, -1, 7, 8])), "token_ids are -1 to 8"),
    "position": (dict(positions=np.array([30, 31, 32, 0], INT32)), "positions are 0 to 32; they must be 0 to 31"),
    "gap": (
        dict(positions=np.array([14, 16, 17, 0], INT32)), r"positions \[14, 16, 17, 0\] must rise by 1 within a row"
    ),
    "offsets": (dict(offsets=np.array([0, 4, 4], INT32)), r"offsets \[0, 4, 4\] do not divide 4 tokens into 2 rows"),
    "self block": (dict(self_tables=np.array([[0, 8], [2, 9]], INT32)), "self_tables are 0 to 8; they must be 0 to 7"),
    "narrow table": (dict(self_tables=np.array([[0], [2]], INT32)), "self_tables have 1 columns; 17 positions need 2"),
    "cross block": (
        dict(cross_tables=np.array([[3, -1, 0], [5, 0, 0]], INT32)), "cross_tables are -1 to 5; they must be 0 to 7"
    ),
    "source": (dict(source_lens=np.array([41, 3], INT32)), "source_lens are 3 to 41; they must be 0 to 40"),
    "pick": (dict(sampling=sampling_of([2, 4])), "picks are 2 to 4; they must be 0 to 3"),
    "edit": (
        dict(sampling=sampling_of([2, 3], [SampleSettings(edits=[(100, 0.0, 1.0, 0.0)])] * 2)),
        "edit_ids are 100 to 100; they must be 0 to 99",
    ),
    "forced": (dict(sampling=sampling_of([2, 3], [SampleSettings(forced_id=100)] * 2)), "forced_id"),
    "edit offsets": (
        dict(sampling=dataclasses.replace(sampling_of([2, 3]), edit_offsets=np.array([0, 2, 1], INT32))),
        "must start at 0 and never fall",
    ),
    "missing edits": (
        dict(sampling=dataclasses.replace(sampling_of([2, 3]), edit_offsets=np.array([0, 1, 1], INT32))),
        "edit_offsets end at 1; there are 0 edits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_refused_by_name(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        check_batch(batch(**changes), BOUNDS)


def test_more_rows_than_there_are_places_for_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of the batch are 2; they must be 1 to 1"):
        check_batch(batch(), dataclasses.replace(BOUNDS, max_rows=1))
