"""Verification of the exported graphs of an encoder-only model: graphs and PyTorch model run on random sources.

Sources of unequal lengths are packed in one run, as the server packs them; the reference pads them. Heads read all
states, also those that their task does not need, so that more outputs are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from antiphon.bundle.manifest import GraphSet, Precision
from antiphon.bundle.native_encoder import Floats, Ids, NativeEncoder
from antiphon.errors import VerificationError
from antiphon.export.verification.cuda_stepper import cuda_encoder
from antiphon.transformer.transformer import Transformer

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
TOLERANCES: dict[Precision, EncoderTolerance] = {
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
    limit = TOLERANCES[graphs.precision]
    for part, found, expected in _compared(directory, graphs, model, np.random.default_rng(seed)):
        size = np.abs(expected)
        largest = float(np.abs(found - expected).max() / max(1.0, size.max()))
        rms = float(np.sqrt(((found - expected) ** 2).mean()) / max(1e-3, np.sqrt((size**2).mean())))
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
    found = encoder.encode(sources, types)
    expected = reference_states(model, sources, types)
    yield "encoder", np.concatenate(found), expected
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
