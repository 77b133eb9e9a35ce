"""All experiments by name."""

from __future__ import annotations

from antiphon.model.lab.ablations import ABLATIONS
from antiphon.model.lab.decoding import DECODING
from antiphon.model.lab.depth import DEPTH
from antiphon.model.lab.experiment import Experiment
from antiphon.model.lab.heads import HEADS
from antiphon.model.lab.length import LENGTH

_ALL = (ABLATIONS, DEPTH, LENGTH, DECODING, HEADS)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
