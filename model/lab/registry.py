"""All experiments by name."""

from __future__ import annotations

from antiphon.model.lab.experiment import Experiment
from antiphon.model.lab.experiments.ablations import ABLATIONS
from antiphon.model.lab.experiments.algorithms import ALGORITHMIC
from antiphon.model.lab.experiments.compare import COMPARE
from antiphon.model.lab.experiments.complexity import COMPLEXITY
from antiphon.model.lab.experiments.decoding import DECODING
from antiphon.model.lab.experiments.depth import DEPTH
from antiphon.model.lab.experiments.heads import HEADS
from antiphon.model.lab.experiments.length import LENGTH
from antiphon.model.lab.experiments.scan import SCAN
from antiphon.model.lab.experiments.transfer import TRANSFER

_ALL = (ABLATIONS, DEPTH, LENGTH, SCAN, ALGORITHMIC, COMPLEXITY, DECODING, HEADS, COMPARE, TRANSFER)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
