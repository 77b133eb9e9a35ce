"""All experiments by name."""

from __future__ import annotations

from antiphon.model.lab.ablations import ABLATIONS
from antiphon.model.lab.depth import DEPTH
from antiphon.model.lab.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (ABLATIONS, DEPTH)}
