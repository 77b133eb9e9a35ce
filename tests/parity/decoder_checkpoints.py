"""Tiny random decoder-only checkpoints with tokenizers, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["the cat sat on the mat", "a cold morning in the small town", "eine kühle Brücke über dem Fluß"] * 4
SIZES: dict[str, object] = dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
GROUPED: dict[str, object] = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=56, **SIZES
)
# Class in transformers and settings of each family, with uncommon sizes on purpose.
DECODERS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        dict(n_embd=40, n_layer=2, n_head=4, n_inner=72, n_positions=64, bos_token_id=0, eos_token_id=0,
             initializer_range=0.3),
    ),
    "llama": (
        "LlamaForCausalLM",
        GROUPED | dict(head_dim=10, rope_parameters=dict(rope_type="default", rope_theta=5e3)),
    ),
    # Wavelengths of 6, 16, 40, 100 and 251 positions: one rate stays, one is interpolated, three are divided.
    "llama3": (
        "LlamaForCausalLM",
        GROUPED | dict(head_dim=10, rope_parameters=dict(
            rope_type="llama3", rope_theta=1e2, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )),
    ),
    "llama_linear": (
        "LlamaForCausalLM",
        GROUPED | dict(head_dim=10, rope_parameters=dict(rope_type="linear", rope_theta=5e3, factor=4.0)),
    ),
    "mistral": ("MistralForCausalLM", GROUPED | dict(sliding_window=32)),
    "qwen2": ("Qwen2ForCausalLM", GROUPED | dict(tie_word_embeddings=True)),
}  # fmt: skip


def write_decoder(folder: Path, name: str, **settings: object) -> Any:
    """Save a checkpoint of random weights and return transformers' model of it."""
    kind, described = DECODERS[name]
    tokenizer = byte_level_tokenizer() if name == "gpt2" else word_marked_tokenizer()
    tokenizer.save_pretrained(folder)
    config_class = getattr(transformers, kind).config_class
    # Three ids more than the tokenizer has, because vocabularies can be padded.
    config = config_class(vocab_size=len(tokenizer) + 3, **{**described, **settings})
    torch.manual_seed(7)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():  # code that forgets a bias must give a different result
        for parameter in (one for one in model.parameters() if one.ndim == 1):
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def byte_level_tokenizer() -> Any:
    """Return a tokenizer like GPT-2's: no space before a text, one token for begin and end, no template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    end = "<|endoftext|>"
    return _wrapped(backend, bos_token=end, eos_token=end, unk_token=end)


def word_marked_tokenizer() -> Any:
    """Return a tokenizer like Llama's: word marks, bytes for unknown characters, the begin token before a text."""
    specials = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=70, special_tokens=specials, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "▁") for text in TEXTS], trainer)
    learned = json.loads(trained.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    listed = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces[len(specials) :]]
    vocabulary = {piece: index for index, piece in enumerate(listed)}
    merges = [tuple(merge) for merge in learned["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.add_special_tokens(specials)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _wrapped(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _wrapped(backend: Tokenizer, **tokens: str) -> Any:
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=backend, **tokens)
