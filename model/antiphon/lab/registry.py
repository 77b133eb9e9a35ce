"""All experiments by name."""

from __future__ import annotations

from antiphon.lab.experiment import Experiment
from antiphon.lab.experiments.ablations import ABLATIONS
from antiphon.lab.experiments.algorithms import ALGORITHMIC
from antiphon.lab.experiments.compare import COMPARE
from antiphon.lab.experiments.complexity import COMPLEXITY
from antiphon.lab.experiments.decoding import DECODING
from antiphon.lab.experiments.depth import DEPTH
from antiphon.lab.experiments.heads import HEADS
from antiphon.lab.experiments.length import LENGTH
from antiphon.lab.experiments.scan import SCAN
from antiphon.lab.experiments.transfer import TRANSFER

_ALL = (ABLATIONS, DEPTH, LENGTH, SCAN, ALGORITHMIC, COMPLEXITY, DECODING, HEADS, COMPARE, TRANSFER)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
