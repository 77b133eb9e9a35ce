"""Maximum resident memory of one replica, term by term: the sum that its memory limit must cover.

The terms of the model come from its bundle. The terms of the interpreter, of kernels and of a request are constants
measured on the real server; tests/deploy/test_footprint.py checks them against it. Loads no graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from antiphon.bundle.manifest import Bundle, GraphSet
from antiphon.domain.limits import EngineLimits
from antiphon.ops.cache_geometry import BLOCK_SIZE
from antiphon.rpc.client_waits import FLOOD_FACTOR
from antiphon.server.app import MAX_INCOMPLETE_BYTES
from antiphon.server.models.memory import Need, need_of
from antiphon.server.ports import max_unaccepted_calls
from antiphon.server.settings import AccessSettings

KIB, MIB = 1 << 10, 1 << 20

# Measured on an AMD EPYC, Python 3.11, onnxruntime 1.31.1, as VmRSS of each stage of a start, in MiB, the shipped
# bundle and a Transformer base with 32,000 tokens: modules imported 90 and 90, sessions opened + 8 and + 8, ports
# opened + 6 and + 7.
RUNTIME_BYTES = 106 * MIB
# The supervisor of several workers, which loads no graph: 93 to 97 MiB, most of it Python modules.
SUPERVISOR_BYTES = 108 * MIB
# Objects made from tokenizer.json: 9.6 MiB for a file of 0.5 MiB, 32.6 MiB for 1.9 MiB.
TOKENIZER_FACTOR = 20
# The files are mapped and read completely. In addition, kernels keep packed copies: 4.3 MiB for 9 MiB, 25 for 59.
PACKED_SHARE = 0.5
# Inputs of an int8 product are padded to a multiple of this.
_DEPTH = 64
# The allocator rounds up to one of eight sizes to a power of two (model/antiphon/ops/native/counting_allocator.h)...
ROUNDING = 1.125
# ... and keeps at most this much freed memory for the next run.
ALLOCATOR_CACHE_BYTES = 64 * MIB
# 4,200 calls whose answers are not read: 26 KB each without their tokens. 1,088 connections: 19 KB each.
CALL_BYTES = 28 * KIB
CONNECTION_BYTES = 20 * KIB
# 8,192 calls that were reset before the event loop accepted them: 15.6 KB each.
UNACCEPTED_CALL_BYTES = 16 * KIB
# An id is an int of 28 bytes, with 8 bytes in its list; the received message holds it once more.
SOURCE_TOKEN_BYTES = 40
# Fragmentation of malloc, stacks of threads, a scrape, attention maps (20 MB): resident memory varied by 10 % in 58
# minutes of mixed traffic (docs/BENCHMARKS.md).
HEADROOM = 0.1
# The limit is the sum, rounded up to a multiple of this.
STEP_BYTES = 16 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One part of the sum: its name, its formula and its bytes."""

    name: str
    formula: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Maximum memory of one replica, and the limit that covers it.

    weight_bytes: of the graphs. num_blocks: cache blocks of a worker; 0 without a decoder.
    """

    terms: tuple[Term, ...]
    weight_bytes: int
    num_blocks: int

    @property
    def sum_bytes(self) -> int:
        """Return the sum of all terms, headroom included."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def limit_bytes(self) -> int:
        """Return the memory limit: the sum, rounded up."""
        return math.ceil(self.sum_bytes / STEP_BYTES) * STEP_BYTES


def footprint_of(bundle: Bundle, graphs: GraphSet, limits: EngineLimits, num_workers: int = 1) -> Footprint:
    """Return the maximum memory of a replica that serves these graphs within these limits in each of its workers."""
    need = need_of(bundle, graphs, limits)
    own = [
        Term(name="runtime", formula="Python, libraries, gRPC: measured", num_bytes=RUNTIME_BYTES),
        *_model_terms(bundle, graphs, need),
        *_workspace_terms(_encoder(bundle, graphs, need, limits), _decoder(bundle, limits)),
        *_request_terms(limits),
    ]
    terms = [_weights(need), *(_of_all(term, num_workers) for term in own)]
    if (shortlist := bundle.manifest.text.shortlist) is not None:
        shortlist_bytes = bundle.manifest.files[shortlist].size
        terms.insert(1, Term(name="shortlist", formula="its file, mapped once", num_bytes=shortlist_bytes))
    if num_workers > 1:
        terms.insert(1, Term(name="supervisor", formula="starts the workers: measured", num_bytes=SUPERVISOR_BYTES))
    spare_bytes = math.ceil(HEADROOM * sum(term.num_bytes for term in terms))
    headroom = Term(name="headroom", formula=f"{HEADROOM:g} x the sum of the above", num_bytes=spare_bytes)
    return Footprint(terms=(*terms, headroom), weight_bytes=need.memory.weight_bytes, num_blocks=need.num_blocks)


def _weights(need: Need) -> Term:
    formula = "files of the graphs and their weights, mapped once"
    return Term(name="weights", formula=formula, num_bytes=need.memory.weight_bytes)


def _of_all(term: Term, num_workers: int) -> Term:
    """Return the term of all workers together."""
    if num_workers == 1:
        return term
    return replace(term, formula=f"{num_workers} workers x {term.formula}", num_bytes=num_workers * term.num_bytes)


def _model_terms(bundle: Bundle, graphs: GraphSet, need: Need) -> Sequence[Term]:
    weights, manifest = need.memory.weight_bytes, bundle.manifest
    text_bytes = sum(manifest.files[name].size for name in manifest.text.tokenizer_files)
    terms = [
        Term(
            name="packed weights",
            formula=f"{PACKED_SHARE:g} x weights: copies that kernels keep",
            num_bytes=math.ceil(PACKED_SHARE * weights),
        ),
        Term(
            name="tokenizer",
            formula=f"{TOKENIZER_FACTOR} x {text_bytes:,} bytes of its files",
            num_bytes=TOKENIZER_FACTOR * text_bytes,
        ),
    ]
    if manifest.text.shortlist is not None and graphs.precision != "float32":
        model = manifest.model
        width = math.ceil(model.d_model / _DEPTH) * _DEPTH
        formula = f"{model.vocab_size:,} tokens x {width:,}: int8 columns of the last product, once a shortlist is used"
        terms.append(Term(name="candidates", formula=formula, num_bytes=model.vocab_size * width))
    if need.memory.cache_bytes:
        terms.append(Term(name="cache", formula=_cache_formula(need), num_bytes=need.memory.cache_bytes))
    return terms


def _cache_formula(need: Need) -> str:
    return f"{need.num_blocks:,} blocks of {BLOCK_SIZE} tokens x {need.block_bytes:,} bytes"


def _workspace_terms(encoder: Term, decoder: Term) -> Sequence[Term]:
    """Return the larger workspace of encoder and decoder, which run one after the other, and the allocator's cache."""
    larger = max(encoder, decoder, key=lambda term: term.num_bytes)
    return [
        Term(name=larger.name, formula=f"{larger.formula} x {ROUNDING:g} rounding", num_bytes=larger.num_bytes),
        Term(name="allocator", formula="maximum of kept freed blocks", num_bytes=ALLOCATOR_CACHE_BYTES),
    ]


def _encoder(bundle: Bundle, graphs: GraphSet, need: Need, limits: EngineLimits) -> Term:
    fit, num_bytes = bundle.memory_fit(graphs), need.memory.workspace_bytes
    formula = f"{num_bytes:,} bytes, the largest run of the encoder"
    if fit is not None and limits.workspace_limit_bytes is None:
        quadratic = f" + {fit.c:.3g} x T^2" if fit.c else ""
        formula = f"(a + b x T{quadratic}: {fit.a:,.0f} + {fit.b:,.0f} a token, {num_bytes:,} bytes)"
    return Term(name="encoder workspace", formula=formula, num_bytes=math.ceil(ROUNDING * num_bytes))


def _decoder(bundle: Bundle, limits: EngineLimits) -> Term:
    """Return the workspace for logits of all scored tokens of a step (Score) and the widest activations, in float32."""
    model = bundle.manifest.model
    if not model.decoder_layers:
        return Term(name="decoder workspace", formula="no decoder", num_bytes=0)
    num_tokens = max(limits.max_num_seqs, limits.max_num_batched_tokens)
    width = model.vocab_size + model.d_ff + model.d_model
    formula = f"({num_tokens:,} scored tokens x ({model.vocab_size:,} + {model.d_ff:,} + {model.d_model:,}) x 4)"
    return Term(name="decoder workspace", formula=formula, num_bytes=math.ceil(ROUNDING * num_tokens * width * 4))


def _request_terms(limits: EngineLimits) -> Sequence[Term]:
    num_connections, num_calls = limits.max_accepted_requests, _default("max_concurrent_rpcs")
    num_unaccepted = max_unaccepted_calls(num_calls)
    return [
        Term(
            name="connections",
            formula=f"({limits.max_num_seqs:,} running + {limits.max_queued_requests:,} waiting)"
            f" x {CONNECTION_BYTES:,} bytes, one for each request",
            num_bytes=num_connections * CONNECTION_BYTES,
        ),
        Term(
            name="calls",
            formula=f"{num_calls:,} (max_concurrent_rpcs) x {CALL_BYTES:,} bytes",
            num_bytes=num_calls * CALL_BYTES,
        ),
        Term(
            name="unaccepted calls",
            formula=f"{num_unaccepted:,} that wait for the event loop x {UNACCEPTED_CALL_BYTES:,} bytes",
            num_bytes=num_unaccepted * UNACCEPTED_CALL_BYTES,
        ),
        Term(
            name="arriving requests",
            formula=f"{FLOOD_FACTOR:g} x {MAX_INCOMPLETE_BYTES:,} bytes of incomplete messages",
            num_bytes=math.ceil(FLOOD_FACTOR * MAX_INCOMPLETE_BYTES),
        ),
        Term(
            name="waiting tokens",
            formula=f"{limits.max_queued_tokens:,} x {SOURCE_TOKEN_BYTES} bytes",
            num_bytes=limits.max_queued_tokens * SOURCE_TOKEN_BYTES,
        ),
        Term(
            name="unread answers",
            formula="max_unsent_bytes",
            num_bytes=_default("max_unsent_bytes"),
        ),
    ]


def _default(name: str) -> int:
    """Return the default of a setting of the gRPC port."""
    value: int = AccessSettings.model_fields[name].default
    return value
