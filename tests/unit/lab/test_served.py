"""The server that experiments start: its translations, and errors that would otherwise spoil a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.client import Options, ServerError
from antiphon.lab.served import ServeError, served_translations, serving

BUNDLE = Path(__file__).parents[3] / "model/antiphon/bundles/en-de"


def test_served_translations_are_those_of_single_calls_and_a_refused_source_is_an_error() -> None:
    """Regression: a refused source counted as an empty translation."""
    sources, options = ["How are you?", "I am tired.", "It is cold."], Options(temperature=0)
    with serving(BUNDLE, "int8") as server:
        assert served_translations(server.client, sources, options) == [
            server.client.generate_text(one, options).text for one in sources
        ]
        with pytest.raises(ServerError, match="must be 1 to 256 tokens"):
            served_translations(server.client, [sources[0], "word " * 2000], options)


def test_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=f"antiphon serve {tmp_path} ended with exit code 2"), serving(tmp_path):
        pass
