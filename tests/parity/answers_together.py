"""Answers of the whole engine to requests in one batch, and of transformers' `generate` to each request alone."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from torch import Tensor, nn
from transformers import LogitsProcessor

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.domain.request import Cancellations, Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.admission import admit, limits_of
from antiphon.engine.kv_cache import BlockPool
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.step import EngineState, Stepper
from antiphon.engine.stream import OutputStream
from antiphon.export.bundle_model import NativeStepper
from antiphon.export.export import export_bundle
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.runtime.native import NativeRunner
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.transformer.layers import CrossAttention
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer
from tests.fakes import FakeClock, changed, limits_for, stream_of
from tests.parity.transformers_reference import LogitsOf, Reference, generate

Answers = dict[str, tuple[TokenEvent, ...]]
"""The terminal event of each output, by request."""


def lively(config: ModelConfig, seed: int) -> Transformer:
    """Return a random model whose outputs vary in length and tokens; with usual weights it repeats one token.

    Feed-forward layers have larger weights relative to the embeddings, without the mean that a ReLU adds to every
    token; biases are smaller, the distribution is sharper and the end token more likely. If attention is not scaled,
    queries are smaller, as in T5's initialisation.
    """
    model = random_transformer(config, seed)
    assert model.encoder is not None
    assert model.decoder is not None
    query_gain = 1 / (config.resolved_attention_scale * config.resolved_head_dim**0.5)
    is_pre = config.norm_placement == "pre"
    last_norm = model.decoder.final_norm if is_pre else model.decoder.blocks[-1].feed_forward_residual.norm
    with torch.no_grad():
        for parameter in (one for name, one in model.named_parameters() if name.endswith(".bias")):
            parameter.mul_(0.3)
        for layer in (*model.encoder.layers, *model.decoder.layers):
            outer = cast(nn.Parameter, layer.feed_forward.outer.weight)
            outer.sub_(outer.mean(dim=1, keepdim=True)).mul_(6)
            layer.self_attention.qkv.weight[: config.attention_width].mul_(query_gain)
        for block in model.decoder.blocks:
            cast(CrossAttention, block.cross_attention).query.weight.mul_(query_gain)
        cast(nn.Parameter, last_norm.weight).mul_(3)
        model.output.weight[config.eos_id].mul_(1.8)
    return model


def export_model(directory: Path, model: Transformer) -> Bundle:
    """Export the native float32 bundle of a model with any vocabulary. Its tokenizer does not belong to the model."""
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer.train([], 260)
    tokenizer.save(directory / "tokenizer.json")
    checkpoint = Checkpoint(
        config=model.config,
        model=model,
        tokenizer=tokenizer,
        text=byte_bpe_format(tokenizer),
        text_folder=directory,
        provenance=None,
    )
    return export_bundle(checkpoint, directory / "bundle", precisions=("float32",), explain=False)


def answer(runner: NativeRunner, requests: Sequence[Request]) -> Answers:
    """Run requests through an engine's steps; all of them start in the first step."""
    with asyncio.Runner() as loops:
        loop = loops.get_loop()
        live: dict[str, SequenceGroup] = {}
        # The last quarter of a queue is kept for other clients.
        limits = limits_for(
            runner, max_num_batched_tokens=10**6, max_queued_requests=2 * len(requests), max_queued_tokens=10**6
        )
        queue = RequestQueue(limits)
        pool = BlockPool(runner.facts.num_blocks, runner.facts.block_size)
        state = EngineState(
            runner,
            queue=queue,
            pool=pool,
            limits=limits,
            metrics=Metrics(MetricFamilies(CollectorRegistry()), "fake"),
            live=live,
            clock=FakeClock(),
            cancellations=Cancellations(),
        )
        stepper = Stepper(state, runner)
        admission = limits_of(runner, limits)
        for one in requests:
            # One caller cannot get all rows for beams.
            request = changed(one, client=one.request_id)
            live[request.request_id] = admit(request, OutputStream(request.request_id, loop=loop), admission)
            queue.put(live[request.request_id], 0.0)
        groups = list(live.values())
        while stepper.has_work:
            stepper.step()
            assert not queue  # no request had to wait for a row or a block
        assert pool.num_free == pool.num_blocks
        return {group.request_id: loop.run_until_complete(stream_of(group).collect()) for group in groups}


def eager_logits(model: Transformer, source: Sequence[int]) -> LogitsOf:
    """Return the logits of PyTorch after a target, computed alone and without a cache."""
    with torch.inference_mode():
        cross_kv = model.project_memory(model.encode(torch.tensor([source])))

    @functools.cache
    def logits_of(target: tuple[int, ...]) -> NDArray[np.float32]:
        with torch.inference_mode():
            hidden = model.decode(torch.tensor([target]), cross_kv)
            logits: NDArray[np.float32] = model.logits(hidden[0, -1]).numpy()
            return logits

    return logits_of


def native_logits(stepper: NativeStepper, config: ModelConfig, source: Sequence[int]) -> LogitsOf:
    """Return the log-probabilities of native graphs after a target, which is fed alone and in one step."""
    sequences = stepper.encode([np.array(source, np.int64)], config.max_target_len)

    @functools.cache
    def logits_of(target: tuple[int, ...]) -> NDArray[np.float32]:
        logprobs: NDArray[np.float32] = stepper.step(sequences, [np.array(target, np.int64)], np.zeros(1, np.int32))[0]
        return logprobs

    return logits_of


def shaken(logits_of: LogitsOf, amount: float) -> LogitsOf:
    """Perturb logits by up to `amount`; the opposite amount perturbs them in the other direction."""

    def moved(target: tuple[int, ...]) -> NDArray[np.float32]:
        logits = logits_of(target)
        dice = np.random.default_rng(zlib.crc32(repr(target).encode()))
        moves = amount * dice.uniform(-1, 1, len(logits))
        return logits + moves.astype(np.float32)

    return moved


class CountPenalties(LogitsProcessor):
    """Presence and frequency penalties, which transformers lacks, by their formula."""

    def __init__(self, params: SamplingParams, num_given: int) -> None:
        self._params = params
        self._num_given = num_given

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, target in enumerate(input_ids[:, self._num_given :].tolist()):
            for token_id, count in Counter(target).items():
                scores[row, token_id] -= self._params.presence_penalty + self._params.frequency_penalty * count
        return scores


def expected(logits_of: LogitsOf, request: Request, config: ModelConfig) -> list[tuple[list[int], float | None]]:
    """Return the output of transformers' `generate`: ids without end tokens, and the scores of a search."""
    params, room = request.params, config.max_target_len - len(request.prefix_ids)
    permitted = [*params.allowed_ids, config.eos_id]
    found = generate(
        Reference(logits_of, bos_id=config.bos_id, eos_id=config.eos_id),
        prefix=request.prefix_ids,
        max_new_tokens=min(params.max_new_tokens or room, room),
        permits=(lambda *_: permitted) if params.allowed_ids else None,
        processors=[CountPenalties(params, 1 + len(request.prefix_ids))],
        num_beams=params.beam_width,
        num_return_sequences=params.num_return_sequences,
        **processor_options(params, config),
        **_search_options(params),
    )
    # transformers also returns beams without a text, which it marks by their score.
    return [(ids, score) for ids, score in found if score is None or score > -1e6]


def processor_options(params: SamplingParams, config: ModelConfig) -> dict[str, Any]:
    """Return controls of single tokens under their names in a GenerationConfig of transformers."""
    suppressed = [*params.suppressed_ids, *([config.eos_id] if params.ignore_eos else [])]
    return {
        "sequence_bias": {(token_id,): bias for token_id, bias in params.logit_bias} or None,
        "repetition_penalty": params.repetition_penalty,
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "min_new_tokens": params.min_new_tokens,
        "suppress_tokens": suppressed or None,
        "forced_bos_token_id": params.forced_first_id,
        "eos_token_id": [config.eos_id, *params.stop_ids],
    }


def _search_options(params: SamplingParams) -> dict[str, Any]:
    if params.beam_width == 1:
        return {}
    return {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping.value}
