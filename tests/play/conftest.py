"""A server with a model of each architecture, the page over it, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from antiphon.client import Client
from tests.integration.process import PATIENCE_S, ServerProcess
from tests.play.browser import Watched, open_browser
from tests.play.models import served_bundles
from tests.play.play_process import PlayProcess

# Much longer than any answer takes: turns a hang into a failure.
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture(scope="session")
def bundles() -> dict[str, Path]:
    """Bundles by the name under which they are served."""
    return served_bundles()


@pytest.fixture(scope="session")
def server(bundles: dict[str, Path]) -> Iterator[ServerProcess]:
    names = [argument for name, path in bundles.items() for argument in ("--model", f"{name}={path}")]
    with ServerProcess(None, [*names, "--admin-port", "0"]) as process:
        yield process


@pytest.fixture(scope="session")
def play(server: ServerProcess) -> Iterator[PlayProcess]:
    with PlayProcess(server) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.target) as opened:
        yield opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """A function that opens pages; at the end, none of them may have reported an error. script: runs before theirs."""
    opened: list[Watched] = []

    def open_one(url: str, script: str = "", **settings: Any) -> Watched:
        watched = Watched(browser.new_page(**{"reduced_motion": "reduce", **settings}))
        opened.append(watched)
        watched.page.add_init_script(script)
        watched.page.goto(url)
        return watched

    yield open_one
    for watched in opened:
        watched.page.close()
    for watched in opened:
        watched.check()
