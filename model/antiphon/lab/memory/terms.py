"""Vocabulary of the memory arithmetic: cases, terms with formulas, lives of sublayers, and lengths. Torch-free.

Axes: B batch, T length of source and target, n = B T tokens, M model width, A = H D width of all heads, H heads, F
feed-forward width, V vocabulary, L layers, P parameters; e bytes of an element in products: 4, or 2 in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from antiphon.architecture.config import ModelConfig
from antiphon.errors import UncoveredModelError

LabBackend = Literal["eager", "sdpa"]
FLOAT = 4
_FUSED_KEYS = 512  # keys in one block of PyTorch's fused kernel
_COVERED_POSITIONS = ("sinusoidal", "learned", "rope", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One line of the page: name, formula as text, and bytes."""

    name: str
    formula: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step to predict: model, B rows, source and target of T tokens, and the options that change its memory."""

    config: ModelConfig
    batch: int
    length: int
    backend: LabBackend = "eager"
    bf16: bool = False
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """Number of source tokens, and of target tokens: n = B T."""
        return self.batch * self.length

    @property
    def element(self) -> int:
        """Bytes of an element in products: e."""
        return 2 if self.bf16 else FLOAT

    @property
    def matrix(self) -> int:
        """Bytes of one layer's attention matrices: e H B T^2."""
        return self.element * self.config.num_heads * self.tokens * self.length

    @property
    def fused_rows(self) -> int:
        """Rows of queries in one block of PyTorch's fused kernel for CPUs (FlashAttentionKernel.cpp)."""
        return 256 if self.length >= 768 else 64 if self.length >= 192 else 32

    @property
    def fused_scratch(self) -> int:
        """Bytes of that kernel's buffer on one thread: scores of a block, their maxima and sums, and the result."""
        keys = min(_FUSED_KEYS, self.length)
        scores = self.fused_rows * keys
        return FLOAT * (scores + self.fused_rows * (2 + self.config.resolved_head_dim)) + 2 * scores * self.bf16

    @property
    def fused_backward_scratch(self) -> int:
        """Bytes of the buffer of its backward pass on one thread: scores of a block and their gradients."""
        return 2 * FLOAT * self.fused_rows * min(_FUSED_KEYS, self.length)

    @property
    def projected_heads(self) -> int:
        """Bytes of what self-attention projects: 3 e A n; rotary positions add rotated queries and keys, 2 e A n.

        Values are a part of the projection, which therefore lives beside the rotated tensors.
        """
        parts = 5 if self.config.positions == "rope" else 3
        return parts * self.element * self.config.attention_width * self.tokens

    @property
    def has_copies(self) -> bool:
        """True where the batched product copies queries, keys and values: heads of several rows are not adjacent."""
        return self.batch > 1 and self.config.num_heads > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sublayer:
    """Life of one sublayer's memory in a training step, in bytes.

    kept: what autograd saves until the sublayer's backward pass.
    transient: what the forward pass holds until its end, although autograd does not save it.
    forward, backward: memory at the peak of its forward and backward pass, kept included.
    gradients: of its weights, from its backward pass until the optimiser's step.
    pending: gradients of activations that wait for an earlier sublayer.
    """

    kept: tuple[Term, ...]
    forward: int
    backward: int
    transient: int = 0
    gradients: int = 0
    pending: int = 0

    @property
    def kept_bytes(self) -> int:
        """Sum of the kept terms."""
        return total(self.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Terms of one case, and the predicted peak in bytes."""

    terms: tuple[Term, ...]
    peak_bytes: int


def total(terms: Iterable[Term]) -> int:
    """Return the sum of the terms, in bytes."""
    return sum(term.num_bytes for term in terms)


def check_covered(config: ModelConfig) -> None:
    """Raise UncoveredModelError for a model whose steps the arithmetic does not describe."""
    for name, value, covered in (
        ("architecture", config.architecture, ("encoder-decoder",)),
        ("positions", config.positions, _COVERED_POSITIONS),
        ("norm", config.norm, ("layernorm",)),
        ("bias", config.bias, (True,)),
        ("activation_dropout", config.activation_dropout, (False,)),
        ("embedding_norm", config.embedding_norm, (False,)),
        ("residual", config.residual, (True,)),
        ("decoder_self", config.decoder_self, ("attention",)),
        ("module_heads", config.module_heads, (None,)),
    ):
        if value not in covered:
            raise UncoveredModelError(
                f"{name}={value!r} is not covered by the arithmetic; it covers {', '.join(map(repr, covered))}"
            )


def num_parameters(config: ModelConfig) -> int:
    """Return P, the number of parameters; shared ones count once. Raises UncoveredModelError."""
    check_covered(config)
    width, heads, inner = config.d_model, config.attention_width, config.d_ff
    attention = 4 * width * heads + 3 * heads + width
    hidden = inner * (2 if config.gated else 1)
    feed_forward = width * hidden + hidden + inner * width + width
    norm = 2 * width
    encoder = config.encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = config.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    tables = config.vocab_size + (0 if config.tie_source_target else config.resolved_source_vocab_size)
    output = (0 if config.tie_output else config.vocab_size * width) + config.vocab_size * config.output_bias
    last_norms = 2 * norm if config.norm_placement == "pre" else 0
    learned = position_rows(config) * width if config.positions == "learned" else 0
    return encoder + decoder + tables * width + output + last_norms + learned


def position_rows(config: ModelConfig) -> int:
    """Return the rows of both position tables; sinusoidal tables are constants, learned tables are parameters."""
    if config.positions == "none":
        return 0
    return config.max_source_len + config.max_target_len + 2 * config.positions_offset


LECTURE = ((8192, "256 MiB"), (32768, "4 GB"), (131072, "64 GB"))
_LONGEST = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class LectureRow:
    """Length, the lecture's claim, one float32 matrix T x T, and all matrices of one sequence in one training step."""

    length: int
    claim: str
    matrix_bytes: int
    model_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """Length from which attention needs more than the feed-forward layer, with its formula; lengths below 0 are 0."""

    name: str
    formula: str
    length: float


def lecture_rows(config: ModelConfig) -> list[LectureRow]:
    """Return the lecture's table. A decoder layer has two matrices for each head: its own tokens and the source."""
    matrices = config.num_heads * (config.encoder_layers + 2 * config.decoder_layers)
    return [
        LectureRow(length=length, claim=claim, matrix_bytes=FLOAT * length**2, model_bytes=matrices * FLOAT * length**2)
        for length, claim in LECTURE
    ]


def crossings(config: ModelConfig) -> list[Crossing]:
    """Return the lengths at which an encoder layer's attention equals its feed-forward layer.

    Operations of T tokens: matrices 4 T^2 A, projections 8 T M A, feed-forward 4 T M F (6 with a gate). What autograd
    keeps of them in float32: matrices 4 H T^2 and masks T^2, projections 16 A T, feed-forward 4 F T.
    """
    width, heads, inner = config.d_model, config.attention_width, config.d_ff * (1.5 if config.gated else 1)
    saved = config.d_ff * (4 if config.gated else 1 if config.activation == "relu" else 2)
    factor = "1.5 " if config.gated else ""
    matrix = config.num_heads + 0.25
    values = (
        ("operations, matrices alone", f"{factor}M F / A", width * inner / heads),
        ("operations, with projections", f"{factor}M F / A - 2 M", width * inner / heads - 2 * width),
        ("kept activations, matrices alone", f"{saved // config.d_ff} F / (H + 1/4)", saved / matrix),
        (
            "kept activations, with projections",
            f"({saved // config.d_ff} F - 4 A) / (H + 1/4)",
            (saved - 4 * heads) / matrix,
        ),
    )
    return [Crossing(name=name, formula=formula, length=max(0.0, length)) for name, formula, length in values]


def with_length(case: Case, length: int) -> Case:
    """Return the case with T = length; the tables of positions grow if they are too short."""
    config = case.config
    lengths = {name: max(length, getattr(config, name)) for name in ("max_source_len", "max_target_len")}
    return replace(case, config=config.model_copy(update=lengths), length=length)


def longest(case: Case, predict: Callable[[Case], Prediction], memory_bytes: int) -> int:
    """Return the longest T whose predicted peak fits in memory_bytes; 0 if not even one token fits."""
    fits, exceeds = 0, _LONGEST
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if predict(with_length(case, middle)).peak_bytes <= memory_bytes:
            fits = middle
        else:
            exceeds = middle
    return fits
