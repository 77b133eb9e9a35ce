"""Memory of each sublayer in a training step, as this code's autograd saves it. Torch-free.

The formulas follow transformer/layers.py, ops/attention.py and losses.py line by line. Autograd saves the input
of a product, the input of a norm, the result of a softmax and of ReLU, and the noise of dropout. Letters as in
terms.py. Tensors of the residual stream are float32, also in bf16.
"""

from __future__ import annotations

from antiphon.architecture.config import ModelConfig
from antiphon.lab.memory.terms import FLOAT, Case, Sublayer, Term, total

LOSS_ROWS = 256  # ROWS of losses.py, which imports torch; a test compares the two


def _stream(case: Case) -> int:
    """Return the bytes of one float32 tensor [B, T, M]."""
    return FLOAT * case.config.d_model * case.tokens


def _heads(case: Case) -> int:
    """Return the bytes of queries, of keys or of values: e A n."""
    return case.element * case.config.attention_width * case.tokens


def _narrow(case: Case, weights: int) -> Term:
    return Term(name="bf16 copies of weights", formula="2 x weights of products", num_bytes=2 * weights * case.bf16)


def _input(case: Case) -> Term:
    size = case.element * case.config.d_model * case.tokens
    return Term(name="inputs of products", formula="e M n", num_bytes=size)


def _tail(case: Case) -> tuple[Term, ...]:
    """Return what dropout, residual sum and norm save after a sublayer."""
    noise = case.config.d_model * case.tokens if case.config.dropout else 0
    return (
        Term(name="noise of dropout", formula="M n", num_bytes=noise),
        Term(name="inputs of norms", formula="4 M n + 8 n", num_bytes=_stream(case) + 8 * case.tokens),
    )


def _start(case: Case) -> int:
    """Return what lives beside the input of a sublayer's first product: the stream, where it is not that input."""
    is_pre = case.config.norm_placement == "pre"
    return _stream(case) * (case.bf16 + is_pre)


def _sublayer(
    case: Case, own: tuple[Term, ...], weights: tuple[int, int], *, forward: int, backward: int, pending: int = 0
) -> Sublayer:
    """Return a sublayer from what it keeps itself and from its own peaks; add input, residual sum and norm.

    weights: of the first products and of the last product, without biases.
    """
    first, last = weights
    kept = (_input(case), *own, *_tail(case), _narrow(case, first + last))
    edge = total((_input(case), _narrow(case, first + last))) + _start(case)
    update = case.element * case.config.d_model * case.tokens
    after = total(kept) + _stream(case) * (1 + case.bf16) + 2 * update
    unkept = total(_tail(case)) if case.config.norm_placement == "post" else _tail(case)[0].num_bytes
    during = total(kept) - total(own) - unkept + backward + _stream(case) + FLOAT * last
    return Sublayer(
        kept=kept,
        forward=max(edge + forward, after),
        backward=max(during, total(kept) + 2 * _stream(case)),
        gradients=FLOAT * (first + last + 6 * case.config.d_model),
        pending=pending,
    )


def attention(case: Case, *, is_cross: bool, is_causal: bool) -> Sublayer:
    """Return self-attention, or cross-attention, whose keys and values `projected_memory` makes."""
    config, heads, matrix = case.config, _heads(case), case.matrix
    pairs = case.length * case.length * (1 if is_causal else case.batch)
    width = config.d_model * config.attention_width
    weights = (width if is_cross else 3 * width, width)
    made = heads if is_cross else case.projected_heads  # by the first product
    context = Term(name="contexts", formula="e A n", num_bytes=heads)
    pending = 2 * heads if is_cross and not _saves_projections(case) else 0
    if case.backend == "sdpa":
        mask = Term(name="masks", formula="e B T^2", num_bytes=0 if is_causal else case.element * pairs)
        own = (
            Term(name="queries, keys, values", formula="3 e A n; rotary: 5 e A n", num_bytes=made),
            mask,
            context,
            Term(name="row sums of fused attention", formula="4 H n", num_bytes=FLOAT * config.num_heads * case.tokens),
        )
        forward = total(own) + pairs * (not is_causal) + case.fused_scratch
        backward = total(own) + 4 * heads + case.fused_backward_scratch
        return _sublayer(case, own, weights, forward=forward, backward=backward, pending=pending)
    copied = 3 * heads if case.has_copies else made
    own = (
        Term(name="queries, keys, values", formula="3 e A n", num_bytes=copied),
        Term(name="attention matrices", formula="e H B T^2", num_bytes=matrix),
        Term(name="masks", formula="B T^2; causal: T^2", num_bytes=pairs),
        context,
    )
    forward = copied + (made if case.has_copies else 0) + heads + 2 * matrix + 2 * pairs
    backward = copied + (heads if not case.has_copies else 0) + 3 * matrix + pairs
    return _sublayer(case, own, weights, forward=forward, backward=backward, pending=pending)


def feed_forward(case: Case) -> Sublayer:
    """Return the feed-forward layer: ReLU saves its result, other activations save their input too."""
    config = case.config
    inner = case.element * config.d_ff * case.tokens
    is_relu = config.activation == "relu"
    copies, forward, backward, formula = (1, 2, 3, "e F n") if is_relu else (2, 2, 3, "2 e F n")
    if config.gated:
        copies, forward, backward, formula = 4, 4, 6, "4 e F n"
    own = (Term(name="feed-forward", formula=formula, num_bytes=copies * inner),)
    weights = (config.d_model * config.d_ff * (2 if config.gated else 1), config.d_model * config.d_ff)
    update = case.element * config.d_model * case.tokens
    return _sublayer(case, own, weights, forward=forward * inner + update, backward=backward * inner)


def embedding(case: Case, *, rows: int, owns_gradient: bool) -> Sublayer:
    """Return an embedding with positions and dropout. rows: of the table; its gradient is dense.

    owns_gradient: False where the table is tied to another one, whose gradient this one is added to.
    """
    stream, table = _stream(case), FLOAT * rows * case.config.d_model
    dropped = case.config.d_model * case.tokens if case.config.dropout else 0
    noise = Term(name="noise of dropout", formula="M n", num_bytes=dropped)
    learned = FLOAT * case.config.max_source_len * case.config.d_model * (case.config.positions == "learned")
    return Sublayer(
        kept=(noise,),
        forward=3 * stream,
        backward=noise.num_bytes + stream + max(stream, table),
        gradients=learned + table * owns_gradient,
    )


def final_norm(case: Case) -> Sublayer:
    """Return the norm after a stack of pre-norm layers, and its result; without one, only the result."""
    is_pre = case.config.norm_placement == "pre"
    kept = _tail(case)[1:] if is_pre else ()
    return Sublayer(
        kept=kept, held=_stream(case), forward=total(kept) + _stream(case), backward=total(kept) + 2 * _stream(case)
    )


def _saves_projections(case: Case) -> bool:
    """Return whether the projected keys and values of the source are saved; if not, attention saves copies of them.

    A layer's backward pass frees the saved ones and leaves gradients of the same size.
    """
    return case.backend == "sdpa" or not case.has_copies or case.checkpointing


def projected_memory(case: Case) -> Sublayer:
    """Return keys and values of the source for every layer of the decoder, projected before the first one."""
    layers, heads = case.config.decoder_layers, _heads(case)
    weights = 2 * case.config.d_model * case.config.attention_width
    memory = Term(
        name="inputs of products",
        formula="4 M n; bf16: 2 M n L",
        num_bytes=_input(case).num_bytes * (layers if case.bf16 else 1),
    )
    is_saved = _saves_projections(case)
    raw = 2 * heads * layers
    keys = Term(name="keys, values of the source", formula="2 e A n L", num_bytes=raw if is_saved else 0)
    kept = (memory, keys, _narrow(case, weights * layers))
    return Sublayer(
        kept=kept,
        held=0 if is_saved else raw,
        forward=total(kept) + (0 if is_saved else raw) + _stream(case),
        backward=total(kept) + 2 * heads + 2 * _stream(case),
        gradients=FLOAT * weights * layers,
        pending=0 if is_saved else -raw,
    )


def loss(case: Case, padding: int) -> Sublayer:
    """Return the chunked loss. padding: rows that it adds, `padding_of` of losses.py."""
    config, element = case.config, case.element
    rows = case.tokens + padding
    chunk = min(rows, LOSS_ROWS) * config.vocab_size
    table = config.vocab_size * config.d_model
    hidden = element * rows * config.d_model
    kept = (
        Term(name="loss: hidden states", formula="e M n", num_bytes=hidden),
        Term(name="loss: gradient of logits", formula="e V n", num_bytes=element * rows * config.vocab_size),
        _narrow(case, table),
    )
    chunk_bytes = 6 if case.bf16 else 4  # float32 logits, and in bf16 the product that they are made of
    copies = 6 if case.bf16 else 8
    return Sublayer(
        kept=kept,
        forward=total(kept) + chunk_bytes * chunk,
        backward=total(kept) + copies * table + hidden,
        gradients=FLOAT * table,
    )


def source_rows(config: ModelConfig) -> int:
    """Return the rows of the encoder's table."""
    return config.vocab_size if config.tie_source_target else config.resolved_source_vocab_size
