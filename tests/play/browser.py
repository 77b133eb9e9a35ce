"""Headless Chromium, and pages of it that note what must not happen."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.integration.process import PATIENCE_S

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build" / "browser" / "usr" / "bin"
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
# The last ones keep the browser from asking its maker's servers for anything.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-domain-reliability",
)  # fmt: skip


def chromium() -> Path:
    """Return the browser of PATH, else the one that `make browser` unpacked. Skips the test if there is none."""
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), str(UNPACKED)))
    for name in NAMES:
        if (found := shutil.which(name, path=places)) is not None:
            return Path(found)
    pytest.skip("no Chromium is on this machine: make browser")


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Run Chromium with a new profile."""
    program = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, the messages of its console that report errors, and the hosts of its requests.

    expected: parts of messages that a test causes on purpose.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    expected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or request.url[:20]))

    def check(self) -> None:
        """Assert that the page reported no error and asked nothing but this machine."""
        errors = [one for one in self.errors if not any(part in one for part in self.expected)]
        assert not errors, errors
        assert self.hosts <= {"127.0.0.1"}, self.hosts

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)
