"""Export of the explain graph, which takes a source and a target and returns the attention weights of every head.

The arithmetic is float32 at every precision; int8 weights are unpacked in the graph (explain_weights.py). Writes no
file.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.explain_session import ExplainSession, explain_inputs
from antiphon.bundle.manifest import Precision
from antiphon.errors import VerificationError
from antiphon.export.explain.explain_module import ExplainModule
from antiphon.export.graphs.simplify import forget_shapes, simplify
from antiphon.export.graphs.trace import OPSET, quiet_exporter
from antiphon.export.weights.quantize import quantize_rows
from antiphon.transformer.transformer import Transformer

# Sizes of the free axes. They are not 1, which the tracer would treat as a constant, and not equal, which it would
# treat as one axis.
_EXAMPLE_LENS = {"source": 7, "target": 11}
_AXES = {"source_ids": "source", "type_ids": "source", "target_ids": "target"}

# Largest difference of an attention weight, which is 0 to 1. float32 is summed in another order, as in verify.py.
TOLERANCE = 1e-4
_CASES = ((1, 1), (9, 4), (33, 17))


def trace_explain(model: Transformer) -> ir.Model:
    """Return the explain graph in float32; its products read constants [K, O]."""
    module, names = ExplainModule(model).eval(), explain_inputs(model.config)
    examples = tuple(torch.zeros(1, _EXAMPLE_LENS[_AXES[name]], dtype=torch.int64) for name in names)
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            input_names=names,
            output_names=module.output_names,
            dynamic_shapes=(tuple({1: _AXES[name]} for name in names),),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    simplify(program.model)
    forget_shapes(program.model.graph)
    return program.model


def verify_explain(path: Path, model: Transformer, precision: Precision, *, seed: int = 0) -> float:
    """Compare an explain graph with PyTorch in float32, weights rounded as in the graph; returns the largest error.

    Raises VerificationError when an attention weight is off by more than TOLERANCE.
    """
    reference = rounded(ExplainModule(model), precision)
    session = ExplainSession(path)
    random = np.random.default_rng(seed)
    worst = max(_error(session, reference, lens, random) for lens in _CASES)
    if not worst <= TOLERANCE:
        raise VerificationError(
            f"{path.name} disagrees with the model: an attention weight is off by {worst:.1e}, "
            f"at most {TOLERANCE:.0e} is allowed"
        )
    return worst


def _error(
    session: ExplainSession, reference: ExplainModule, lens: tuple[int, int], random: np.random.Generator
) -> float:
    """Return the largest difference over all maps, or nan, for a random source and target of these lengths."""
    ids = _random_ids(reference.config, lens, random)
    found = session.run(**{name: row.tolist() for name, row in ids.items()})
    with torch.no_grad():
        expected = reference.maps(*(torch.from_numpy(row)[None] for row in ids.values()))
    return float(np.max([np.abs(found[name] - maps.numpy()).max() for name, maps in expected.items()]))


def _random_ids(
    config: ModelConfig, lens: tuple[int, int], random: np.random.Generator
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Return random ids of the graph's inputs by name, for a source and target of these lengths at most."""
    source_len, target_len = min(lens[0], config.max_source_len), min(lens[1], config.max_target_len)
    sizes = {
        "source_ids": (config.resolved_source_vocab_size, source_len),
        "type_ids": (config.token_types, source_len),
        "target_ids": (config.vocab_size, target_len),
    }
    return {name: random.integers(0, *sizes[name]) for name in explain_inputs(config)}


@torch.no_grad()
def rounded(module: ExplainModule, precision: Precision) -> ExplainModule:
    """Return a copy whose products and token embeddings are rounded as the precision stores them (quantize.py).

    Token types and the tables of disentangled attention are stored in float32 at every precision.
    """
    result = deepcopy(module).eval()
    if precision == "float32":
        return result
    kept = result.encoder.token_types if result.encoder is not None else None
    parts = [part for part in result.modules() if isinstance(part, nn.Linear | nn.Embedding) and part is not kept]
    weights: set[Tensor] = {part.weight for part in parts}
    for weight in weights:
        integers, scales = quantize_rows(weight.numpy())
        weight.copy_(torch.from_numpy(integers * scales[:, None]))
    return result
