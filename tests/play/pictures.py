"""Pictures of every view for docs/PLAY.md, and the time until the page's first paint.

    make play-pictures

Serves the shipped model and two small ones, as the tests do, and opens the page in headless Chromium.
"""

import contextlib
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from antiphon.client import Client, Options
from tests.busy import repeated
from tests.integration.process import ServerProcess
from tests.play.browser import ROOT, open_browser
from tests.play.conftest import served_bundles
from tests.play.play_process import PlayProcess

FOLDER = ROOT / "docs" / "play"
TEXT = "The weather is nice today, but it will rain tomorrow."
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
# Time of the first paint of text or picture, from the start of the navigation, in milliseconds.
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def _translate(page: Page) -> None:
    expect(page.locator(".result")).to_have_attribute("aria-busy", "false")
    page.locator(".token").nth(3).click()
    expect(page.locator("#alternatives li")).to_have_count(8)


def _sampling(page: Page) -> None:
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Top-k").fill("8")
    page.get_by_label("Top-p").fill("0.9")
    expect(page.locator("thead th").last).to_contain_text("kept")
    page.get_by_role("button", name="Sample", exact=True).click()
    expect(page.locator("[data-seed]").last).not_to_be_empty()


def _attention(page: Page) -> None:
    page.locator(".head").nth(3).click()
    expect(page.locator(".matrix .cell").first).to_be_visible()


def _beams(page: Page) -> None:
    expect(page.locator("g.node.best").first).to_be_visible()


def _memory(page: Page) -> None:
    page.get_by_role("button", name="Measure").click()
    expect(page.locator("tr[data-tokens]").nth(4)).to_be_visible()
    expect(page.get_by_role("button", name="Measure lengths")).to_be_enabled()
    expect(page.locator(".spark polyline").first).to_have_attribute("points", re.compile(r"(\S+ ){9}"))


def _read(page: Page) -> None:
    page.get_by_label("Model").select_option("bert")
    page.get_by_role("button", name="Tag").click()
    expect(page.locator("mark").first).to_be_visible()


VIEWS: dict[str, Callable[[Page], None]] = {
    "translate": _translate,
    "sampling": _sampling,
    "attention": _attention,
    "beams": _beams,
    "memory": _memory,
    "read": _read,
}


def take_pictures(browser: Browser, url: str, client: Client, folder: Path) -> list[Path]:
    """Write a picture of each view to a folder: light, and of the first view dark on a phone too.

    client: of the server behind the page, to keep it busy while its memory is shown.
    """
    paths = []
    for view in VIEWS:
        busy = repeated(lambda: client.generate_text(TEXT, Options(ignore_eos=True)), num_threads=12)
        with busy if view == "memory" else contextlib.nullcontext():
            paths.append(_picture(browser, url, folder, view, scheme="light", size=DESKTOP))
    return [*paths, _picture(browser, url, folder, "translate", scheme="dark", size=PHONE)]


def _picture(browser: Browser, url: str, folder: Path, view: str, *, scheme: str, size: dict[str, int]) -> Path:
    settings = {"viewport": size, "color_scheme": scheme, "reduced_motion": "reduce"}
    page = browser.new_page(**settings)  # type: ignore[arg-type]
    page.goto(f"{url}/#/{view}")
    if view not in ("memory", "read"):
        page.locator("#text").fill(TEXT)
    VIEWS[view](page)
    page.mouse.move(0, 0)
    path = folder / (f"{view}.png" if scheme == "light" else f"{view}-{scheme}.png")
    page.screenshot(path=path, full_page=True)
    page.close()
    return path


def _first_paints(browser: Browser, url: str, count: int = 10) -> list[float]:
    """Return the times until the first paint of fresh pages, in milliseconds."""
    times = []
    for _ in range(count):
        page = browser.new_page()
        page.goto(url)
        page.wait_for_function(FIRST_PAINT)
        times.append(float(page.evaluate(FIRST_PAINT)))
        page.close()
    return times


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    names = [word for name, path in served_bundles().items() for word in ("--model", f"{name}={path}")]
    with (
        ServerProcess(None, [*names, "--admin-port", "0"]) as server,
        PlayProcess(server) as play,
        Client(server.target) as client,
        open_browser() as browser,
    ):
        for path in take_pictures(browser, play.url, client, FOLDER):
            print(path.relative_to(ROOT))
        times = _first_paints(browser, play.url)
    print(f"first paint: median {statistics.median(times):.0f} ms, {min(times):.0f} to {max(times):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
