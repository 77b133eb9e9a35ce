"""The original model: its outputs on random tokens and its answers, to compare an import with.

It is the model of transformers, or the formulas of another program (Original in checkpoints/families/family.py).
The original runs in float32 on the CPU, without code from the checkpoint. It runs first and is freed, so that there are
never two models in memory. An adapter is computed by peft beside the original's weights, not merged.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import FIRST_TOKEN_TASKS, Task
from antiphon.checkpoints.adapter import PREFIX, Adapter
from antiphon.checkpoints.families.family import Original
from antiphon.checkpoints.gguf_files import alone, is_gguf, read_settings
from antiphon.checkpoints.settings import in_one_line, with_class_defaults
from antiphon.errors import VerificationError
from antiphon.export.verify import TOLERANCES
from antiphon.transformer.transformer import Transformer

# Names of transformers' outputs for each of our heads; the first existing one is used.
_HEAD_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "fill_mask": ("prediction_logits", "logits"),
    "classify": ("logits",),
    "tag": ("logits",),
    "next_sentence": ("seq_relationship_logits", "sop_logits", "logits"),
    "pool": ("pooler_output",),
    "embed": (),  # not a part of transformers; see compare_pipeline.py
}
# Scores closer than this are a tie: sums in another order differ by up to about 1e-4 of a logit.
_TIE = 1e-3
_NUM_FIRST = 20
_CASES = (((1,), 3), ((14, 3, 9), 7), ((31, 30, 5, 17), 12))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Random tokens: source [B, S] int64 of which lens [B] int32 are valid, target [B, T] int64.

    Valid tokens are never the padding token. types [B, S] int64: token types of the source; None: the model has none.
    """

    source: Tensor
    lens: Tensor
    target: Tensor
    types: Tensor | None

    @property
    def mask(self) -> Tensor:
        """Mask [B, S] bool of valid source tokens."""
        return torch.arange(self.source.shape[1])[None] < self.lens[:, None]


def random_batches(config: ModelConfig, seed: int = 0) -> list[Batch]:
    """Return a few batches with different lengths, within the model's limits."""
    random = np.random.default_rng(seed)
    return [_batch(config, lens, steps, random) for lens, steps in _CASES]


def _batch(config: ModelConfig, lens: tuple[int, ...], steps: int, random: np.random.Generator) -> Batch:
    lengths = torch.tensor([min(length, config.max_source_len) for length in lens], dtype=torch.int32)
    longest, steps = int(lengths.max()), min(steps, config.max_target_len)
    source = _ids(config.resolved_source_vocab_size, config.pad_id, (len(lens), longest), random)
    source[torch.arange(longest)[None] >= lengths[:, None]] = config.pad_id
    target = _ids(config.vocab_size, config.pad_id, (len(lens), steps), random)
    types = torch.from_numpy(random.integers(0, config.token_types, source.shape)) if config.token_types else None
    return Batch(source=source, lens=lengths, target=target, types=types)


def _ids(vocab_size: int, pad_id: int, shape: tuple[int, int], random: np.random.Generator) -> Tensor:
    """Return random ids other than padding, because some models give padding no position."""
    ids = random.integers(0, vocab_size - 1, shape)
    return torch.from_numpy(ids + (ids >= pad_id))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A text, and the tokens of its source or, for a decoder-only model, of its prompt."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginalAnswer:
    """The answer of `generate` to a prompt: new tokens without end tokens.

    ties: token sequences that `generate` could have returned as well, because their scores differ by less than float32
        sums in another order do; for a greedy answer their beginnings, up to the token with an equal score.
    beam_width: with which it was generated; None: that of the checkpoint's settings.
    first_logprobs: log-probability of each token that a sampling checkpoint can choose first, the likeliest 20 of them;
        empty for a checkpoint that does not sample.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...] = ()
    beam_width: int | None = None
    first_logprobs: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginalRun:
    """Outputs of the original by name for each batch, see `_ours`, and its answers."""

    outputs: list[dict[str, Tensor]]
    answers: list[OriginalAnswer]


@torch.no_grad()
def run_original(
    folder: Path,
    reference: str,
    config: ModelConfig,
    batches: list[Batch],
    adapter: Adapter | None = None,
    prompts: Sequence[Prompt] = (),
    generation: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> OriginalRun:
    """Run the original on batches, and generate answers to prompts.

    reference: a class of transformers. generation: settings of `generate`, which replace those of the checkpoint.
    sampling: further settings with which the checkpoint samples; empty if it does not.
    Raises VerificationError with the error of transformers if the original cannot run.
    """
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            original = load_original(folder, reference, config, adapter)
            outputs = [_theirs(original, config, batch) for batch in batches]
            answers = [_generated(original, config, prompt, generation or {}, sampling or {}) for prompt in prompts]
    except (VerificationError, ModuleNotFoundError):
        raise
    except Exception as error:  # transformers raises errors of many kinds for a checkpoint that it cannot run
        raise VerificationError(
            f"transformers cannot run the original as {reference}, so the import cannot be compared with it: "
            f"{in_one_line(error)}; --no-verify skips the comparison"
        ) from error
    del original
    gc.collect()
    return OriginalRun(outputs=outputs, answers=answers)


@torch.no_grad()
def run_formulas(
    original: Original,
    config: ModelConfig,
    batches: list[Batch],
    prompts: Sequence[Prompt],
    generation: Mapping[str, Any],
) -> OriginalRun:
    """Run an encoder-decoder that transformers cannot run on batches, a row at a time, and answer prompts greedily.

    generation: settings of `generate`, of which the number of tokens and the suppressed ones are used.
    """
    outputs = []
    for batch in batches:
        lens, sources, targets = batch.lens.tolist(), batch.source.tolist(), batch.target.tolist()
        states = [original.encode(source[:length]) for source, length in zip(sources, lens, strict=True)]
        logits = [original.logits(memory, target) for memory, target in zip(states, targets, strict=True)]
        outputs.append({"encoder states": torch.cat(states), "logits": torch.stack(logits)})
    return OriginalRun(
        outputs=outputs, answers=[_greedy_answer(original, config, prompt, generation) for prompt in prompts]
    )


def _greedy_answer(
    original: Original, config: ModelConfig, prompt: Prompt, generation: Mapping[str, Any]
) -> OriginalAnswer:
    memory, ids = original.encode(prompt.ids), [config.bos_id]
    scores: list[Tensor] = []
    while len(scores) < generation["max_new_tokens"]:
        row = original.logits(memory, ids)[-1:]
        row[:, [*(generation["suppress_tokens"] or ())]] = -math.inf
        scores.append(row)
        ids.append(int(row.argmax()))
        if ids[-1] == config.eos_id:
            break
    answer = tuple(itertools.takewhile(lambda token_id: token_id != config.eos_id, ids[1:]))
    return OriginalAnswer(prompt=prompt, ids=answer, ties=tuple(_ties(answer, scores)), beam_width=1)


def load_original(folder: Path, reference: str, config: ModelConfig, adapter: Adapter | None) -> Any:
    """Return the original as a class of transformers, with the adapter, in evaluation mode."""
    import transformers

    # An adapter's head can have other labels than the checkpoint's.
    labels = [len(head.labels) for head in config.heads if head.task in ("classify", "tag")]
    head = dict(num_labels=labels[0], ignore_mismatched_sizes=True) if adapter and labels else {}
    options = dict(
        dtype=torch.float32, trust_remote_code=False, local_files_only=True, attn_implementation="eager", **head
    )
    load = getattr(transformers, reference).from_pretrained
    if is_gguf(folder):
        # transformers reads the tensors. It ignores metadata such as scaled rotations, so the settings are ours.
        settings = with_class_defaults(read_settings(folder))
        config_class = transformers.CONFIG_MAPPING[str(settings["model_type"])]
        with alone(folder) as directory:
            original = load(directory, gguf_file=folder.name, config=config_class.from_dict(dict(settings)), **options)
    else:
        original = load(folder, **options)
    if adapter is not None:
        _insert_adapter(original, adapter)
    return original.eval()


def _insert_adapter(original: Any, adapter: Adapter) -> None:
    """Replace modules of a model of transformers by those of peft with the adapter's tensors.

    Raises VerificationError if peft does not find a place for every tensor.
    """
    import peft
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    trained = _trained_part(original, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on training
        described = peft.PeftConfig.from_pretrained(str(adapter.folder))
        peft.inject_adapter_in_model(described, trained)
        tensors = load_peft_weights(str(adapter.folder), device="cpu")
        try:
            placed: Any = set_peft_model_state_dict(
                trained, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
            )
        except (KeyError, RuntimeError) as error:
            kind = type(original).__name__
            raise VerificationError(f"peft cannot read the adapter {adapter.folder} for {kind}: {error}") from None
    if placed.unexpected_keys:
        raise VerificationError(
            f"peft finds no place for {', '.join(placed.unexpected_keys[:3])} in {type(original).__name__}, so the "
            "import cannot be compared with it; --no-verify skips the comparison"
        )
    original.eval()


def _trained_part(original: Any, adapter: Adapter) -> nn.Module:
    """Return the model whose modules have the paths of the adapter: the original, its part without heads, or a parent.

    The adapter was trained in another class than the original if only one of them has heads.
    """
    prefix: str = original.base_model_prefix
    candidates: list[nn.Module] = [original, getattr(original, prefix, original), nn.ModuleDict({prefix: original})]
    for candidate in candidates:
        if adapter.products.keys() <= {name for name, _ in candidate.named_modules()}:
            return candidate
    raise VerificationError(
        f"the modules of the adapter, such as {min(adapter.products)}, are not in {type(original).__name__} of "
        "transformers, so the import cannot be compared with it; --no-verify skips the comparison"
    )


def _generated(
    original: Any,
    config: ModelConfig,
    prompt: Prompt,
    generation: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> OriginalAnswer:
    """Return the answer of `generate`, with its ties."""
    width = generation.get("num_beams") or 1
    output = _generate(original, prompt, **generation, num_return_sequences=width)
    num_given = 1 if config.architecture == "encoder-decoder" else len(prompt.ids)
    ends = {*_listed(generation["eos_token_id"])}
    answers = [
        tuple(itertools.takewhile(lambda token_id: token_id not in ends, row[num_given:].tolist()))
        for row in output.sequences
    ]
    if width > 1:
        scores = output.sequences_scores
        ties = [ids for ids, score in zip(answers, scores, strict=True) if scores[0] - score < _TIE]
    else:
        ties = _ties(answers[0], output.scores)
    first: dict[int, float] = {}
    if sampling:
        logprobs = _generate(original, prompt, **{**generation, **sampling, "max_new_tokens": 1}).scores[0][0]
        likeliest = logprobs.log_softmax(dim=-1).topk(min(_NUM_FIRST, len(logprobs)))
        pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        first = {token_id: logprob for token_id, logprob in pairs if logprob > -math.inf}
    return OriginalAnswer(prompt=prompt, ids=answers[0], ties=tuple(ties), first_logprobs=first)


def _generate(original: Any, prompt: Prompt, **settings: Any) -> Any:
    """Return the output of `generate` with these settings alone."""
    import transformers

    make: Any = transformers.GenerationConfig
    original.generation_config = make()
    source = torch.tensor([prompt.ids])
    return original.generate(
        source,
        attention_mask=torch.ones_like(source),
        generation_config=make(**settings, output_scores=True, return_dict_in_generate=True),
    )


def _ties(answer: tuple[int, ...], scores: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the beginnings of a greedy answer up to a tie, with each of its two tokens; the rest is not known.

    scores: [1, V] logits of every step of the answer.
    """
    ties = []
    for step, row in enumerate(scores[: len(answer) + 1]):
        best = row[0].topk(2)
        if best.values[0] - best.values[1] < _TIE:
            ties += [(*answer[:step], token_id) for token_id in best.indices.tolist()]
    return ties


def _listed(ends: int | Sequence[int]) -> Sequence[int]:
    return [ends] if isinstance(ends, int) else ends


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the log and the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _theirs(original: Any, config: ModelConfig, batch: Batch) -> dict[str, Tensor]:
    mask = batch.mask.long()
    if config.architecture == "decoder":
        return {"logits": original(input_ids=batch.target).logits}
    if config.architecture == "encoder":
        types = {} if batch.types is None else {"token_type_ids": batch.types}
        result = original(input_ids=batch.source, attention_mask=mask, output_hidden_states=True, **types)
        outputs = {"encoder states": result.hidden_states[-1][batch.mask]}
        for head in config.heads:
            name = next((name for name in _HEAD_OUTPUTS[head.task] if name in result), None)
            if name is not None:
                outputs[head.task] = _read(result[name], head.task, batch)
        return outputs
    encoded = original.get_encoder()(input_ids=batch.source, attention_mask=mask)
    decoded = original(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=batch.target)
    return {"encoder states": encoded.last_hidden_state[batch.mask], "logits": decoded.logits}


def _read(output: Tensor, task: Task, batch: Batch) -> Tensor:
    """Return an output for valid tokens only, unless it is an output for whole texts."""
    return output if task in FIRST_TOKEN_TASKS else output[batch.mask]


@torch.no_grad()
def _ours(model: Transformer, batch: Batch) -> dict[str, Tensor]:
    """Return our model's outputs: encoder states [N, M] of N valid tokens, logits [B, T, V], outputs of heads."""
    if model.config.architecture == "decoder":
        return {"logits": model.logits(model.decode(batch.target, None))}
    memory = model.encode(batch.source, batch.lens, batch.types)
    outputs = {"encoder states": memory[batch.mask]}
    for head in model.config.heads:
        if head.task == "embed":
            continue
        first = head.task in FIRST_TOKEN_TASKS
        outputs[head.task] = model.read_out(head.task, memory[:, 0] if first else memory[batch.mask])
    if model.config.architecture == "encoder-decoder":
        hidden = model.decode(batch.target, model.project_memory(memory), batch.lens)
        outputs["logits"] = model.logits(hidden)
    return outputs


def compare_with_original(
    model: Transformer, batches: list[Batch], expected: list[dict[str, Tensor]]
) -> Mapping[str, float]:
    """Return the largest error of each output, divided by its largest absolute value or by 1 if that is smaller.

    Raises VerificationError if an error is larger than a different order of float32 sums can explain.
    """
    worst: dict[str, float] = {}
    for batch, outputs in zip(batches, expected, strict=True):
        ours = _ours(model, batch)
        for name in outputs.keys() & ours.keys():
            is_finite = outputs[name].isfinite()  # a bias of minus infinity suppresses a token, see encoder_decoder.py
            theirs = outputs[name][is_finite]
            error = (ours[name][is_finite] - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)
            worst[name] = float(np.max([worst.get(name, 0.0), float(error)]))  # nan counts
    limit = TOLERANCES["float32"].max_error
    for name, largest in worst.items():
        if not largest <= limit:
            raise VerificationError(
                f"the imported model differs from the original: the error of its {name} is {largest:.1e}, "
                f"at most {limit:.0e} is allowed"
            )
    return worst
