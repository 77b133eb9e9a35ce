"""Panels of the cards, from NVIDIA's DCGM exporter; empty where none is scraped."""

from __future__ import annotations

from deploy.dashboards.shapes import BAD, GOOD, WARNING, About, Panel, lines

# The exporter runs on each node under a job of its own, so no variable of the dashboard selects its series.
CARD = "Hostname, gpu"
CARD_LEGEND = "{{Hostname}} {{gpu}}"

BUSY = About(
    title="GPU busy",
    text="Share of time in which a kernel ran on the card, and in which its tensor cores worked; from NVIDIA's DCGM "
    "exporter, empty without it. Good: busy near 1 under load; less means that the card waits for the host.",
    unit="percentunit",
)
MEMORY = About(
    title="GPU memory, share",
    text="Used memory of the card divided by its memory; from the DCGM exporter, empty without it. Good: constant "
    "after the start, because the pool of cache blocks is reserved then.",
    unit="percentunit",
)
HEAT = About(
    title="GPU temperature",
    text="Degrees Celsius of the card; from the DCGM exporter, empty without it. Good: below 80; a hot card lowers its "
    "clock.",
    unit="celsius",
)


def panels() -> list[Panel]:
    """Return panels of use, memory and temperature of every card."""
    used, free = _of("DCGM_FI_DEV_FB_USED"), _of("DCGM_FI_DEV_FB_FREE")
    return [
        lines(
            BUSY,
            {
                CARD_LEGEND: f"{_of('DCGM_FI_DEV_GPU_UTIL')} / 100",
                f"tensor cores {CARD_LEGEND}": _of("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
            },
        ),
        lines(MEMORY, {CARD_LEGEND: f"{used} / ({used} + {free})"}, limits=[(0, GOOD), (0.95, WARNING), (0.99, BAD)]),
        lines(HEAT, {CARD_LEGEND: _of("DCGM_FI_DEV_GPU_TEMP")}, limits=[(0, GOOD), (80, WARNING), (90, BAD)]),
    ]


def _of(name: str) -> str:
    return f"max by ({CARD}) ({name})"
