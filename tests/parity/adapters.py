"""LoRA adapters that peft trains for a few steps on tiny checkpoints, and the outputs of the adapted models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from antiphon.architecture.heads import FIRST_TOKEN_TASKS, Task
from antiphon.transformer.transformer import Transformer

_SHAPE = (3, 11)
# Names of transformers' outputs for each head.
_OUTPUTS: Mapping[Task, tuple[str, ...]] = {
    "fill_mask": ("prediction_logits", "logits"),
    "next_sentence": ("seq_relationship_logits",),
    "classify": ("logits",),
    "tag": ("logits",),
    "pool": ("pooler_output",),
}
_NAMES = tuple(dict.fromkeys(name for names in _OUTPUTS.values() for name in names))


def random_ids(vocab_size: int, seed: int) -> Tensor:
    """Return random tokens [B, S] that are none of the first, special ones."""
    return torch.randint(5, vocab_size, _SHAPE, generator=torch.Generator().manual_seed(seed))


def inputs_of(config: Any) -> dict[str, Tensor]:
    """Return random inputs for a model of transformers."""
    inputs = dict(input_ids=random_ids(config.vocab_size, 1))
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = random_ids(getattr(config, "decoder_vocab_size", config.vocab_size), 2)
    return inputs


def train_adapter(base: Path, kind: str, folder: Path, options: Mapping[str, Any], **settings: Any) -> None:
    """Train an adapter for a few steps towards random outputs, so that none of its tensors keeps its initial value.

    kind: class of transformers. options: of peft.LoraConfig. settings: of the model's config.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on settings
        torch.manual_seed(4)
        model = getattr(transformers, kind).from_pretrained(base, **settings)
        adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**options))
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        for _ in range(4):
            outputs = adapted(**inputs_of(model.config))
            loss = sum((outputs[name] - torch.randn_like(outputs[name])).square().mean() for name in _floats(outputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted.save_pretrained(folder)


def _floats(outputs: Any) -> list[str]:
    return [name for name in (*_NAMES, "last_hidden_state") if name in outputs]


def open_adapted(base: Path, kind: str, folder: Path, *, merged: bool, **settings: Any) -> Any:
    """Return the adapted model as peft loads it, with the adapter beside the weights or merged into them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, kind).from_pretrained(base, **settings)
        adapted: Any = peft.PeftModel.from_pretrained(model, str(folder))
        return (adapted.merge_and_unload() if merged else adapted).eval()


@torch.no_grad()
def outputs_of_theirs(model: Any) -> dict[str, Tensor]:
    """Return the outputs by name: logits [B, T, V], last states [B, S, M] of a single stack, outputs of heads."""
    found = model(**inputs_of(model.config), output_hidden_states=True)
    states = {"states": found.hidden_states[-1]} if "hidden_states" in found else {}
    return states | {name: found[name] for name in _NAMES if name in found}


@torch.no_grad()
def outputs_of_ours(model: Transformer) -> dict[str, Tensor]:
    """Return our outputs by the same names; "logits" are those of a decoder or of the last head with that name."""
    config = model.config
    source = random_ids(config.resolved_source_vocab_size, 1)
    if config.architecture == "decoder":
        states = model.decode(source, None)
        return {"states": states, "logits": model.logits(states)}
    lens = torch.full((len(source),), source.shape[1], dtype=torch.int32)
    memory = model.encode(source, lens, torch.zeros_like(source) if config.token_types else None)
    if config.architecture == "encoder-decoder":
        target = random_ids(config.vocab_size, 2)
        return {"logits": model.logits(model.decode(target, model.project_memory(memory), lens))}
    found = {"states": memory}
    for head in config.heads:
        output = model.read_out(head.task, memory[:, 0] if head.task in FIRST_TOKEN_TASKS else memory)
        found |= dict.fromkeys(_OUTPUTS[head.task], output)
    return found
