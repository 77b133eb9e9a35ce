"""The section `kernels` of the bench: a finding for each kernel. No speed is compared."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from antiphon.bundle.manifest import load_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.bench import kernels as section
from antiphon.tools.bench.command import SECTIONS
from antiphon.tools.bench.corpus import everyday
from antiphon.tools.bench.kernel_runs import KERNELS, PORTABLE, active_kernels
from antiphon.tools.bench.setup import Setup


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(section, "LEAST_S", 1e-6)
    monkeypatch.setattr(section, "TIMES", 1)
    return Setup(bundle=load_bundle(SHIPPED_BUNDLE), corpus=everyday(), work=tmp_path, rows=(1, 3), threads=1, repeat=1)


@pytest.mark.parametrize("kernels", [KERNELS, (PORTABLE,)], ids=["fastest", PORTABLE])
def test_section_reports_a_rate_for_every_kernel(
    setup: Setup, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == (PORTABLE,):
        monkeypatch.setattr(section, "active_kernels", lambda: PORTABLE)
    findings = SECTIONS["kernels"](setup)
    rates = [finding for finding in findings if finding.unit == "G multiply-adds/s"]
    assert [(rate.case, rate.rows) for rate in rates] == [(one.case, one.rows) for one in section.kernels_of((1, 3))]
    assert len({(rate.case, rate.rows) for rate in rates}) == len(rates) == 2 * 2 * (2 * 4 + 1 + 5)
    has_bare = kernels != (PORTABLE,) and active_kernels() != PORTABLE
    for finding in findings:
        assert finding.name == "kernels"
        assert math.isfinite(finding.antiphon)
        assert finding.antiphon > 0
    for rate in rates:
        assert (rate.baseline is not None) == (rate.ratio is not None) == has_bare
        assert not has_bare or (rate.baseline or 0) > 0
        assert not has_bare or (rate.ratio or 0) > 0


def test_one_row_of_a_product_is_compared_with_reading_its_weight(setup: Setup) -> None:
    findings = [finding for finding in SECTIONS["kernels"](setup) if finding.unit == "GB/s of weights"]
    assert [finding.case for finding in findings] == [
        kernel.case for kernel in section.kernels_of((1,)) if kernel.weight_bytes is not None
    ]
    assert {finding.rows for finding in findings} == {1}
    assert all((finding.baseline or 0) > 0 and (finding.ratio or 0) > 0 for finding in findings)
