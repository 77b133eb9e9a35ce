"""Setting of a run of the laboratory: size, seeds and folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from antiphon.errors import RecipeError
from antiphon.lab.trial import Folders

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
