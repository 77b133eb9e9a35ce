"""Answers about a model outside its engine, one call at a time: attention weights, scores of the next token, positions.

Axes: V vocabulary, E edits, P positions, W width of the embeddings, M model width, H heads, D head width.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig, Part
from antiphon.bundle.explain_session import ExplainSession
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.bundle.position_tables import Floats
from antiphon.domain.errors import Unsupported
from antiphon.errors import GraphError
from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.fixed_positions import alibi_slopes, rotary_rates, sinusoids
from antiphon.ops.sampling import SamplingArrays, neutral_sampling
from antiphon.runtime.runner import NOT_FINITE, DecodeBatch, Runner, Samples

# Maximum number of attention weights of one answer: with 4 bytes each, in memory and on the wire, 64 MiB. The number
# grows with the square of the lengths; the shipped model's longest source and target have 5.2 million.
MAX_WEIGHTS = 1 << 24


class Explainer:
    """Attention weights by the explain graph of a bundle, which the first call loads.

    Calls may come from any thread; they wait for each other. The size of an answer is bounded.
    """

    def __init__(self, bundle: Bundle, *, threads: int = 1, precision: Precision | None = None) -> None:
        """Load nothing yet. precision: of the other graphs; only int8 and float32 have explain graphs."""
        names = {graphs.precision: graphs.explain for graphs in bundle.manifest.graphs if graphs.explain is not None}
        choices: tuple[Precision, ...] = (precision,) if precision in ("int8", "float32") else ("int8", "float32")
        self._bundle = bundle
        self._name = next((names[choice] for choice in choices if choice in names), None)
        self._threads = threads
        self._session: ExplainSession | None = None
        self._lock = threading.Lock()

    @property
    def is_available(self) -> bool:
        """True when the bundle has an explain graph."""
        return self._name is not None

    def num_weights(self, source_len: int, target_len: int) -> int:
        """Return the number of attention weights for tokens that encoder and decoder read; 0 for a missing part."""
        model = self._bundle.manifest.model
        num_keys = source_len + (target_len if model.decoder_self == "attention" else 0)
        per_head = model.encoder_layers * source_len**2 + model.decoder_layers * target_len * num_keys
        return model.num_heads * per_head

    def longest_target(self, source_len: int) -> int:
        """Return the largest number of decoder tokens whose weights, with a source's, are at most MAX_WEIGHTS."""
        model = self._bundle.manifest.model
        room = (MAX_WEIGHTS // model.num_heads - model.encoder_layers * source_len**2) // model.decoder_layers
        if model.decoder_self != "attention":
            return max(0, room // source_len)
        # The positive root of T^2 + source_len * T = room.
        return (math.isqrt(source_len**2 + 4 * room) - source_len) // 2 if room > 0 else 0

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, Floats]:
        """Return the attention weights by name (explain_session.py) for the tokens that encoder and decoder read.

        source_ids: with end token; empty for a decoder-only model. target_ids: with begin token, or prompt; empty for
        an encoder-only model. type_ids: token types of the source; empty if all are 0.

        The caller has checked lengths and ids. Raises Unsupported if the bundle has no explain graph or the answer
        would exceed MAX_WEIGHTS, GraphError if the graph fails.
        """
        if self._name is None:
            raise Unsupported(
                f"bundle {self._bundle.manifest.name!r} holds no explain graph; antiphon export writes one"
            )
        num_weights = self.num_weights(len(source_ids), len(target_ids))
        if num_weights > MAX_WEIGHTS:
            raise Unsupported(
                f"{len(source_ids)} source and {len(target_ids)} target tokens have {num_weights} attention weights; "
                f"at most {MAX_WEIGHTS} are computed"
            )
        with self._lock:
            if self._session is None:
                self._session = ExplainSession(self._bundle.file(self._name), threads=self._threads)
            return self._session.run(source_ids, target_ids, type_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """Edits of single tokens before the next token is sampled, as SamplingArrays describes them."""

    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[E]"""
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 3), np.float32))
    """[E, 3]"""
    restriction: int = 0
    """As the parameter of this name in SamplingArrays."""


@dataclass(frozen=True, slots=True)
class NextScores:
    """Scores of the next token."""

    logprobs: NDArray[np.float32]
    """[V]: natural log-probabilities under the model; -inf where the logit is -inf."""
    scores: NDArray[np.float32]
    """[V]: edited logits, minus the logarithm of the sum of the model's exp(logit); -inf for a forbidden token. Where
    nothing is edited, they are equal to logprobs."""


class NextTokenScorer:
    """Scores every token of the vocabulary after one target. Calls may come from any thread; they wait for each other.

    The first call opens a runner of its own with one row: the same graphs over the same mapped weights, and a cache for
    one sequence. So a step of the engine never carries the candidates of a whole vocabulary.
    `model/antiphon/ops/logits_warpers.py` makes distributions of the scores.
    """

    def __init__(self, open_runner: Callable[[], Runner]) -> None:
        """Load nothing yet. open_runner: opens a runner for one row, with blocks for its longest source and target."""
        self._open_runner = open_runner
        self._runner: Runner | None = None
        self._lock = threading.Lock()

    def score(self, source_ids: Sequence[int], decoder_input_ids: Sequence[int], edits: Edits) -> NextScores:
        """Return the scores after a target. The bits are those that the engine's own rows sample from.

        source_ids: end token included; empty for a decoder-only model. decoder_input_ids: begin token, prefix and
        generated tokens.

        The caller has checked lengths and ids. Raises GraphError if a graph fails or the scores are not finite, and
        what open_runner raises.
        """
        with self._lock:
            if self._runner is None:
                self._runner = self._open_runner()
            runner = self._runner
            num_source_blocks = blocks_for(len(source_ids), runner.facts.block_size)
            if source_ids:
                runner.encode([source_ids], [range(num_source_blocks)])
            samples = runner.decode(_batch(runner, len(source_ids), decoder_input_ids, edits))
            return _scores_of(samples, runner.facts.vocab_size)


def _batch(runner: Runner, source_len: int, decoder_input_ids: Sequence[int], edits: Edits) -> DecodeBatch:
    """Return a batch that feeds the whole target and samples twice after it: without the edits, then with them."""
    facts, num_fed = runner.facts, len(decoder_input_ids)
    vocab_size = facts.vocab_size
    num_source, num_target = (
        blocks_for(source_len, facts.block_size),
        blocks_for(num_fed, facts.target_block_size),
    )
    return DecodeBatch(
        token_ids=np.array(decoder_input_ids, np.int64),
        positions=np.arange(num_fed, dtype=np.int32),
        offsets=np.array([0, num_fed], np.int32),
        self_tables=np.arange(num_source, num_source + num_target, dtype=np.int32)[None],
        cross_tables=np.arange(max(1, num_source), dtype=np.int32)[None],  # a table has at least one column
        source_lens=np.array([source_len], np.int32),
        sampling=_sampling(num_fed - 1, edits, vocab_size),
        max_num_logprobs=vocab_size,
    )


def _sampling(pick: int, edits: Edits, vocab_size: int) -> SamplingArrays:
    sampling = replace(
        neutral_sampling(2),
        picks=np.full(2, pick, np.int32),
        edit_offsets=np.array([0, 0, len(edits.ids)], np.int32),
        edit_ids=edits.ids,
        edit_values=edits.values,
    )
    sampling.ints("num_logprobs")[:] = vocab_size
    sampling.ints("restriction")[1] = edits.restriction
    return sampling


def _scores_of(samples: Samples, vocab_size: int) -> NextScores:
    if samples.token_ids[0] == NOT_FINITE:
        raise GraphError("the decoder's scores of the next token are not finite")
    scores = np.full((2, vocab_size), -np.inf, np.float32)
    for row, values in enumerate((samples.top_logprobs[0], samples.top_scores[1])):
        is_candidate = samples.top_ids[row] >= 0
        scores[row, samples.top_ids[row][is_candidate]] = values[is_candidate]
    return NextScores(*scores)


PositionKind = Literal["none", "sinusoidal", "learned", "relative", "rotary", "alibi", "disentangled"]


def _empty(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionEncoding:
    """Positions of one part. Distance is the position of the key minus that of the query.

    table, float32:
        sinusoidal, learned  [P, W]          vector of each position
        rotary               [P, D / 2]      cosine of each angle
        relative, alibi      [H, 2 P - 1]    bias of each distance from 1 - P to P - 1
        disentangled         [2 P - 1, M]    vector of each of these distances
        none                 [0, 0]
    decay: [P] float32, effect of the distances 0 to 1 - P: the mean cosine of the vectors of two positions at this
        distance, the mean cosine of the angles, the mean bias of the heads, or the cosine of the vector of this
        distance and that of distance 0. [0] for none.
    """

    part: Part
    kind: PositionKind
    table: Floats = field(default_factory=lambda: _empty(0, 0))
    decay: Floats = field(default_factory=lambda: _empty(0))


def longest_described(config: ModelConfig) -> int:
    """Return the number of positions that every part of the model has."""
    lens = {"encoder": config.max_source_len, "decoder": config.max_target_len}
    return min(lens[part] for part in config.parts)


def position_encodings(config: ModelConfig, num_positions: int, tables: Mapping[str, Floats]) -> list[PositionEncoding]:
    """Return the positions of each part, the encoder first; a part with two kinds of positions has two entries.

    Sinusoids, rotary positions and ALiBi follow from the configuration. Learned tables come from the bundle.
    num_positions: P, at most `longest_described`. tables: those of bundle/position_tables.py, empty if the bundle has
    none. Raises Unsupported if one of them is needed and missing.
    """
    encodings = []
    for part in config.parts:
        if config.disentangled is None or config.positions != "none":
            encodings.append(_encoding(config, part, num_positions, tables))
        if config.disentangled is not None:
            encodings.append(_disentangled(part, num_positions, tables))
    return encodings


def _encoding(config: ModelConfig, part: Part, num_positions: int, tables: Mapping[str, Floats]) -> PositionEncoding:
    match config.positions:
        case "none":
            return PositionEncoding(part=part, kind="none")
        case "sinusoidal":
            width, offset = config.resolved_embedding_width, config.positions_offset
            vectors = sinusoids(offset + num_positions, width, config.sinusoids)[offset:]
            return PositionEncoding(part=part, kind="sinusoidal", table=vectors, decay=_mean_cosines(vectors))
        case "learned":
            vectors = _stored(tables, f"{part}_positions")[:num_positions]
            return PositionEncoding(part=part, kind="learned", table=vectors, decay=_mean_cosines(vectors))
        case "rope":
            rates = rotary_rates(config.resolved_head_dim, config.rope_theta, config.rope_scaling)
            cosines = np.cos(np.arange(num_positions, dtype=np.float32)[:, None] * rates)
            return PositionEncoding(part=part, kind="rotary", table=cosines, decay=cosines.mean(axis=1))
        case "alibi":
            biases = -np.abs(_distances(num_positions)) * alibi_slopes(config.num_heads)[:, None]
            return _biases(part, "alibi", biases.astype(np.float32))
        case "t5_relative":
            return _biases(part, "relative", _nearest(_stored(tables, f"{part}_biases"), num_positions, axis=1))


def _disentangled(part: Part, num_positions: int, tables: Mapping[str, Floats]) -> PositionEncoding:
    vectors = _nearest(_stored(tables, f"{part}_distances"), num_positions, axis=0)
    cosines = _unit(vectors[num_positions - 1 :: -1]) @ _unit(vectors[num_positions - 1])
    return PositionEncoding(part=part, kind="disentangled", table=vectors, decay=cosines)


def _biases(part: Part, kind: PositionKind, biases: Floats) -> PositionEncoding:
    middle = biases.shape[1] // 2
    return PositionEncoding(part=part, kind=kind, table=biases, decay=biases[:, middle::-1].mean(axis=0))


def _stored(tables: Mapping[str, Floats], name: str) -> Floats:
    if name not in tables:
        raise Unsupported(
            f"the bundle of this model has no table {name}, which holds learned positions; export or import it again"
        )
    return tables[name]


def _distances(num_positions: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(1 - num_positions, num_positions)


def _nearest(by_distance: Floats, num_positions: int, *, axis: int) -> Floats:
    """Return the entries of the distances 1 - P to P - 1 of a table from -R to R; farther distances are as R."""
    reach = by_distance.shape[axis] // 2
    nearest: Floats = by_distance.take(reach + _distances(num_positions).clip(-reach, reach), axis=axis)
    return nearest


def _mean_cosines(vectors: Floats) -> Floats:
    """Return the mean cosine of two vectors [P, W] that are 0 to P - 1 rows apart, [P]."""
    unit = _unit(vectors)
    cosines = unit @ unit.T
    return np.array([cosines.diagonal(distance).mean() for distance in range(len(vectors))], np.float32)


def _unit(vectors: Floats) -> Floats:
    """Divide vectors [..., W] by their lengths; zero vectors stay zero."""
    lengths = np.sqrt((vectors**2).sum(axis=-1, keepdims=True))
    unit: Floats = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit
