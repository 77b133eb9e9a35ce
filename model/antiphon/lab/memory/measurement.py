"""Measured peaks: PyTorch's allocator events for training and translation, the counting allocator for native graphs.

Weights, optimiser state and tables exist before the events of costs.allocated_peak and are added.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle
from antiphon.export.profile import encoder_inputs, measure_peak
from antiphon.lab.costs import allocated_peak, median_seconds
from antiphon.lab.memory.terms import Case
from antiphon.ops.workspace import Workspace
from antiphon.training.optimizer import Optimizer
from antiphon.training.recipe import TrainConfig
from antiphon.training.translation import Batch, BatchLoss
from antiphon.transformer.transformer import Transformer

_LEARNING_RATE = 1e-3


class TrainingStep:
    """Training step with random weights and random texts that fill the batch."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Transformer(case.config, attention_backend=case.backend).train()
        self.model.checkpoint_layers(case.checkpointing)
        self.loss = BatchLoss(self.model)
        self.optimizer = Optimizer(self.model, TrainConfig())
        ids = torch.randint(0, case.config.vocab_size, (3, case.batch, case.length))
        self.batch = Batch(source=ids[0], source_lens=_lens(case), inputs=ids[1], labels=ids[2])

    def run(self) -> None:
        """Update the weights once."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.case.bf16):
            loss = self.loss(self.batch, 0.1)
        (loss / self.case.tokens).sum().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(_LEARNING_RATE)

    def peak_bytes(self) -> int:
        """Return the peak of one step, with weights, moments and tables."""
        for parameter in self.model.parameters():  # an update by nothing makes the moments
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step(_LEARNING_RATE)
        return allocated_peak(self.run) + _state_bytes(self.model) + 2 * _size(self.model.parameters())

    def seconds(self, steps: int) -> float:
        """Return the median time of a step."""
        return median_seconds({"step": self.run}, steps)["step"]


@torch.no_grad()
def translation_peak(case: Case) -> int:
    """Return the peak of encoding and of the last decoding step in PyTorch, with weights and tables."""
    model = Transformer(case.config, attention_backend=case.backend).eval()
    ids = torch.randint(0, case.config.vocab_size, (case.batch, case.length))

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.bf16):
            _translate(model, case, ids)

    return allocated_peak(run) + _state_bytes(model)


def _translate(model: Transformer, case: Case, ids: Tensor) -> Tensor:
    lens, config = _lens(case), case.config
    cross_kv = model.project_memory(model.encode(ids, lens))
    shape = (2, case.batch, config.num_heads, case.length, config.resolved_head_dim)
    kind = torch.bfloat16 if case.bf16 else torch.float32
    self_kv = [tuple(torch.zeros(shape, dtype=kind)) for _ in range(config.decoder_layers)]
    hidden, _ = model.step(ids[:, :1], lens - 1, [(key, value) for key, value in self_kv], cross_kv, lens)
    return model.logits(hidden)


def native_workspace_peak(bundle: Bundle, case: Case) -> int:
    """Return the peak workspace of the bundle's native encoder on one thread. Raises GraphError or WorkspaceError."""
    graphs = bundle.graph_set()
    workspace = Workspace(is_own=True)
    encoder = Graph(bundle.file(graphs.encoder_file), "encoder", workspace)
    return measure_peak(
        encoder, workspace, encoder_inputs(bundle.manifest.model, graphs.cache, case.batch, case.length)
    )


def weights_bytes(bundle: Bundle) -> int:
    """Return the size of the weights file of the bundle's native graphs."""
    name = f"weights.native.{bundle.graph_set().precision}.bin"
    return bundle.file(name).stat().st_size


def pool_bytes(bundle: Bundle, case: Case) -> int:
    """Return the bytes of a pool for every source and target of the case, made as the server makes it."""
    graphs = bundle.graph_set()
    inputs = encoder_inputs(bundle.manifest.model, graphs.cache, 2 * case.batch, case.length)
    return inputs["cache"].nbytes


def _lens(case: Case) -> Tensor:
    return torch.full((case.batch,), case.length, dtype=torch.int32)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_bytes(model: nn.Module) -> int:
    return _size(model.parameters()) + _size(model.buffers())
