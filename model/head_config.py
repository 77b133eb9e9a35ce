"""What an encoder's states are read out for: the heads of BERT and its relatives, described. Torch-free.

Devlin et al. 2019, section 3. A head is an optional transform (dense, activation, norm) and an output product:

    fill_mask      every masked token, over the vocabulary
    classify       the first token, over the labels of one text or a pair
    tag            every token, over the labels
    next_sentence  the first token of a pair, over is_next and not_next
    pool           the first token's transform itself, [M]: BERT's pooled output
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Task = Literal["fill_mask", "classify", "tag", "next_sentence", "pool"]
HeadActivation = Literal["none", "tanh", "relu", "gelu", "gelu_tanh", "silu"]
Scores = Literal["softmax", "sigmoid", "none"]

FIRST_TOKEN_TASKS: frozenset[Task] = frozenset({"classify", "next_sentence", "pool"})


class HeadConfig(BaseModel):
    """One head of an encoder.

    labels: names of the outputs; empty for fill_mask, whose outputs are token ids, and for pool, which has none.
    transform_width: outputs of the dense layer before the output product; None: there is no such layer.
    activation: what follows that layer; norm: whether a LayerNorm follows the activation.
    tied: fill_mask's output product is the token embedding, transposed.
    scores: how outputs become scores: over all labels, each for itself, or as they are (regression).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Task
    labels: tuple[str, ...] = ()
    transform_width: int | None = Field(default=None, ge=1, le=16384)
    activation: HeadActivation = "none"
    norm: bool = False
    tied: bool = False
    bias: bool = Field(default=True, description="A bias on the output product.")
    scores: Scores = "softmax"

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if (self.task in ("fill_mask", "pool")) != (not self.labels):
            raise ValueError(f"labels={list(self.labels)} does not fit task={self.task!r}")
        if self.tied and self.task != "fill_mask":
            raise ValueError(f"tied=True does not fit task={self.task!r}")
        if self.transform_width is None and (self.task == "pool" or self.norm or self.activation != "none"):
            raise ValueError(f"transform_width=None does not fit task={self.task!r} with what follows the transform")
        return self
