"""Heads of an encoder-only model, as HeadConfig describes them.

A head gets only the states of the tokens that its task uses; the caller selects them.

Axes: K states, M model width (for embed that of all poolings), O outputs (labels, or the vocabulary for fill_mask).
"""

from __future__ import annotations

from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadConfig
from antiphon.ops.activations import ACTIVATIONS
from antiphon.transformer.dropout import Dropout


class Head(nn.Module):
    """Dense layer, activation, norm and output layer (Devlin et al. 2019, sections 3.1 and 4); see head_config.py."""

    def __init__(self, config: ModelConfig, head: HeadConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.config = head
        width = head.transform_width or config.d_model
        self.transform: nn.Linear | None = None
        if head.transform_width is not None:
            inputs = config.head_input_width(head)
            self.transform = nn.Linear(inputs, width, bias=head.bias or head.task != "embed")
        self.activation = ACTIVATIONS[head.activation]
        self.norm = nn.LayerNorm(width, eps=config.norm_eps) if head.norm else None
        self.dropout = Dropout(config.dropout if head.labels else 0.0)
        self.output: nn.Linear | None = None
        if head.task not in ("pool", "embed"):
            outputs = config.vocab_size if head.task == "fill_mask" else len(head.labels)
            self.output = nn.Linear(width, outputs, bias=head.bias)
            if head.tied:
                self.output.weight = embedding.weight

    def transformed(self, hidden: Tensor) -> Tensor:
        """Return the input of the output layer, [K, width of the transform], or [K, M] without one; hidden [K, M]."""
        if self.transform is not None:
            hidden = self.activation(self.transform(hidden))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(hidden)  # type: ignore[no-any-return]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs [K, O] for hidden [K, M]; for pool and embed the output of the transform."""
        hidden = self.transformed(hidden)
        return hidden if self.output is None else self.output(hidden)
