"""Configuration of the heads of an encoder-only model (Devlin et al. 2019, section 3). Imports no torch.

A head is an optional transform (dense layer, activation, norm) and an output layer. Inputs and outputs by task:

    fill_mask      each masked token -> the vocabulary
    classify       first token of a text or a pair -> the labels
    tag            each token -> the labels
    next_sentence  first token of a pair -> is_next, not_next
    pool           first token -> output of the transform, [M]; it has no output layer (BERT's pooled output)
    embed          poolings of all states, concatenated -> output of the transform; it has no output layer
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Task = Literal["fill_mask", "classify", "tag", "next_sentence", "pool", "embed"]
HeadActivation = Literal["none", "tanh", "relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"]
Scores = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

FIRST_TOKEN_TASKS: frozenset[Task] = frozenset({"classify", "next_sentence", "pool"})


class HeadConfig(BaseModel):
    """One head of an encoder-only model.

    labels: names of the outputs; empty for fill_mask, whose outputs are token ids, and for pool and embed.
    input_width: number of inputs; None: the width of the states. Only for embed.
    transform_width: number of outputs of the dense layer of the transform; None: no transform.
    activation: activation after that dense layer.
    norm: True: a LayerNorm follows the activation.
    tied: True: the output layer is the token embedding, transposed; only for fill_mask.
    scores: function from logits to scores: softmax over all labels, sigmoid of each label, or none (regression).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Task
    labels: tuple[str, ...] = ()
    input_width: int | None = Field(default=None, ge=1, le=131072)
    transform_width: int | None = Field(default=None, ge=1, le=16384)
    activation: HeadActivation = "none"
    norm: bool = False
    tied: bool = False
    bias: bool = Field(default=True, description="A bias in the output layer; of embed in its dense layer.")
    scores: Scores = "softmax"

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if (self.task in ("fill_mask", "pool", "embed")) != (not self.labels):
            raise ValueError(f"labels={list(self.labels)} does not fit task={self.task!r}")
        if self.tied and self.task != "fill_mask":
            raise ValueError(f"tied=True does not fit task={self.task!r}")
        if self.input_width is not None and self.task != "embed":
            raise ValueError(f"input_width={self.input_width} does not fit task={self.task!r}")
        if self.transform_width is None and (self.task in ("pool", "embed") or self.norm or self.activation != "none"):
            raise ValueError(
                f"transform_width=None does not fit task={self.task!r}, activation={self.activation!r} and "
                f"norm={self.norm}: these need a transform"
            )
        return self


class EmbeddingConfig(BaseModel):
    """Vector of a text as the checkpoint of an encoder-only model declares it (sentence-transformers).

    The poolings of the states are concatenated, a head for embed maps them if the model has one, and the result is
    normalised and cut.

    poolings: "mean_sqrt_len_tokens" divides the sum by the square root of the length, "weightedmean" weights each state
        by its position from 1 on. The others have the names of sentence-transformers too.
    normalize: True: the vector has length 1 before it is cut.
    width: number of elements that are kept; None: all.
    prompt: text that stands before every text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    poolings: tuple[Pooling, ...] = Field(min_length=1, max_length=6)
    normalize: bool = False
    width: int | None = Field(default=None, ge=1)
    prompt: str | None = None
