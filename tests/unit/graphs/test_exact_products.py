from __future__ import annotations

import pytest

from antiphon.bundle.exact_products import has_vnni


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fma avx2 avx512_vnni", True), ("avx2 avx_vnni", True), ("amx_int8", True), ("avx2 avx512f", False), ("", False)],
)
def test_has_vnni_reads_the_processors_flags(flags: str, expected: bool) -> None:
    assert has_vnni(f"processor\t: 0\nvendor_id\t: x\nflags\t\t: fpu {flags}\nbugs\t: avx512_vnni\n") is expected
