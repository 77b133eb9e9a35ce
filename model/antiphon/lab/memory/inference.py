"""Memory arithmetic of one translation: in PyTorch with caches, and by the native graphs of a bundle. Torch-free.

PyTorch: a batch is encoded, and its last token is decoded with caches of T tokens (transformer/greedy.py). Its cached
attention returns new caches, so that both copies live at the end of a step. The native graphs write in place.
Letters as in terms.py; Dp is D rounded up to 16.
"""

from __future__ import annotations

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Precision
from antiphon.lab.memory.terms import FLOAT, Case, Prediction, Term, num_parameters, position_rows, total
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, padded_width

_QUANTIZED_ROWS = 64  # rows that one thread quantises at a time: 2 kRowBlock of ops/native/product.cc


def translation(case: Case) -> Prediction:
    """Predict encoding and the last decoding step in PyTorch. Raises UncoveredModelError."""
    config = case.config
    weights = FLOAT * num_parameters(config)
    is_constant = config.positions == "sinusoidal"
    tables = FLOAT * config.d_model * position_rows(config) * is_constant
    narrow = _narrow_weights(config) if case.bf16 else (0, 0)
    caches = 2 * case.element * config.attention_width * case.tokens * config.decoder_layers
    workspace = encoder_workspace(case)
    # The batched product copies keys, and then values, of the source, which are parts of one projection.
    width = config.attention_width * case.has_copies + 2 * config.num_heads
    copied = case.element * width * case.tokens
    terms = (
        Term(name="parameters", formula="4 P", num_bytes=weights),
        Term(name="tables of positions", formula="4 M rows", num_bytes=tables),
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
    return Prediction(terms=terms, peak_bytes=weights + tables + changing)


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


_DEPTH = 64  # inputs of an int8 weight are padded to this multiple, see export/weights/packing.py
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
    others = parameters - sum(count * inputs for count, inputs in sizes)
    return padded + 8 * outputs + FLOAT * others + positions


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
