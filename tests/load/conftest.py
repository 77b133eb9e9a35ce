"""Server process of the shipped model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.process import ServerProcess

BUNDLE = Path(__file__).parents[2] / "model" / "antiphon" / "bundles" / "en-de"


@pytest.fixture(scope="package")
def target() -> Iterator[str]:
    with ServerProcess(BUNDLE) as process:
        yield process.target
