"""Experiment: setting, question, trials, measurements, picture and claims; and the parallel run of its trials."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from antiphon.errors import RecipeError
from antiphon.lab.trial import Figures, Folders, Result, Trial, run_trial

TOY = "toy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Size, seeds and folders that all experiments of one run share.

    data: folder of the public data; None: only experiments that write their data themselves, or toy size.
    output: folder of runs, results and reports.
    scale: factor on training steps; None: toy size, with artificial data and a few steps.
    """

    data: Path | None
    output: Path
    scale: float | None = 1.0
    seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def is_toy(self) -> bool:
        """True at toy size, which shows that an experiment works, and no result."""
        return self.scale is None

    def steps(self, full: int) -> int:
        """Return the number of training steps of a run that has `full` of them at scale 1; 12 at toy size."""
        return 12 if self.scale is None else max(1, round(full * self.scale))

    def folders(self, experiment: str) -> Folders:
        """Return the folders of an experiment."""
        return Folders(runs=self.output / "runs", results=self.output / experiment)

    @property
    def made_data(self) -> Path:
        """Folder of the data that experiments write."""
        return self.output / "data"

    def public_data(self) -> Path:
        """Return the folder of the public data. Raises RecipeError without one."""
        if self.data is None:
            raise RecipeError("--data is missing; this experiment needs the folder of public data, except at toy size")
        return self.data


def parse_scale(text: str) -> float | None:
    """Return the factor of --scale, None for toy. Raises RecipeError naming the flag and its range."""
    if text == TOY:
        return None
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.01 <= scale <= 1000:
        raise RecipeError(f"--scale is {text!r}; it must be toy, or a number from 0.01 to 1000")
    return scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of the literature beside the measurement.

    holds: True, False (contradicted), or None if the difference is within the deviation over seeds, or unknown.
    """

    source: str
    claim: str
    measured: str
    holds: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of all trials by the name of their setting, one for each seed; figures measured alone, if any."""

    trials: Mapping[str, Sequence[Result]]
    alone: Figures = field(default_factory=dict)

    def values(self, name: str, figure: str) -> list[float]:
        """Return a figure of a setting for each seed that has it; diverged runs have none."""
        return [result.figures[figure] for result in self.trials[name] if figure in result.figures]

    def mean(self, name: str, figure: str) -> float:
        """Return the mean of a figure over seeds; NaN without any."""
        return statistics.fmean(values) if (values := self.values(name, figure)) else float("nan")

    def deviation(self, name: str, figure: str) -> float:
        """Return the standard deviation of a figure over seeds; 0 for fewer than two."""
        return statistics.stdev(values) if len(values := self.values(name, figure)) > 1 else 0.0

    def shown(self, name: str, figure: str, form: str = ".1f") -> str:
        """Return the mean of a figure with its deviation over seeds, if it has several; "-" without any value."""
        if not (values := self.values(name, figure)):
            return "-"
        spread = f" ± {self.deviation(name, figure):{form}}" if len(values) > 1 else ""
        return f"{self.mean(name, figure):{form}}{spread}"

    def is_above(self, name: str, reference: str, figure: str) -> bool | None:
        """Return whether a figure of one setting is above that of another.

        None within one standard deviation, or if a setting has no value.
        """
        distance = self.mean(name, figure) - self.mean(reference, figure)
        noise = max(self.deviation(name, figure), self.deviation(reference, figure))
        return distance > 0 if abs(distance) > noise else None  # a comparison with NaN is false

    def has_diverged(self, name: str) -> bool:
        """Return whether all runs of a setting diverged."""
        return all(result.diverged is not None for result in self.trials[name])

    def is_better(self, name: str, reference: str, figure: str, *, lower: bool = False) -> bool | None:
        """Return whether one setting is better than another; a setting that diverged is worse than one that did not.

        lower: less of the figure is better. None as for is_above.
        """
        if self.has_diverged(name) != self.has_diverged(reference):
            return self.has_diverged(reference)
        return self.is_above(reference, name, figure) if lower else self.is_above(name, reference, figure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One experiment of the laboratory.

    trials: training runs of a setting. measure: figures of a trained model, from its averaged checkpoint.
    columns: figures of the table, with heading and number of decimals.
    claims: claims beside their measurements. draw: writes the picture.
    alone: figures that are measured after all trials while nothing else runs, from the averaged checkpoints of the
        first seed by setting; tables of rows of figures by title. None without any.
    """

    name: str
    question: str
    trials: Callable[[Setting], Sequence[Trial]]
    measure: Callable[[Setting, Trial, Path], Figures]
    columns: Mapping[str, tuple[str, int]]
    claims: Callable[[Results], Sequence[Claim]]
    draw: Callable[[Results, Path], None]
    alone: Callable[[Setting, Mapping[str, Path]], Figures] | None = None


def run_trials(experiment: Experiment, setting: Setting, jobs: int) -> Results:
    """Run the trials of an experiment that have no result yet, `jobs` at a time with one thread each.

    The number of jobs does not change any result. All settings run with the first seed before the next seed, students
    after all others, and trials that share a run after the first of them.
    """
    trials = sorted(experiment.trials(setting), key=lambda trial: setting.seeds.index(trial.seed))
    measure = partial(experiment.measure, setting)
    run_one = partial(run_trial, folders=setting.folders(experiment.name), measure=measure)
    finished: list[Result] = []
    for group in _in_order(trials):
        if jobs == 1:
            torch.set_num_threads(1)
            finished += [run_one(trial) for trial in tqdm(group, desc=experiment.name, disable=None)]
        else:
            finished += _run_in_processes(experiment.name, group, run_one, jobs)
    return Results(
        trials={trial.name: [result for result in finished if result.name == trial.name] for trial in trials}
    )


def _in_order(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Return groups of trials: none needs the run of another one of its group, or of a later group."""
    first = {trial.key: trial for trial in reversed(trials)}
    teachers = [trial for trial in trials if trial is first[trial.key] and trial.teacher is None]
    students = [trial for trial in trials if trial is first[trial.key] and trial.teacher is not None]
    return [teachers, students, [trial for trial in trials if trial is not first[trial.key]]]


def _run_in_processes(
    name: str, trials: Sequence[Trial], run_one: Callable[[Trial], Result], jobs: int
) -> list[Result]:
    # Processes are spawned, because a fork of a process with threads of torch can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(run_one, trial): index for index, trial in enumerate(trials)}
        results: dict[int, Result] = {}
        try:
            for future in tqdm(as_completed(futures), total=len(futures), desc=name, disable=None):
                results[futures[future]] = future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[index] for index in range(len(trials))]
