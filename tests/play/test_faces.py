"""States of the page: nothing typed, stopped, refused with advice, server gone in mid-stream and back."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from antiphon.client import Client, Connection, Options, RetryPolicy, ServerError
from tests.busy import repeated
from tests.integration.process import ServerProcess
from tests.play.browser import Watched
from tests.play.conftest import LONG, write_bundle
from tests.play.play_process import PlayProcess

pytestmark = pytest.mark.pages

Open = Callable[..., Watched]

# Chromium notes every answer that is no success, and every lost connection.
FAILED_LOAD = "Failed to load resource"


@pytest.fixture(scope="module")
def long_bundle() -> Path:
    return write_bundle("long", LONG)


@pytest.fixture
def long_server(long_bundle: Path) -> Iterator[ServerProcess]:
    """A server that runs one request at a time, and lets one more wait."""
    with ServerProcess(long_bundle, ["--max-num-seqs", "1", "--max-queued-requests", "1"]) as process:
        yield process


def test_empty_text_is_not_sent(play: PlayProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    page.get_by_label("Text", exact=True).fill("  ")
    expect(page.get_by_text("Type a text: the answer appears here")).to_be_visible()
    expect(page.locator(".token")).to_have_count(0)


# A person's click, as early as possible: from outside the page it can come after the end of a long answer.
STOP_AT_THE_FIRST_TOKEN = """
new MutationObserver((_, observer) => {
  const stop = [...document.querySelectorAll('button')].find((button) => button.textContent.trim() === 'Stop');
  if (!document.querySelector('.token') || !stop || stop.disabled) return;
  observer.disconnect();
  stop.click();
}).observe(document, { childList: true, subtree: true, attributes: true });
"""


def test_stopped_answer_keeps_what_came_and_says_so(long_server: ServerProcess, open_page: Open) -> None:
    with PlayProcess(long_server) as play:
        page = open_page(play.url, script=STOP_AT_THE_FIRST_TOKEN).page
        expect(page.get_by_role("status").filter(has_text="Stopped")).to_be_visible()
        expect(page.locator(".token").first).to_be_visible()
        long_server.wait_for_metrics(lambda metrics: metrics["antiphon_num_requests_running"] == 0)


def test_refusal_shows_when_it_tries_again_and_then_the_answer(long_server: ServerProcess, open_page: Open) -> None:
    connection = Connection(retry=RetryPolicy(attempts=1))
    with PlayProcess(long_server) as play, Client(long_server.target, connection=connection) as client:

        def ask() -> None:
            with contextlib.suppress(ServerError):  # refused like the page
                client.generate_text("a", Options(ignore_eos=True))

        watched = open_page(f"{play.url}/#/memory")
        watched.expected.append(FAILED_LOAD)
        page = watched.page
        expect(page.get_by_role("heading", name="The last minute")).to_be_visible()
        with repeated(ask, num_threads=6):
            long_server.wait_for_metrics(lambda metrics: metrics["antiphon_num_requests_waiting"] > 0)
            page.get_by_role("link", name="Translate").click()
            alert = page.get_by_role("alert")
            expect(alert).to_contain_text("The server is full.")
            expect(alert).to_contain_text(re.compile(r"Next try in \d+ s"))
        expect(page.locator(".token").first).to_be_visible()
        expect(alert).to_have_count(0)


def test_server_that_dies_in_mid_stream_is_reported_and_found_again(long_bundle: Path, open_page: Open) -> None:
    with ServerProcess(long_bundle) as server:
        port, metrics_port = server.port, server.metrics_port
        with PlayProcess(server) as play:
            watched = open_page(play.url)
            watched.expected.append(FAILED_LOAD)
            page = watched.page
            expect(page.locator(".token").first).to_be_visible()
            server.process.kill()
            expect(page.get_by_role("alert").first).to_contain_text("The server is not there.")
            expect(page.get_by_text("server gone, trying again")).to_be_visible()
            again = ["--port", str(port), "--metrics-port", str(metrics_port)]
            with ServerProcess(long_bundle, again) as replaced:
                expect(page.get_by_role("status").filter(has_text=replaced.target)).to_be_visible()
                expect(page.get_by_role("alert")).to_have_count(0)
                page.get_by_label("Text", exact=True).fill("Here again")
                expect(page.locator(".token").first).to_be_visible()


def test_page_says_that_its_own_server_has_ended(server: ServerProcess, open_page: Open) -> None:
    with PlayProcess(server) as play:
        watched = open_page(play.url)
        watched.expected.append(FAILED_LOAD)
        expect(watched.page.locator(".token").first).to_be_visible()
    expect(watched.page.get_by_role("alert").first).to_contain_text("antiphon play has ended")


def test_refused_option_names_the_field(play: PlayProcess, open_page: Open) -> None:
    watched = open_page(f"{play.url}/#/sampling")
    watched.expected.append(FAILED_LOAD)
    page = watched.page
    page.get_by_label("Text", exact=True).fill("word " * 400)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot use this. text is")
