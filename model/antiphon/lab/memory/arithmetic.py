"""Memory arithmetic: a training step, and a translation in PyTorch or by the native graphs of a bundle. Torch-free.

The formulas of training follow transformer/layers.py, ops/attention.py and tasks/loss.py line by line. Autograd saves
the input of a product, the input of a norm, the result of a softmax and of ReLU, and the noise of dropout. A peak is
the largest sum over time of what lives: weights and optimiser, what autograd keeps, and the working memory of the
sublayer that runs. Tensors of the residual stream are float32, also in bf16. Letters as in terms.py; Dp is D rounded
up to 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Precision
from antiphon.lab.memory.terms import FLOAT, Case, Prediction, Sublayer, Term, num_parameters, position_rows, total
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, padded_width

LOSS_ROWS = 256  # ROWS of tasks/loss.py, which imports torch; a test compares the two


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
        kept=kept,
        transient=_stream(case),
        forward=total(kept) + _stream(case),
        backward=total(kept) + 2 * _stream(case),
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
        transient=0 if is_saved else raw,
        forward=total(kept) + (0 if is_saved else raw) + _stream(case),
        backward=total(kept) + 2 * heads + 2 * _stream(case),
        gradients=FLOAT * weights * layers,
        pending=0 if is_saved else -raw,
    )


def loss(case: Case, padding: int) -> Sublayer:
    """Return the chunked loss. padding: rows that it adds, `padding_of` of tasks/loss.py."""
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


def training(case: Case) -> Prediction:
    """Predict one training step of a translation model. Raises UncoveredModelError."""
    weights = FLOAT * num_parameters(case.config)
    fixed = (
        Term(name="parameters", formula="4 P", num_bytes=weights),
        Term(name="AdamW moments", formula="8 P", num_bytes=2 * weights),
        _tables(case),
    )
    steps = _training_steps(case)
    changing = max(_peak(steps), weights)
    kept = _merged(term for step in steps for term in step.kept)
    gradients = Term(name="gradients, after the backward pass", formula="4 P", num_bytes=weights)
    return Prediction(terms=(*fixed, *kept, gradients), peak_bytes=total(fixed) + changing)


def _tables(case: Case) -> Term:
    """Return the constant tables of sinusoidal positions."""
    is_constant = case.config.positions == "sinusoidal"
    num_bytes = FLOAT * case.config.d_model * position_rows(case.config) * is_constant
    return Term(name="tables of positions", formula="4 M rows", num_bytes=num_bytes)


def _training_steps(case: Case) -> list[Sublayer]:
    config = case.config
    source_rows = config.vocab_size if config.tie_source_target else config.resolved_source_vocab_size
    self_attention = attention(case, is_cross=False, is_causal=False)
    causal = attention(case, is_cross=False, is_causal=True)
    cross = attention(case, is_cross=True, is_causal=False)
    inner = feed_forward(case)
    memory = final_norm(case)
    return [
        embedding(case, rows=source_rows, owns_gradient=not config.tie_source_target),
        *_layers(case, [self_attention, inner], config.encoder_layers),
        replace(memory, transient=0),
        projected_memory(case),
        embedding(case, rows=config.vocab_size, owns_gradient=not config.tie_output),
        *_layers(case, [causal, cross, inner], config.decoder_layers),
        memory,
        loss(case, padding(case.tokens)),
    ]


def padding(labels: int) -> int:
    """Return `padding_of` of tasks/loss.py, which imports torch; a test compares the two."""
    return -labels % (LOSS_ROWS if labels > LOSS_ROWS else LOSS_ROWS // 4)


def _layers(case: Case, sublayers: list[Sublayer], count: int) -> list[Sublayer]:
    return ([_checkpointed(case, sublayers)] if case.checkpointing else sublayers) * count


def _checkpointed(case: Case, sublayers: Sequence[Sublayer]) -> Sublayer:
    """Return a layer that keeps only its input, and that the backward pass computes again."""
    stream = FLOAT * case.config.d_model * case.tokens
    is_shared = not case.bf16 or case.config.norm_placement == "pre"  # the input is also saved by the first sublayer
    narrow = sum(t.num_bytes for step in sublayers for t in step.kept if t.name == "bf16 copies of weights")
    return Sublayer(
        kept=(Term(name="inputs of layers", formula="4 M n", num_bytes=stream),),
        transient=narrow,
        forward=stream + max(step.forward for step in sublayers),
        backward=_peak(sublayers) + stream * (1 if is_shared else 2),
        gradients=sum(step.gradients for step in sublayers),
        pending=sum(step.pending for step in sublayers),
    )


def _peak(steps: Sequence[Sublayer]) -> int:
    """Return the largest sum of what lives in a forward pass and in the backward pass after it."""
    best = live = 0
    for step in steps:
        best = max(best, live + step.forward)
        live += step.kept_bytes + step.transient
    live -= sum(step.transient for step in steps)
    for step in reversed(steps):
        live -= step.kept_bytes
        best = max(best, live + step.backward)
        live += step.gradients + step.pending
    return best


def _merged(terms: Iterable[Term]) -> tuple[Term, ...]:
    merged: dict[str, Term] = {}
    for term in terms:
        old = merged.get(term.name)
        merged[term.name] = term if old is None else replace(old, num_bytes=old.num_bytes + term.num_bytes)
    return tuple(merged.values())


_QUANTIZED_ROWS = 64  # rows that one thread quantises at a time: 2 kRowBlock of ops/native/product.cc


def translation(case: Case) -> Prediction:
    """Predict encoding and the last decoding step in PyTorch. Raises UncoveredModelError.

    A batch is encoded, and its last token is decoded with caches of T tokens (transformer/greedy.py). Cached attention
    returns new caches, so that both copies live at the end of a step. The native graphs write in place.
    """
    config = case.config
    weights = FLOAT * num_parameters(config)
    tables = _tables(case)
    narrow = _narrow_weights(config) if case.bf16 else (0, 0)
    caches = 2 * case.element * config.attention_width * case.tokens * config.decoder_layers
    workspace = encoder_workspace(case)
    # The batched product copies keys, and then values, of the source, which are parts of one projection.
    width = config.attention_width * case.has_copies + 2 * config.num_heads
    copied = case.element * width * case.tokens
    terms = (
        Term(name="parameters", formula="4 P", num_bytes=weights),
        tables,
        Term(name="bf16 copies of weights", formula="2 x weights of products", num_bytes=sum(narrow)),
        Term(name="cross-attention caches", formula="2 e A n L", num_bytes=caches),
        Term(name="self-attention caches, old and new", formula="4 e A n L", num_bytes=2 * caches),
        Term(name="encoder workspace", formula=_workspace_formula(case), num_bytes=workspace),
        Term(name="copied keys of one layer", formula="e A n if B > 1, + 2 e H n", num_bytes=copied),
        Term(name="logits of one token", formula="e B V", num_bytes=case.element * case.batch * config.vocab_size),
    )
    step = sum(narrow) + 3 * caches + max(terms[-1].num_bytes, terms[-2].num_bytes)
    memory = FLOAT * config.d_model * case.tokens
    changing = max(narrow[0] + workspace, sum(narrow) + memory + caches, step)
    return Prediction(terms=terms, peak_bytes=weights + tables.num_bytes + changing)


def encoder_workspace(case: Case) -> int:
    """Return the peak of one encoder layer without gradients: attention or feed-forward."""
    config, tokens, element = case.config, case.tokens, case.element
    stream = FLOAT * config.d_model * tokens * (2 if config.norm_placement == "pre" else 1)
    heads = element * config.attention_width * tokens
    pairs = case.batch * case.length * case.length
    inner = element * config.d_ff * tokens * (4 if config.gated else 2)
    update = element * config.d_model * tokens
    if case.backend == "sdpa":
        sums = FLOAT * config.num_heads * tokens
        attention = case.projected_heads + heads + (element + 1) * pairs + sums + case.fused_scratch
    else:
        copies = heads if case.has_copies else 0
        attention = case.projected_heads + max(
            2 * copies + case.matrix, 2 * case.matrix + pairs + max(pairs, copies + heads)
        )
    layer_input = FLOAT * config.d_model * tokens  # held by the stack's loop, beside the stream
    return stream + max(attention, layer_input + inner + update)


def _workspace_formula(case: Case) -> str:
    if case.backend == "sdpa":
        return "4 M n + max((4 e A + 4 H) n + (e + 1) B T^2 + one block, (4 M + 2 e F + e M) n)"
    return "4 M n + max(5 e A n + (2 e H + 1) B T^2, (4 M + 2 e F + e M) n)"


def _narrow_weights(config: ModelConfig) -> tuple[int, int]:
    """Return the bytes of autocast's bf16 copies of weights of products: of the encoder, and of the decoder."""
    attention = 4 * config.d_model * config.attention_width
    inner = config.d_model * config.d_ff * (3 if config.gated else 2)
    encoder = config.encoder_layers * (attention + inner)
    decoder = config.decoder_layers * (2 * attention + inner) + config.vocab_size * config.d_model
    return 2 * encoder, 2 * decoder


def native(case: Case, precision: Precision, cache_element: int) -> Prediction:
    """Predict weights, cache blocks and encoder workspace of native graphs; cache_element: bytes of a cached number."""
    config = case.config
    blocks = 2 * case.batch * blocks_for(case.length)
    block = 2 * config.decoder_layers * config.num_heads * BLOCK_SIZE * padded_width(config.resolved_head_dim)
    terms = (
        Term(name="weights", formula=_WEIGHTS[precision], num_bytes=native_weights(config, precision)),
        Term(
            name="cache blocks of sources and targets",
            formula="2 B ceil(T/16) blocks of 2 L H 16 Dp c",
            num_bytes=blocks * block * cache_element,
        ),
        native_workspace(case, precision),
    )
    return Prediction(terms=terms, peak_bytes=total(terms))


_DEPTH = 64  # inputs of an int8 weight are padded to this multiple, see export/weights.py
_WEIGHTS: dict[str, str] = {
    "float32": "4 P + positions",
    "int8": "products and embeddings + 8 an output + 4 others + positions",
}


def native_weights(config: ModelConfig, precision: Precision) -> int:
    """Return the bytes of a bundle's native weights in float32 or int8."""
    parameters = num_parameters(config)
    widths = {"sinusoidal": config.d_model, "rope": config.resolved_head_dim}  # of constant vectors of positions
    lengths = {config.max_source_len, config.max_target_len}  # equal tables are stored once
    positions = FLOAT * widths.get(config.positions, 0) * sum(lengths)
    if precision == "float32":
        return FLOAT * parameters + positions
    layers, inner = config.encoder_layers + config.decoder_layers, config.d_ff * (2 if config.gated else 1)
    attentions = layers + config.decoder_layers
    width, heads = config.d_model, config.attention_width
    tables = 1 + (not config.tie_source_target) + (not config.tie_output)
    outputs = attentions * (3 * heads + width) + layers * (inner + width) + tables * config.vocab_size
    sizes = (
        (attentions * 3 * heads + layers * inner + tables * config.vocab_size, width),
        (attentions * width, heads),
        (layers * width, config.d_ff),
    )
    padded = sum(count * blocks_for(inputs, _DEPTH) * _DEPTH for count, inputs in sizes)
    rest = parameters - sum(count * inputs for count, inputs in sizes)
    return padded + 8 * outputs + FLOAT * rest + positions


def native_workspace(case: Case, precision: Precision) -> Term:
    """Return the workspace of the native encoder on one thread: linear in n, without any T^2."""
    config, tokens = case.config, case.tokens
    states = 3 if config.norm_placement == "pre" else 2
    inner = config.d_ff * (2 if config.gated else 1)
    widest = max(inner, 4 * config.attention_width)
    rows = min(tokens, _QUANTIZED_ROWS) * (config.d_ff + 8) if precision == "int8" else 0
    return Term(
        name="encoder workspace, fused",
        formula=f"4 n (max(F, 4 A) + {states} M)" + (" + min(n, 64) (F + 8)" if precision == "int8" else ""),
        num_bytes=FLOAT * tokens * (widest + states * config.d_model) + rows,
    )
