"""The page for everybody: checked by axe, by keyboard alone, on a phone and on a large screen, light and dark."""

from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from antiphon.client import Client, Options
from tests.play.browser import Watched
from tests.play.pictures import PHONE, VIEWS, take_pictures
from tests.play.play_process import PlayProcess

pytestmark = pytest.mark.pages

Open = Callable[..., Watched]

PROFILES = ("light", "dark")
SIZES = {"phone": PHONE, "small phone": {"width": 320, "height": 640}, "4K": {"width": 3840, "height": 2160}}


def open_view(open_page: Open, play: PlayProcess, view: str, **settings: object) -> Page:
    page = open_page(f"{play.url}/#/{view}", **settings).page
    if view not in ("memory", "read"):
        page.locator("#text").fill("My brother has a red car.")
    VIEWS[view](page)
    return page


@pytest.mark.parametrize("scheme", PROFILES)
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_in_a_view(play: PlayProcess, open_page: Open, view: str, scheme: str) -> None:
    page = open_view(open_page, play, view, color_scheme=scheme, bypass_csp=True)  # axe runs as a script of the page
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_view_fits_the_width_of_the_screen(play: PlayProcess, open_page: Open, view: str, size: str) -> None:
    page = open_view(open_page, play, view, viewport=SIZES[size])
    widths = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1]


def test_text_grows_with_a_large_screen(play: PlayProcess, open_page: Open) -> None:
    sizes = []
    for size in ("phone", "4K"):
        page = open_page(play.url, viewport=SIZES[size]).page
        sizes.append(page.evaluate("() => parseFloat(getComputedStyle(document.documentElement).fontSize)"))
    assert sizes[0] >= 15
    assert sizes[1] >= 1.5 * sizes[0]


def test_alternative_is_chosen_by_keyboard_alone(play: PlayProcess, client: Client, open_page: Open) -> None:
    text = "My brother has a red car."
    first = client.generate_text(text, Options(num_logprobs=8))
    page = open_page(play.url).page
    page.get_by_label("Text", exact=True).fill(text)
    expect(page.locator(".result")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".tokens")).to_have_text(first.text)
    page.get_by_label("Text", exact=True).focus()
    for _ in range(40):  # over the sliders and buttons to the first token
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.classList.contains('token')"):
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#alternatives li")).to_have_count(8)
    focused = page.locator("#alternatives button:focus")
    for _ in range(40):  # over the other tokens to the first alternative
        page.keyboard.press("Tab")
        if focused.count():
            break
    chosen = int(focused.get_attribute("data-id") or "-1")
    page.keyboard.press("Enter")
    expect(page.locator(".token.chosen")).to_have_attribute("data-id", str(chosen))
    assert chosen in [token_id for token_id, _ in first.logprobs[1].alternatives[1:]]


def test_first_stop_of_the_keyboard_skips_to_the_view(play: PlayProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    expect(page.locator(".token").first).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"


def test_every_view_has_a_picture(play: PlayProcess, client: Client, browser: Browser, tmp_path: Path) -> None:
    pictures = take_pictures(browser, play.url, client, tmp_path)
    documented = (Path(__file__).parents[2] / "docs" / "PLAY.md").read_text(encoding="utf-8")
    assert [path.name for path in pictures if f"play/{path.name}" not in documented] == []
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
