"""Every expression of the dashboard has data in a real Prometheus that scrapes the real server under load."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from antiphon.bundle.manifest import load_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from deploy.dashboards.picture import Answers, draw
from tests.deploy.busy import LENGTHS, busy
from tests.deploy.dashboard import Expression, expressions, of_panel, panels
from tests.deploy.scraping import Prometheus, prometheus
from tests.integration.process import ServerProcess

pytestmark = pytest.mark.programs

T2 = "T²: attention workspace"


@pytest.fixture(scope="module")
def prometheus_with_load() -> Iterator[Prometheus]:
    """Run Prometheus with two servers, one of them under load. The second one reveals labels that do not match."""
    # Budgets are exported only if they are set.
    arguments = ("--memory-limit-bytes", str(2**31))
    with (
        ServerProcess(SHIPPED_BUNDLE, arguments) as server,
        ServerProcess(SHIPPED_BUNDLE, arguments) as idle,
        prometheus([f"127.0.0.1:{one.metrics_port}" for one in (server, idle)]) as watching,
    ):
        watching.wait(lambda one: len(one.ask('up{job="antiphon"} == 1')) == 2)  # earlier growth was not scraped
        with busy(server.target):
            yield watching


def test_every_expression_has_data(prometheus_with_load: Prometheus) -> None:
    # Cards are watched by NVIDIA's exporter, which this machine has not.
    empty: list[Expression] = [one for one in expressions() if "DCGM_" not in one.text]
    assert len(empty) > 80

    def is_full(one: Prometheus) -> bool:
        empty[:] = [expression for expression in empty if not one.ask(expression.text)]
        return not empty

    try:
        prometheus_with_load.wait(is_full)
    except AssertionError:
        pytest.fail("no data: " + "; ".join(f"{one.place} = {one.text}" for one in empty))


def by_length(prometheus_with_load: Prometheus, column: str) -> list[float]:
    """Return the values of the T² panel for each of LENGTHS, shortest first."""
    found = {sample.labels["source_len"]: sample.value for sample in prometheus_with_load.ask(of_panel(T2)[column])}
    return [found[str(length)] for length in LENGTHS]


def test_workspace_grows_with_the_length_and_score_matrices_with_its_square(prometheus_with_load: Prometheus) -> None:
    prometheus_with_load.wait(lambda one: len(one.ask(of_panel(T2)["tokens"])) > len(LENGTHS))
    tokens = by_length(prometheus_with_load, "tokens")
    heads = load_bundle(SHIPPED_BUNDLE).manifest.model.num_heads
    materialised = by_length(prometheus_with_load, "materialised")
    assert tokens == pytest.approx(LENGTHS)
    assert materialised == pytest.approx([4 * heads * length**2 for length in LENGTHS])
    for column in ("measured", "predicted fused"):
        for shorter, longer in pairwise(by_length(prometheus_with_load, column)):
            assert 1.5 < longer / shorter < 2.5, column  # 4 would be quadratic growth


def test_image_has_curves_of_every_kind_of_panel(prometheus_with_load: Prometheus) -> None:
    prometheus_with_load.wait(lambda one: len(one.ask(of_panel(T2)["tokens"])) > len(LENGTHS))
    one_a_kind = {panel["type"]: panel for panel in panels()}
    figure = draw(list(one_a_kind.values()), Answers(prometheus_with_load.url, 0.2))
    drawn = {axes.get_title(loc="left"): axes for axes in figure.axes}
    curves = drawn[one_a_kind["xychart"]["title"]].lines
    assert [np.asarray(curve.get_xdata()).size for curve in curves] == [len(LENGTHS) + 1] * 3
    assert len(drawn) == len(one_a_kind) == 5
