"""The synchronous client is the generated form of the asynchronous one."""

from __future__ import annotations

from tests.unit.client.unasync import COMMAND, GENERATED, WRITTEN, synchronous


def test_synchronous_client_is_generated_from_the_asynchronous_one() -> None:
    written = WRITTEN.read_text(encoding="utf-8")
    assert GENERATED.read_text(encoding="utf-8") == synchronous(written), f"run: {COMMAND}"
