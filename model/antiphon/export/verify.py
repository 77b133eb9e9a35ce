"""Verification of exported graphs against the PyTorch model: both run on random sources, step by step.

Graphs run as the server runs them: sources are packed; caches are written in place; rows of a step are at different
positions; memory beyond a row's length is not cleared. The reference decodes each target whole. Graphs return no
logits; they return the log-probabilities of the whole vocabulary on request. Cuda graphs are computed on the CPU, which
checks the graphs and not the kernels.

Of an encoder-only model the states are compared, and the outputs of heads for all states, also for those that their
task does not need.

Integers lose more in some trained models than in random ones, and most over random tokens. Where a loss is beyond the
limit, it must be that of the same rounding in PyTorch, and the distributions of tokens are compared over texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import GraphSet, Precision
from antiphon.errors import StepError, VerificationError
from antiphon.export.bundle_model import Floats, Ids, Lens, NativeEncoder, NativeStepper
from antiphon.export.calibration import answered, with_rounding
from antiphon.export.cuda_stepper import CudaStepper, cuda_encoder, cuda_stepper
from antiphon.export.weights import Outliers
from antiphon.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest allowed differences between graphs and model.

    max_error: largest difference of a logit, in units of the largest logit, or of 1 if the largest is smaller.
    rms_error: root mean square of the difference, relative to that of the logits after each row's mean is subtracted.
    min_agreement: fraction of steps whose likeliest token must be the same.
    """

    max_error: float
    rms_error: float
    min_agreement: float


# float32: sums in another order. int8: 8-bit weights and activations through a dozen layers, see tests/parity. int4 has
# seven times the error of int8; it is largest, 0.31 and 0.69, with random weights and unscaled scores (T5).
# bfloat16 and float16: weights have 8 and 11 bits, and every node rounds its result. Random models of twelve layers are
# off by 0.016 and 0.002; only where their scores are not scaled either (T5), they are off by more than is allowed.
TOLERANCES: dict[Precision, Tolerance] = {
    "float32": Tolerance(max_error=1e-4, rms_error=1e-4, min_agreement=1.0),
    "int8": Tolerance(max_error=0.25, rms_error=0.1, min_agreement=0.85),
    "int4": Tolerance(max_error=1.5, rms_error=0.6, min_agreement=0.5),
    "bfloat16": Tolerance(max_error=0.25, rms_error=0.1, min_agreement=0.8),
    "float16": Tolerance(max_error=0.05, rms_error=0.02, min_agreement=0.9),
}

# Largest mean divergence over texts of the graphs' distribution of a token from the model's (Kullback-Leibler, in
# nats). It is the expected rise of the logarithm of perplexity.
DIVERGENCES: dict[Precision, float] = {"int8": 0.05, "int4": 0.5}
_ROUNDING = 1.5  # largest allowed error in units of that of the same rounding in PyTorch


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Data that integer graphs are made of: token ids of texts, and the outliers of products."""

    texts: Sequence[Sequence[int]]
    outliers: Outliers


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One batch: the source length of each row, and the number of tokens to decode."""

    source_lens: tuple[int, ...]
    steps: int

    def capped(self, config: ModelConfig) -> Case:
        """Return the batch with lengths within the model's limits."""
        lens = tuple(min(length, config.max_source_len) for length in self.source_lens)
        return Case(source_lens=lens, steps=min(self.steps, config.max_target_len))


CASES = (
    Case(source_lens=(1,), steps=4),
    Case(source_lens=(23,), steps=8),
    Case(source_lens=(5, 5, 2), steps=8),
    Case(source_lens=(9, 33, 1, 9, 17, 33, 9), steps=12),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Measured differences, in the units of Tolerance."""

    max_error: float
    rms_error: float
    agreement: float

    def excess(self, limit: Tolerance) -> str | None:
        """Return a description of the first measure beyond its limit, or None. A measure that is nan is beyond it."""
        if not self.max_error <= limit.max_error:
            return f"a logit is off by {self.max_error:.1e}, at most {limit.max_error:.1e} is allowed"
        if not self.rms_error <= limit.rms_error:
            return (
                f"logits are off by {self.rms_error:.1e} (root mean square), at most {limit.rms_error:.0e} is allowed"
            )
        if not self.agreement >= limit.min_agreement:
            return (
                f"likeliest tokens agree in {self.agreement:.1%} of steps, at least {limit.min_agreement:.0%} required"
            )
        return None


def verify(
    directory: Path, graphs: GraphSet, model: Transformer, *, seed: int = 0, calibration: Calibration | None = None
) -> Comparison:
    """Compare a graph set with the float32 model over CASES.

    calibration: of native integer graphs, to judge an error that is beyond its tolerance; None: it is refused.
    Raises VerificationError when a measure is beyond its tolerance.
    """
    random = np.random.default_rng(seed)
    config, limit = model.config, TOLERANCES[graphs.precision]
    cases = [_Batch.random(model, case.capped(config), random) for case in CASES]
    opened = NativeStepper if graphs.lowering == "native" else cuda_stepper
    try:
        stepper = opened(directory, graphs, config)
        comparison = _compare_cases(stepper, cases)
        excess = comparison.excess(limit)
        if excess and calibration is not None and graphs.precision in DIVERGENCES:
            same = _of_rounding(with_rounding(model, graphs.precision, calibration.outliers), cases)
            excess = comparison.excess(_at_least(limit, same))
            if excess is None:
                excess = _excess_over_texts(stepper, model, calibration.texts, DIVERGENCES[graphs.precision])
    except StepError as error:
        raise VerificationError(f"{graphs.lowering} {graphs.precision} graphs: {error}") from None
    if excess:
        raise VerificationError(f"{graphs.lowering} {graphs.precision} graphs disagree with the model: {excess}")
    return comparison


def _compare_cases(stepper: NativeStepper | CudaStepper, cases: Sequence[_Batch]) -> Comparison:
    pairs = [_logits_of(stepper, case) for case in cases]
    width = cases[0].logits.shape[-1]
    actual, expected = (
        np.concatenate([logits.reshape(-1, width) for logits in side]) for side in zip(*pairs, strict=True)
    )
    return compare(actual, expected)


def _of_rounding(rounding: Transformer, cases: Sequence[_Batch]) -> Comparison:
    """Return the differences between a model that rounds and the expected logits."""
    width = cases[0].logits.shape[-1]
    found = [_logits(rounding, case.source, case.target, case.lens).reshape(-1, width) for case in cases]
    return compare(np.concatenate(found), np.concatenate([case.logits.reshape(-1, width) for case in cases]))


def _at_least(limit: Tolerance, same: Comparison) -> Tolerance:
    """Return the limits of graphs whose rounding alone causes the differences of `same`."""
    return Tolerance(
        max_error=max(limit.max_error, _ROUNDING * same.max_error),
        rms_error=max(limit.rms_error, _ROUNDING * same.rms_error),
        min_agreement=min(limit.min_agreement, 1 - _ROUNDING * (1 - same.agreement)),
    )


def _excess_over_texts(
    stepper: NativeStepper | CudaStepper, model: Transformer, texts: Sequence[Sequence[int]], limit: float
) -> str | None:
    """Return a description of a mean divergence beyond its limit, or None. Each token follows the same tokens."""
    with torch.no_grad():
        pairs = [answered(model, ids) for ids in texts if ids]
    batches = [
        _Batch(model, np.array([source]), np.array([target]), np.array([len(source)], np.int32))
        for source, target in pairs
    ]
    divergence = float(np.concatenate([divergences(*_logits_of(stepper, batch)) for batch in batches]).mean())
    if divergence <= limit:
        return None
    return f"over texts, tokens diverge by {divergence:.3f} nats on average, at most {limit} is allowed"


def divergences(actual: Floats, expected: Floats) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence [N] of the distributions of logits [N, V] from the expected ones."""
    found, right = (torch.from_numpy(logits).double().log_softmax(dim=1) for logits in (actual, expected))
    return (right.exp() * (right - found)).sum(dim=1).numpy()


def compare(actual: Floats, expected: Floats) -> Comparison:
    """Measure the differences between logits [N, V]."""
    centred = expected - expected.mean(axis=1, keepdims=True)
    error = actual - expected
    return Comparison(
        max_error=float(np.abs(error).max() / max(1.0, np.abs(expected).max())),
        rms_error=float(np.sqrt((error**2).mean() / (centred**2).mean())),
        agreement=float((actual.argmax(axis=1) == expected.argmax(axis=1)).mean()),
    )


class _Batch:
    """Sources [B, S] of `lens` tokens, targets [B, T], and the model's logits [B, T, V] for them."""

    def __init__(self, model: Transformer, source: Ids, target: Ids, lens: Lens) -> None:
        self.source, self.target, self.lens = source, target, lens
        self.sources = [row[:length] for row, length in zip(source, lens, strict=True)]
        self.logits = _logits(model, source, target, lens)

    @classmethod
    def random(cls, model: Transformer, case: Case, random: np.random.Generator) -> _Batch:
        lens = np.array(case.source_lens, np.int32)
        source = random.integers(0, model.config.resolved_source_vocab_size, (len(lens), int(lens.max())))
        return cls(model, source, random.integers(0, model.config.vocab_size, (len(lens), case.steps)), lens)


def _logits(model: Transformer, source: Ids, target: Ids, lens: Lens) -> Floats:
    """Return the model's logits [B, T, V] for targets [B, T]; a decoder-only model does not read the sources."""
    with torch.no_grad():
        if model.encoder is None:
            logits = model.logits(model.decode(torch.from_numpy(target), None))
        else:
            logits = model(torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(lens))
    return logits.numpy()


def _logits_of(stepper: NativeStepper | CudaStepper, case: _Batch) -> tuple[Floats, Floats]:
    """Return found and expected logits [N, V] of all steps, and of a second run that feeds each target in two pieces.

    The normaliser of the model's logits turns log-probabilities into logits.
    """
    rows, steps, width = case.logits.shape
    single = step_through(stepper, case.sources, case.target).reshape(-1, width)
    cuts = np.arange(rows, dtype=np.int32) % steps
    sequences = stepper.encode(case.sources, steps)
    begun = [row for row in range(rows) if cuts[row]]
    if begun:
        heads = [case.target[row, : cuts[row]] for row in begun]
        stepper.step(sequences.rows(begun), heads, np.zeros(len(begun), np.int32))
    pieces = stepper.step(sequences, [row[cut:] for row, cut in zip(case.target, cuts, strict=True)], cuts)
    expected = np.concatenate([case.logits.reshape(-1, width), case.logits[:, -1]])
    normaliser: Floats = torch.from_numpy(expected).logsumexp(dim=-1, keepdim=True).numpy()
    return np.concatenate([single, pieces]) + normaliser, expected


def step_through(stepper: NativeStepper | CudaStepper, sources: Sequence[Ids], target: Ids) -> Floats:
    """Feed target [B, T] token by token, each row one step later than the previous row; returns the results [B, T, V].

    A row that has not begun repeats its first token at its first position; one that has ended repeats its last.
    """
    rows, steps = target.shape
    step = stepper.start(sources, steps + 1)
    logits: list[list[Floats]] = [[] for _ in range(rows)]
    for time in range(steps + rows - 1):
        positions = np.clip(time - np.arange(rows), 0, steps - 1).astype(np.int32)
        results = step(target[np.arange(rows), positions], positions)
        for row in range(rows):
            if 0 <= time - row < steps:
                logits[row].append(results[row])
    return np.array(logits)


_SOURCE_LENS = (9, 33, 1, 9, 17, 33, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderTolerance:
    """Largest allowed differences of states and of outputs of heads.

    max_error: largest difference, in units of the largest number, or of 1 if the largest is smaller.
    rms_error: root mean square of the difference, relative to that of the numbers.
    """

    max_error: float
    rms_error: float


# float32: sums in another order. int8: 8-bit weights and activations, whose error is largest with random weights, see
# tests/parity; the loss of a trained model is measured on its task. bfloat16 and float16: weights have 8 and 11 bits,
# and every node rounds its result; random models of two layers are off by 0.015 and 0.002.
ENCODER_TOLERANCES: dict[Precision, EncoderTolerance] = {
    "float32": EncoderTolerance(max_error=1e-4, rms_error=1e-4),
    "int8": EncoderTolerance(max_error=0.25, rms_error=0.15),
    "int4": EncoderTolerance(max_error=1.5, rms_error=0.6),
    "bfloat16": EncoderTolerance(max_error=0.25, rms_error=0.1),
    "float16": EncoderTolerance(max_error=0.05, rms_error=0.02),
}


def verify_encoder(directory: Path, graphs: GraphSet, model: Transformer, *, seed: int = 0) -> None:
    """Compare the encoder's states and every head's outputs with the float32 model.

    Raises VerificationError when one is beyond its tolerance.
    """
    limit = ENCODER_TOLERANCES[graphs.precision]
    for part, actual, expected in _compared(directory, graphs, model, np.random.default_rng(seed)):
        size = np.abs(expected)
        largest = float(np.abs(actual - expected).max() / max(1.0, size.max()))
        rms = float(np.sqrt(((actual - expected) ** 2).mean()) / max(1e-3, np.sqrt((size**2).mean())))
        # Written so that a measure that is not a number is beyond its limit.
        if not (largest <= limit.max_error and rms <= limit.rms_error):
            raise VerificationError(
                f"{graphs.lowering} {graphs.precision} {part} graph disagrees with the model: off by {largest:.1e}, "
                f"{rms:.1e} in root mean square; at most {limit.max_error:.0e} and {limit.rms_error:.0e} are allowed"
            )


def _compared(
    directory: Path, graphs: GraphSet, model: Transformer, random: np.random.Generator
) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield name, found and expected numbers of each graph: states first, then the outputs of every head."""
    config = model.config
    lens = [min(length, config.max_source_len) for length in _SOURCE_LENS]
    sources = [random.integers(0, config.vocab_size, length) for length in lens]
    types = [random.integers(0, max(1, config.token_types), length) for length in lens]
    opened = NativeEncoder if graphs.lowering == "native" else cuda_encoder
    encoder = opened(directory, graphs, config)
    actual = encoder.encode(sources, types)
    expected = reference_states(model, sources, types)
    yield "encoder", np.concatenate(actual), expected
    for head in config.heads:
        hidden = np.tile(expected, (1, config.head_input_width(head) // config.d_model))
        with torch.no_grad():
            outputs = model.read_out(head.task, torch.from_numpy(hidden)).numpy()
        yield head.task, encoder.read_out(head.task, hidden), outputs


def reference_states(model: Transformer, sources: list[Ids], types: list[Ids]) -> Floats:
    """Return the model's states [N, M] of sources of unequal lengths, encoded with padding and packed afterwards."""
    lens = torch.tensor([len(source) for source in sources], dtype=torch.int32)
    padded, kinds = (
        torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
        for rows in (sources, types)
    )
    with torch.no_grad():
        states = model.encode(padded, lens, kinds if model.config.token_types else None)
    return torch.cat([row[:length] for row, length in zip(states, lens.tolist(), strict=True)]).numpy()
