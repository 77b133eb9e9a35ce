"""Every kernel in Triton's interpreter against the eager reference of its node.

Programs run in two unusual orders; outputs and unused cache positions are NaN before. test_sample_kernel.py has the
end of a step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.ops.cuda.nodes import ACTIVATIONS, NODES, CudaNode
from antiphon.ops.cuda.references import REFERENCES
from tests.cuda.interpreter import Grid
from tests.cuda.node_arguments import DTYPES, Arguments, arguments
from tests.cuda.node_launches import LAUNCHES

# Results are rounded once to their type; attention also rounds weights to it before the second product.
TOLERANCE = dict(zip(DTYPES, (2e-5, 4e-3, 3e-2), strict=True))
BY_NAME = {node.name: node for node in NODES}
WIDTHS = (48, 1040)  # kernels read 1024 columns at once
HEAD_WIDTHS = (16, 48, 80, 256)
PRESENT: list[dict[str, Any]] = [{}, {"optional": 0.0}]
# Node and sizes, and arguments that change.
CASES: list[tuple[str, Arguments, Arguments]] = [
    *(
        (name, sizes | {"width": width}, {})
        for name in ("CudaEmbed", "CudaPick") for width in WIDTHS for sizes in PRESENT
    ),
    *(
        ("CudaAddNorm", sizes | {"width": width}, {"kind": kind})
        for width in WIDTHS for kind in ("layer", "rms") for sizes in PRESENT
    ),
    *(
        ("CudaActivate", sizes | {"gated": gated}, {"activation": activation})
        for activation in ACTIVATIONS for gated in (False, True) for sizes in PRESENT
    ),
    ("CudaRotary", {}, {}),
    *(("CudaGatedSum", sizes | {"width": width}, {}) for width in WIDTHS for sizes in PRESENT),
    *(
        (name, sizes | {"width": width, "head_width": 80}, {})
        for name in ("CudaSsru", "CudaPagedAverage") for width in WIDTHS for sizes in PRESENT
    ),
    *(("CudaPagedWrite", {"head_width": width}, {}) for width in HEAD_WIDTHS),
    *(
        (name, sizes | {"head_width": width}, changes)
        for name in ("CudaPackedAttention", "CudaPagedAttention")
        for width, sizes, changes in zip(
            HEAD_WIDTHS, (PRESENT[1], {}, {}, {}), ({}, {"slopes": None}, {"bias_table": None, "bias": None}, {}),
            strict=True,
        )
    ),
]  # fmt: skip


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize(("name", "sizes", "changes"), CASES)
def test_kernels_equal_the_reference(dtype: torch.dtype, name: str, sizes: Arguments, changes: Arguments) -> None:
    if (
        name == "CudaPackedAttention" and dtype == torch.float32
    ):  # a wider head needs more shared memory than some cards have
        sizes = sizes | {"head_width": min(sizes["head_width"], 128)}
    check(BY_NAME[name], arguments(BY_NAME[name], dtype, **sizes) | changes)


@pytest.mark.parametrize("head_width", HEAD_WIDTHS)
def test_few_tokens_share_the_positions_of_a_row_among_programs(dtype: torch.dtype, head_width: int) -> None:
    node = BY_NAME["CudaPagedAttention"]
    check(node, arguments(node, dtype, head_width=head_width), num_splits=3)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_is_causal_when_asked(dtype: torch.dtype, causal: bool) -> None:
    node = BY_NAME["CudaPackedAttention"]
    check(node, arguments(node, dtype) | {"causal": causal})


@pytest.mark.parametrize("name", ["CudaSsru", "CudaPagedAverage"])
@pytest.mark.parametrize(("lens", "new"), [((7, 20, 1), (7, 3, 1)), ((5,), (2,)), ((3, 4), (3, 1))])
def test_recurrences_run_over_the_new_tokens_of_each_row(
    dtype: torch.dtype, name: str, lens: tuple[int, ...], new: tuple[int, ...]
) -> None:
    """Padding has the number of the first row. The last case: the position of the second row follows the first's."""
    check(BY_NAME[name], arguments(BY_NAME[name], dtype, lens=lens, new=new))


@pytest.mark.parametrize("name", ["CudaSsru", "CudaPagedAverage"])
def test_steps_of_one_token_equal_one_run_over_all_and_can_run_again(dtype: torch.dtype, name: str) -> None:
    """The bits are equal: of each token alone, run three times as when a graph is captured, and of all at once."""
    node = BY_NAME[name]
    all_at_once = arguments(node, dtype, lens=(6,), new=(6,))
    launch, tokens = LAUNCHES[name], [port.name for port in node.inputs if port.axes.startswith("N")]
    step_by_step = all_at_once | {"cache": all_at_once["cache"].clone()}
    out = launch(**all_at_once)
    for token in range(6):
        given = step_by_step | {each: step_by_step[each][token : token + 1].clone() for each in tokens}
        for _ in range(3):
            assert torch.equal(launch(**given)[0], out[token])
    states = [given["cache"].view(torch.int32) for given in (all_at_once, step_by_step)]
    assert torch.equal(*states)


def test_keys_and_values_are_written_from_a_product_without_queries(dtype: torch.dtype) -> None:
    node = BY_NAME["CudaPagedWrite"]
    made = arguments(node, dtype)
    width = made["kv"].shape[1] * 2 // 3
    check(node, made | {"kv": made["kv"][:, :width].contiguous(), "bias": made["bias"][:width]})


def check(node: CudaNode, given: Arguments, **launch: Any) -> None:
    """Compare the kernels, their programs reversed and shuffled, with the reference; the cache too, if there is one."""
    expected = run(REFERENCES[node.name], given)
    for order in (reverse, shuffle):
        for ours, reference in zip(run(LAUNCHES[node.name], given, order=order, **launch), expected, strict=True):
            assert ours.dtype == reference.dtype
            # What is written is exact, but the interpreter cuts bits of bfloat16 off where a card rounds.
            is_exact = node.name == "CudaPagedWrite" and ours.dtype != torch.bfloat16
            tolerance = 0.0 if is_exact else TOLERANCE.get(ours.dtype, 0.0)
            torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance, equal_nan=True)


def run(function: Any, given: Arguments, **launch: Any) -> list[Tensor]:
    """Return the results, and the cache after the call: as float32 where it has states."""
    given = given | {name: given[name].clone() for name in given if name == "cache"}
    result = function(**given, **launch)
    caches = [given[name] for name in given if name == "cache"]
    if "num_heads" not in given:
        caches = [cache.view(torch.float32) for cache in caches]
    return [*(result if isinstance(result, tuple) else (result,)), *caches]


def reverse(programs: list[Grid]) -> list[Grid]:
    return programs[::-1]


def shuffle(programs: list[Grid]) -> list[Grid]:
    return random.Random(1).sample(programs, len(programs))
