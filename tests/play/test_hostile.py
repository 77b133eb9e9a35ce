"""Hostile texts and neighbours: nothing of a text runs, and no other site can use the server behind the page."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from antiphon.client import Client, Options
from tests.integration.process import ServerProcess, num_submitted
from tests.play.browser import Watched
from tests.play.play_process import PlayProcess

Open = Callable[..., Watched]

VIEWS = ("translate", "sampling", "attention", "beams", "memory", "read")
JSON = {"content-type": "application/json"}
ATTACK = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
BODY = json.dumps({"text": "How are you?"}).encode()


# What a model could answer that was trained on markup, as the page's server would pass it on.
HOSTILE_TOKENS = [
    {"id": 1, "piece": ATTACK, "logprob": -0.1, "alternatives": [{"id": 2, "piece": ATTACK, "logprob": -1}]},
    {"id": 3, "piece": "\u202e" + ATTACK, "logprob": -0.1, "alternatives": []},
]
HOSTILE_LINE = json.dumps(
    dict(type="tokens", output=0, text=ATTACK, num_tokens=2, tokens=HOSTILE_TOKENS, finish_reason="stop", score=1.0)
)


@pytest.mark.pages
def test_text_of_a_model_is_never_interpreted_as_html(play: PlayProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    answer = dict(status=200, content_type="application/x-ndjson", body=HOSTILE_LINE + "\n")
    page.route("**/api/generate", lambda route: route.fulfill(**answer))
    page.get_by_label("Text", exact=True).fill(ATTACK)
    token = page.locator(".token").first
    expect(token).to_have_text(ATTACK)
    token.click()
    expect(page.locator("#alternatives")).to_contain_text(ATTACK)
    assert page.title().startswith("Translate")
    assert page.locator("main img, main script").count() == 0


@pytest.mark.pages
@pytest.mark.parametrize(
    ("pieces", "direction"), [(["1. ", "مرحبا", " abc"], "rtl"), (["1. ", "abc", " مرحبا"], "ltr")]
)
def test_answer_runs_in_the_direction_of_its_first_letter(
    play: PlayProcess, open_page: Open, pieces: list[str], direction: str
) -> None:
    page = open_page(play.url).page
    tokens = [dict(id=1, piece=piece, logprob=-0.1, alternatives=[]) for piece in pieces]
    line = dict(type="tokens", output=0, text="".join(pieces), num_tokens=3, tokens=tokens)
    answer = dict(status=200, content_type="application/x-ndjson", body=json.dumps(line) + "\n")
    page.route("**/api/generate", lambda route: route.fulfill(**answer))
    page.get_by_label("Text", exact=True).fill("anything")
    expect(page.locator(".token").nth(2)).to_be_visible()
    expect(page.locator(".tokens")).to_have_css("direction", direction)


@pytest.mark.pages
@pytest.mark.parametrize("view", VIEWS)
def test_typed_markup_rtl_text_and_emoji_are_shown_as_text(play: PlayProcess, open_page: Open, view: str) -> None:
    text = f"{ATTACK} مرحبا 👩‍👩‍👧‍👦 \u202eabc \U0001f600"
    watched = open_page(f"{play.url}/#/{view}")
    page = watched.page
    if view == "read":
        page.get_by_label("Model").select_option("bert")
        watched.expected.append("Failed to load resource")  # the text is longer than this small model reads
    if view != "memory":
        page.locator("#text").fill(text)
        expect(page.locator("#text")).to_have_value(text)
        expect(page.locator(".notice", has_text="Connecting")).to_have_count(0)
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


@pytest.mark.pages
def test_text_of_100_000_characters_is_refused_in_words(play: PlayProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    page.get_by_label("Text", exact=True).fill("wörter " * 14_286)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The server cannot use this.")
    assert len(alert.inner_text()) < 600
    page.get_by_label("Text", exact=True).fill("How are you?")
    expect(page.locator(".token").first).to_be_visible()
    expect(alert).to_have_count(0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON | {"Host": "evil.example"}, 421),  # a name that resolves to this machine: DNS rebinding
        (JSON | {"Host": "127.0.0.1"}, 421),  # another port
        (JSON | {"Origin": "http://evil.example"}, 403),
        (JSON | {"Origin": "null"}, 403),  # a file, or a sandboxed frame
        (JSON | {"Sec-Fetch-Site": "cross-site"}, 403),
        (JSON | {"Sec-Fetch-Site": "same-site"}, 403),  # another port of this machine
        ({"content-type": "text/plain"}, 415),  # what a form or a simple request can send
        ({}, 415),
    ],
)
def test_requests_of_others_are_refused_before_the_model_is_asked(
    play: PlayProcess, server: ServerProcess, headers: dict[str, str], status: int
) -> None:
    before = num_submitted(server.metrics())
    assert play.request("POST", "/api/generate", BODY, headers)[0] == status
    assert num_submitted(server.metrics()) == before


@pytest.mark.pages
def test_answers_allow_no_other_origin_and_no_foreign_code(play: PlayProcess) -> None:
    for method, path in (("GET", "/"), ("GET", "/app.js"), ("GET", "/api/models"), ("OPTIONS", "/api/generate")):
        _, headers, _ = play.request(method, path)
        assert not [name for name in headers if name.startswith("access-control-")]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-frame-options"] == "DENY"


def test_body_beyond_the_limit_is_refused_unread(play: PlayProcess) -> None:
    status, _, answer = play.request("POST", "/api/generate", b"", JSON | {"Content-Length": str(1 << 23)})
    assert status == 413, answer


@pytest.mark.pages
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/generate", {"text": "a", "options": {"temprature": 1}}, "options.temprature"),
        ("/api/generate", {"text": "a", "options": {"seed": "x"}}, "options.seed"),
        ("/api/generate", {"text": "a", "options": {"temperature": 101}}, "options.temperature"),
        ("/api/next-token", {"text": "a", "num_tokens": 1001}, "num_tokens"),
        ("/api/explain", {"text": "a", "other": 1}, "other"),
        ("/api/positions", {"num_positions": 0}, "num_positions"),
        ("/api/tag", {}, "text"),
    ],
)
def test_wrong_bodies_are_refused_by_field(play: PlayProcess, path: str, body: dict[str, object], field: str) -> None:
    status, _, answer = play.request("POST", path, json.dumps(body).encode(), JSON)
    # Lines are sent before the error is known, so their status is that of a success.
    assert status == (200 if path == "/api/generate" else 400)
    assert json.loads(answer.splitlines()[-1])["error"]["field"] == field


@pytest.mark.pages
@pytest.mark.parametrize("path", ["/../pyproject.toml", "/%2e%2e/app.py", "//etc/passwd", "/static/app.js", "/app.py"])
def test_files_outside_the_page_are_not_served(play: PlayProcess, path: str) -> None:
    assert play.request("GET", path)[0] == 404


@pytest.fixture
def other_site() -> Iterator[str]:
    """A page of another origin, which tries to use and to embed the page's server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, *_: object) -> None:
            pass

    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=host.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{host.server_port}"
    host.shutdown()
    thread.join()
    host.server_close()


USES = """async ([url, mode, type]) => {
  try {
    const answer = await fetch(`${url}/api/generate`, {
      method: 'POST', mode, headers: { 'content-type': type }, body: '{"text": "How are you?"}',
    });
    return await answer.text();
  } catch (error) {
    return `refused: ${error.name}`;
  }
}"""


@pytest.mark.pages
@pytest.mark.parametrize(
    ("mode", "content_type"), [("cors", "application/json"), ("cors", "text/plain"), ("no-cors", "text/plain")]
)
def test_page_of_another_site_cannot_use_the_server(
    play: PlayProcess, server: ServerProcess, open_page: Open, other_site: str, mode: str, content_type: str
) -> None:
    before = num_submitted(server.metrics())
    watched = open_page(other_site)
    watched.expected += ["CORS", "Failed to load resource"]
    assert watched.page.evaluate(USES, [play.url, mode, content_type]) == "refused: TypeError"
    assert num_submitted(server.metrics()) == before


@pytest.mark.pages
def test_page_cannot_be_embedded_by_another_site(play: PlayProcess, open_page: Open, other_site: str) -> None:
    watched = open_page(other_site)
    watched.expected += ["frame", "Refused", "violates"]
    page = watched.page
    page.evaluate(
        "(url) => { const frame = document.createElement('iframe'); frame.src = url; document.body.append(frame); }",
        play.url,
    )
    page.wait_for_function("() => document.querySelector('iframe') && frames.length === 1")
    assert page.frames[-1].locator(".brand").count() == 0


@pytest.mark.pages
def test_seed_beyond_the_numbers_of_javascript_is_exact(play: PlayProcess, client: Client) -> None:
    seed = 2**64 - 1
    body = json.dumps({"text": "How are you?", "options": {"temperature": 1.0, "seed": str(seed)}}).encode()
    lines = play.request("POST", "/api/generate", body, JSON)[2].splitlines()
    assert json.loads(lines[-1])["seed"] == str(seed)
    text = "".join(json.loads(line)["text"] for line in lines[:-1])
    assert text == client.generate_text("How are you?", Options(temperature=1.0, seed=seed)).text
