"""Report of an experiment: one JSON, a table in Markdown with the claims, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.machine import machine
from antiphon.lab.setting import Setting

_VERDICTS = {True: "holds", False: "**contradicted**", None: "not decided"}


def write_report(experiment: Experiment, results: Results, setting: Setting, command: str) -> Path:
    """Write NAME.json, NAME.md and NAME.png to the output folder; return the path of the Markdown file."""
    claims = list(experiment.claims(results))
    path = setting.output / f"{experiment.name}.md"
    described = {
        "experiment": experiment.name,
        "question": experiment.question,
        "command": command,
        "scale": setting.scale,
        "seeds": setting.seeds,
        "trials": [asdict(result) for group in results.trials.values() for result in group],
        "alone": results.alone,
        "claims": [asdict(claim) for claim in claims],
    }
    path.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    experiment.draw(results, path.with_suffix(".png"))
    path.write_text("\n".join(_page(experiment, results, claims, command)) + "\n", encoding="utf-8")
    return path


def _page(experiment: Experiment, results: Results, claims: Sequence[Claim], command: str) -> list[str]:
    first = next(iter(results.trials.values()), ())
    return [
        f"# {experiment.name}",
        "",
        experiment.question,
        "",
        f"![{experiment.name}]({experiment.name}.png)",
        "",
        *table(experiment, results),
        "",
        f"Mean and standard deviation over {len(first)} seeds." if len(first) > 1 else "One seed.",
        "",
        *claim_table(claims),
        "",
        *_tables_alone(results),
        f"    {command}",
        "",
        *_machines(results),
    ]


def _machines(results: Results) -> list[str]:
    """Return a line for each machine of the trials, with its seeds if there are several, and one for figures alone."""
    seeds: dict[str, set[int]] = {}
    for result in (one for group in results.trials.values() for one in group):
        seeds.setdefault(result.machine, set()).add(result.seed)
    if len(seeds) == 1:
        lines = [f"On {name}." for name in seeds]
    else:
        lines = [f"- seed {', '.join(map(str, sorted(numbers)))}: {name}" for name, numbers in seeds.items()]
    return lines + ([f"- figures measured alone: {machine()}"] if results.alone and [*seeds] != [machine()] else [])


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return the lines of the table: a row for each setting, a column for each figure."""
    headings = ["setting", *(heading for heading, _ in experiment.columns.values())]
    lines = [_row(headings), _row(["---"] * len(headings))]
    for name, group in results.trials.items():
        diverged = sum(result.diverged is not None for result in group)
        cells = [_cell(results, name, figure, decimals) for figure, (_, decimals) in experiment.columns.items()]
        note = f" ({diverged} of {len(group)} diverged)" if diverged else ""
        lines.append(_row([f"{name}{note}", *cells]))
    return lines


def _tables_alone(results: Results) -> list[str]:
    """Return the lines of the tables of figures that were measured alone, each with an empty line at the end."""
    lines: list[str] = []
    for title, rows in results.alone.items():
        headings = list(next(iter(rows.values())))
        body = [_row([name, *(f"{values[heading]:.4g}" for heading in headings)]) for name, values in rows.items()]
        lines += [_row([title, *headings]), _row(["---"] * (1 + len(headings))), *body, ""]
    return lines


def _cell(results: Results, name: str, figure: str, decimals: int) -> str:
    return results.shown(name, figure, f".{decimals}f")


def claim_table(claims: Sequence[Claim]) -> list[str]:
    """Return the lines of the table of claims; empty without claims."""
    if not claims:
        return []
    rows = [[claim.source, claim.claim, claim.measured, _VERDICTS[claim.holds]] for claim in claims]
    return [_row(cells) for cells in (["source", "claim", "measured", "verdict"], ["---"] * 4, *rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
