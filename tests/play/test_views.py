"""Each view of the page, used as a person would, over real models; numbers equal those of the server."""

import math
import re
from collections.abc import Callable, Mapping

import pytest
from playwright.sync_api import Locator, Page, expect

from antiphon.bundle.manifest import load_bundle
from antiphon.client import Client, Options
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.format import TextFormat
from tests.busy import repeated
from tests.fakes import EOS_ID
from tests.integration.process import ServerProcess, is_idle
from tests.play.browser import Watched
from tests.play.play_process import Addresses, PlayProcess
from tests.reliability.background import Background
from tests.serving import serving

Open = Callable[..., Watched]
TEXT = "My brother has a red car."


def type_text(page: Page, text: str) -> None:
    page.get_by_label("Text", exact=True).fill(text)


def typed(open_page: Open, url: str) -> Page:
    """Open a page and type TEXT."""
    page = open_page(url).page
    type_text(page, TEXT)
    return page


def shown_tokens(page: Page) -> Locator:
    return page.locator(".tokens .token")


def wait_for_text(page: Page, text: str) -> None:
    """Wait until the tokens of the finished answer are shown."""
    expect(page.locator(".result")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".tokens")).to_have_text(text)


def choose_model(page: Page, name: str) -> None:
    page.get_by_label("Model").select_option(name)


def test_translate_shows_the_answer_and_each_probability(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, play.url)
    expected = client.generate_text(TEXT, Options(num_logprobs=8))
    wait_for_text(page, expected.text)
    shown = [float(one.get_attribute("data-logprob") or "nan") for one in shown_tokens(page).all()]
    of_text = [one.logprob for one in expected.logprobs[: len(expected.token_ids)]]
    assert shown == pytest.approx(of_text, abs=1e-6)


@pytest.mark.pages
def test_sources_of_the_shipped_model_are_listed_when_they_are_asked_for(play: PlayProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    provenance = load_bundle(SHIPPED_BUNDLE).manifest.provenance
    assert provenance is not None
    expected = [line.removeprefix("- ") for line in provenance.attribution.splitlines()]
    listed = page.locator("footer li")
    expect(listed).to_have_count(len(expected))
    expect(listed.first).to_be_hidden()
    page.get_by_text(f"sources and licences ({len(expected)})").click()
    expect(listed.last).to_be_visible()
    assert listed.all_text_contents() == expected


@pytest.mark.pages
def test_translate_shows_the_alternatives_of_a_chosen_token(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, play.url)
    expected = client.generate_text(TEXT, Options(num_logprobs=8))
    wait_for_text(page, expected.text)
    shown_tokens(page).nth(1).click()
    rows = page.locator("#alternatives li")
    expect(rows).to_have_count(8)
    shown = [int(one.get_attribute("data-id") or "-1") for one in rows.locator("button").all()]
    assert shown == [token_id for token_id, _ in expected.logprobs[1].alternatives]


@pytest.mark.pages
def test_translate_continues_from_a_chosen_alternative_as_the_same_request_with_that_prefix(
    play: PlayProcess, client: Client, open_page: Open
) -> None:
    page = typed(open_page, play.url)
    first = client.generate_text(TEXT, Options(num_logprobs=8))
    wait_for_text(page, first.text)
    shown_tokens(page).nth(1).click()
    page.locator("#alternatives li").nth(2).get_by_role("button").click()
    prefix_ids = [first.token_ids[0], first.logprobs[1].alternatives[2][0]]
    continued = client.generate_text(TEXT, Options(prefix_ids=prefix_ids))
    whole = client.detokenize([*prefix_ids, *continued.token_ids])
    wait_for_text(page, whole.text)
    ids = [int(one.get_attribute("data-id") or "-1") for one in shown_tokens(page).all()]
    assert ids == [*prefix_ids, *continued.token_ids]


@pytest.mark.pages
def test_translate_shows_the_best_outputs_of_a_beam_search(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, play.url)
    page.get_by_label("Beam width").fill("4")
    page.get_by_label("Best outputs").fill("3")
    expected = client.generate_outputs(TEXT, Options(beam_width=4, num_return_sequences=3))
    expect(page.locator(".outputs li span:first-child")).to_have_text([one.text for one in expected])


@pytest.mark.pages
def test_translate_asks_for_the_alternatives_of_a_beam_search_when_a_token_is_opened(
    play: PlayProcess, client: Client, open_page: Open
) -> None:
    page = typed(open_page, play.url)
    page.get_by_label("Beam width").fill("3")
    best = client.generate_text(TEXT, Options(beam_width=3))
    wait_for_text(page, best.text)
    shown_tokens(page).nth(2).click()
    expected = client.next_token(TEXT, Options(prefix_ids=best.token_ids[:2]), num_tokens=8)
    rows = page.locator("#alternatives li button")
    expect(rows).to_have_count(8)
    assert [int(one.get_attribute("data-id") or "-1") for one in rows.all()] == list(expected.token_ids[:8])


@pytest.mark.pages
def test_translate_shows_the_cost_that_the_server_reports(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, play.url)
    usage = client.generate_text(TEXT).usage
    figures = page.locator(".figure")
    expect(figures.filter(has_text="Tokens").last).to_contain_text(f"{usage.source_tokens} → {usage.generated_tokens}")
    expect(figures.filter(has_text="Cache blocks")).to_contain_text(str(usage.cache_blocks))


@pytest.mark.pages
def test_typing_quickly_leaves_no_work_on_the_server(play: PlayProcess, server: ServerProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    box = page.get_by_label("Text", exact=True)
    box.fill("")
    box.press_sequentially("I would like to know how many of these requests remain on the server.")
    expect(page.locator(".result")).to_have_attribute("aria-busy", "false")
    metrics = server.wait_for_metrics(is_idle)
    # A request that was cancelled in stage streaming had its answer already, and counts as a success as well.
    ended = total(metrics, "request_success_total") + total(metrics, "cancellations_total", but="stage=streaming")
    assert ended == total(metrics, "requests_submitted_total")


def total(metrics: Mapping[str, float], name: str, *, but: str = "none") -> float:
    """Return the sum of a counter over all its labels, without the series that have one of them."""
    keys = (key for key in metrics if key.partition("{")[0] == f"antiphon_{name}" and but not in key)
    return sum(metrics[key] for key in keys)


def stage_cells(page: Page, stage: str) -> list[float]:
    """Return the log-probabilities that the table shows after a stage; minus infinity for dropped tokens."""
    cells = page.locator(f'td[data-stage="{stage}"]').all()
    return [float(one.get_attribute("data-logprob") or "-inf") for one in cells]


@pytest.mark.pages
def test_sampling_bars_equal_the_log_probabilities_of_the_server_after_every_stage(
    play: PlayProcess, client: Client, open_page: Open
) -> None:
    page = typed(open_page, f"{play.url}/#/sampling")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Top-k").fill("12")
    page.get_by_label("Top-p").fill("0.9")
    page.get_by_label("Min-p").fill("0.02")
    options = Options(temperature=0.7, top_k=12, top_p=0.9, min_p=0.02)
    expected = client.next_token(TEXT, options, num_tokens=16)
    kept = f"{expected.stages[-1].num_kept} kept"
    expect(page.locator("thead th").last).to_contain_text(kept)
    for stage in expected.stages:
        assert stage_cells(page, stage.name) == pytest.approx(list(stage.logprobs), abs=1e-6)
    widths = [one.evaluate("bar => bar.style.width") for one in page.locator('td[data-stage="top_k"] .bar span').all()]
    shares = [math.exp(logprob) for logprob in expected.stages[3].logprobs]
    assert [float(width.removesuffix("%")) / 100 for width in widths] == pytest.approx(shares, abs=1e-4)


@pytest.mark.pages
def test_sampling_walks_along_the_target_token_by_token(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, f"{play.url}/#/sampling")
    first = client.next_token(TEXT, num_tokens=16)
    rows = page.locator(".stages tbody button")
    expect(rows.first).to_have_attribute("data-id", str(first.token_ids[0]))
    rows.nth(1).click()
    second = client.next_token(TEXT, generated_ids=first.token_ids[1:2], num_tokens=16)
    expect(rows.first).to_have_attribute("data-id", str(second.token_ids[0]))
    assert stage_cells(page, "model") == pytest.approx(list(second.stages[0].logprobs), abs=1e-6)
    page.get_by_role("button", name="Back").click()
    expect(rows.first).to_have_attribute("data-id", str(first.token_ids[0]))


@pytest.mark.pages
def test_samples_of_a_seed_equal_the_servers_and_repeat(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, f"{play.url}/#/sampling")
    page.get_by_label("Temperature").fill("1.5")
    seeds = [2**64 - 2, 2**64 - 1, 0]  # beyond the exact numbers of JavaScript, and around the end
    page.get_by_label("First seed").fill(str(seeds[0]))
    page.get_by_label("Samples").fill("3")
    expected = [client.generate_text(TEXT, Options(temperature=1.5, seed=seed)).text for seed in seeds]
    assert len(set(expected)) > 1
    for _ in range(2):
        page.get_by_role("button", name="Sample", exact=True).click()
        expect(page.locator("[data-seed]")).to_have_text(expected)


SHOWS_WEIGHTS = """
(weights) => {
  const cells = [...document.querySelectorAll('.matrix .cell')];
  const isEqual = (cell, index) => Math.abs(Number(cell.dataset.weight) - weights[index]) < 1e-6;
  return cells.length === weights.length && cells.every(isEqual);
}
"""


@pytest.mark.pages
@pytest.mark.parametrize(
    ("model", "stack", "field"),
    [("en-de", "Cross", "cross"), ("en-de", "Encoder", "encoder_self"), ("bert", None, "encoder_self"),
     ("gpt", None, "decoder_self")],
)  # fmt: skip
def test_attention_shows_every_head_and_the_weights_of_the_opened_one(
    play: PlayProcess, client: Client, open_page: Open, model: str, stack: str | None, field: str
) -> None:
    page = open_page(f"{play.url}/#/attention").page
    choose_model(page, model)
    page.locator("#text").fill("the red cat")
    if stack is not None:
        page.get_by_role("button", name=stack, exact=True).click()
    found = client.with_model(model).explain("the red cat")
    maps = getattr(found, field)
    heads = page.locator(".head")
    expect(heads).to_have_count(len(maps))
    last = max(maps, key=lambda one: (one.layer, one.head))
    heads.last.click()
    expect(page.locator(".card h2").first).to_contain_text(f"Layer {last.layer}, head {last.head}")
    cells = page.locator(".matrix .cell")
    expect(cells).to_have_count(last.rows * last.columns)
    # The explanation of the page's first text can have as many cells, and stays until that of the new text is there.
    page.wait_for_function(SHOWS_WEIGHTS, arg=list(last.weights))


SHOWS_TABLES = """
(sizes) => {
  const shown = [...document.querySelectorAll('canvas.table')].map((one) => [one.height, one.width]);
  return JSON.stringify(shown) === JSON.stringify(sizes);
}
"""


@pytest.mark.pages
def test_attention_shows_the_positions_of_each_part(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = open_page(f"{play.url}/#/attention").page
    shown: list[list[int]] = []
    for model in ("en-de", "bert", "gpt"):
        choose_model(page, model)
        sizes = [[one.rows, one.columns] for one in client.with_model(model).get_positions() if one.rows]
        # Until the page is drawn again it shows the tables of the previous model, and there can be as many of them.
        page.wait_for_function(SHOWS_TABLES, arg=sizes)
        assert sizes != shown
        shown = sizes


@pytest.mark.pages
def test_beams_draw_the_tree_that_the_server_searched(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, f"{play.url}/#/beams")
    options = Options(beam_width=4, num_return_sequences=4, length_penalty=1.0, max_new_tokens=32)
    outputs = client.generate_outputs(TEXT, options, report_beam_steps=True)
    steps = outputs[0].beam_steps
    expect(page.locator(".outputs li span:first-child")).to_have_text([one.text for one in outputs])
    nodes = page.locator("g.node")
    expect(nodes).to_have_count(sum(len(step.live) + len(step.finished) for step in steps))
    totals = nodes.evaluate_all("all => all.map((one) => Number(one.dataset.total))")
    assert totals == pytest.approx([one.total_logprob for step in steps for one in (*step.live, *step.finished)])
    best = page.locator("g.node.finished.best")
    assert float(best.get_attribute("data-score") or "nan") == pytest.approx(outputs[0].score)


@pytest.mark.pages
def test_beams_grow_step_by_step(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = typed(open_page, f"{play.url}/#/beams")
    best = client.generate_text(TEXT, Options(beam_width=4, max_new_tokens=32))
    expect(page.locator(".outputs li span:first-child").first).to_have_text(best.text)
    slider = page.get_by_role("slider", name="Step")
    slider.fill("0")
    expect(page.locator("g.node")).to_have_count(4)
    expect(page.locator("g.node.pruned")).to_have_count(0)
    slider.fill("2")
    expect(page.locator("g.node[data-step='2']").first).to_be_visible()


@pytest.mark.pages
def test_memory_shows_the_workspace_of_the_metrics(play: PlayProcess, server: ServerProcess, open_page: Open) -> None:
    page = open_page(f"{play.url}/#/memory").page
    page.get_by_role("button", name="Measure").click()
    rows = page.locator("tr[data-tokens]")
    expect(rows.nth(4)).to_be_visible()
    expect(page.get_by_role("button", name="Measure lengths")).to_be_enabled()
    metrics = server.wait_for_metrics(is_idle)
    lone = {
        (kind, length): metrics[key] / metrics[f"antiphon_encoder_lone_runs_total{{source_len={length}}}"]
        for key in metrics
        if (found := re.fullmatch(r"antiphon_encoder_lone_workspace_bytes_total\{kind=(\w+),source_len=(\d+)\}", key))
        for kind, length in [found.groups()]
        if metrics[f"antiphon_encoder_lone_runs_total{{source_len={length}}}"]
    }
    lengths = sorted({int(length) for _, length in lone})
    expect(rows).to_have_count(len(lengths))
    shown = rows.evaluate_all(
        "all => all.flatMap((row) => ['measured', 'fused', 'materialised'].map((one) => +row.dataset[one]))"
    )
    kinds = ("measured", "predicted_fused", "predicted_materialised")
    assert shown == pytest.approx([lone[kind, str(length)] for length in lengths for kind in kinds])
    expect(page.locator("svg.chart circle")).to_have_count(len(lengths))


@pytest.mark.pages
def test_memory_says_what_attention_would_need(play: PlayProcess, open_page: Open) -> None:
    page = open_page(f"{play.url}/#/memory").page
    for log2_length, matrix, layer in (
        (9, "1.00 MiB", "8.00 MiB"),
        (13, "256 MiB", "2.00 GiB"),
        (17, "64.0 GiB", "512 GiB"),
    ):
        page.get_by_label("Length T").fill(str(log2_length))
        page.get_by_label("Heads H").fill("8")
        expect(page.locator(".figure").filter(has_text="One matrix")).to_contain_text(matrix)
        expect(page.locator(".figure").filter(has_text="One layer")).to_contain_text(layer)
    laptop = page.locator("tr").filter(has_text="a laptop")
    expect(laptop).to_contain_text("does not fit")
    expect(laptop).to_contain_text("23,170")  # the square root of 16 GiB by 8 heads and 4 bytes


@pytest.mark.pages
def test_memory_colours_the_blocks_of_running_requests(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = open_page(f"{play.url}/#/memory").page
    pool = page.locator("canvas.pool")
    expect(pool).to_have_accessible_name("0 of 2048 blocks are held by 0 requests")
    with repeated(lambda: client.generate_text(TEXT, Options(ignore_eos=True))):
        expect(pool).to_have_accessible_name(re.compile(r"[1-9]\d* of 2048 blocks are held by [1-9]\d* requests"))
        page.wait_for_function(HAS_COLOUR)
    expect(pool).to_have_accessible_name("0 of 2048 blocks are held by 0 requests")


# True if any square of the pool has a colour: free blocks are grey, within the precision of the theme's colours.
HAS_COLOUR = """() => {
  const canvas = document.querySelector("canvas.pool");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    const channels = data.slice(at, at + 3);
    if (data[at + 3] && Math.max(...channels) - Math.min(...channels) > 60) return true;
  }
  return false;
}"""


@pytest.mark.pages
def test_read_classifies_tags_and_fills_as_the_server_does(play: PlayProcess, client: Client, open_page: Open) -> None:
    page = open_page(f"{play.url}/#/read").page
    choose_model(page, "bert")
    bert = client.with_model("bert")
    text = "the red cat 🐈 in Rome"
    page.locator("#text").fill(text)
    page.get_by_role("button", name="Classify").click()
    expected = bert.classify(text)
    rows = page.locator(".bars li")
    expect(rows).to_have_count(len(expected.labels))
    expect(rows.first).to_have_attribute("data-label", expected.labels[0].label)
    shown = [float(one.get_attribute("data-score") or "nan") for one in rows.all()]
    assert shown == pytest.approx([one.score for one in expected.labels], abs=1e-6)
    page.get_by_role("button", name="Tag").click()
    spans = bert.tag(text).spans
    expect(page.locator("mark")).to_have_count(len(spans))
    assert spans
    for mark, span in zip(page.locator("mark").all(), spans, strict=True):
        assert (mark.text_content() or "").startswith(text[span.start : span.end])
    page.get_by_role("button", name="Fill in").click()
    page.locator("#text").fill("the <mask> cat".replace("<mask>", bert.get_model().mask_token))
    filled = bert.fill_mask(f"the {bert.get_model().mask_token} cat", top_k=8).places[0]
    expect(page.locator(".bars .piece").first).to_contain_text(filled.fillings[0].text.strip())


@pytest.mark.pages
def test_views_of_generation_name_the_models_that_they_need(play: PlayProcess, open_page: Open) -> None:
    page = open_page(play.url).page
    choose_model(page, "bert")
    expect(page.get_by_role("status").filter(has_text="bert is an encoder model")).to_be_visible()


@pytest.mark.pages
def test_chosen_languages_reach_the_model(open_page: Open) -> None:
    languages = {"en": 270, "de": 271, "fr": 272}
    text = TextFormat(
        special_ids=(0, 1, 2, 3, *languages.values()),
        template=("$source_language", "$text", EOS_ID),
        languages=languages,
        default_source_language="en",
        target_language_place="first",
    )
    with Background(lambda: serving(text=text)) as background:
        served = background.served
        with PlayProcess(Addresses(served.target)) as play:
            page = open_page(play.url).page
            type_text(page, "the cat")
            expect(page.get_by_label("From").locator("option")).to_have_text(["default", "de", "en", "fr"])
            page.get_by_label("From").select_option("de")
            page.get_by_label("To").select_option("fr")
            expect(page.locator(".token").first).to_have_attribute("data-id", str(languages["fr"]))
            assert served.runner.encoded[-1][0][0] == languages["de"]
