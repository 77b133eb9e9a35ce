"""Tiny random encoder-decoder checkpoints of public families, saved by transformers, with uncommon sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import torch
import transformers
from torch import nn

TEXTS = [f"the small word number {number} is here again, and so is {number * 7}" for number in range(60)]
VOCAB_SIZE = 211  # size of the models; their tokenizers have fewer tokens, because vocabularies can be padded

_BART_LIKE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, d_model=36, encoder_layers=1, decoder_layers=2, encoder_attention_heads=3,
    decoder_attention_heads=3, encoder_ffn_dim=44, decoder_ffn_dim=44, max_position_embeddings=40, init_std=0.15,
    pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
_T5_LIKE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, d_model=40, d_kv=12, d_ff=56, num_layers=2, num_decoder_layers=1, num_heads=3,
    relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0,
)  # fmt: skip
_GEMMA_LIKE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=12, intermediate_size=56, query_pre_attn_scalar=10, attn_logit_softcapping=1.5, sliding_window=40,
    pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.3,
)  # fmt: skip
_LANGUAGES = ("en_XX", "de_DE")
_NLLB_LANGUAGES = ("eng_Latn", "deu_Latn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Description of a checkpoint.

    model: prefix of the class names in transformers. settings: settings of its config. generation: its generation
    settings. languages: language tokens that the tokenizer has after the family's special tokens.
    seed: a seed whose model generates different tokens; most random models repeat one token.
    """

    model: str
    settings: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    languages: Sequence[str] = ()
    tokenizer_class: str = "PreTrainedTokenizerFast"
    kind: str = "ForConditionalGeneration"
    untie: bool = False
    seed: int = 0


CHECKPOINTS = {
    "marian": Made(
        seed=3, model="Marian", kind="MTModel",
        settings=_BART_LIKE | dict(activation_function="swish", scale_embedding=True, encoder_layers=3),
        generation=dict(bad_words_ids=[[1]], max_length=14),
    ),
    "marian_of_two_vocabularies": Made(
        seed=2, model="Marian",
        kind="MTModel",
        settings=_BART_LIKE
        | dict(
            vocab_size=230, decoder_vocab_size=VOCAB_SIZE, share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False, activation_function="relu", scale_embedding=True,
        ),
    ),
    "bart": Made(model="Bart", settings=_BART_LIKE, generation=dict(forced_bos_token_id=0, no_repeat_ngram_size=3)),
    "bart_untied": Made(seed=3, model="Bart", settings=_BART_LIKE | dict(tie_word_embeddings=False)),
    "mbart": Made(
        seed=9, model="MBart", settings=_BART_LIKE | dict(scale_embedding=True), languages=_LANGUAGES,
        tokenizer_class="MBartTokenizer", generation=dict(decoder_start_token_id=5),
    ),
    "mbart50": Made(
        seed=11, model="MBart", settings=_BART_LIKE | dict(scale_embedding=True), languages=_LANGUAGES,
        tokenizer_class="MBart50Tokenizer", generation=dict(forced_bos_token_id=5),
    ),
    "pegasus": Made(
        seed=7, model="Pegasus",
        settings=_BART_LIKE | dict(activation_function="relu", scale_embedding=True, pad_token_id=0),
        generation=dict(early_stopping=True, length_penalty=0.6),
    ),
    "m2m100": Made(model="M2M100", settings=_BART_LIKE),
    "nllb": Made(model="M2M100", settings=_BART_LIKE | dict(activation_function="gelu"), languages=_NLLB_LANGUAGES),
    "t5": Made(seed=10, model="T5", settings=_T5_LIKE),
    "flan_t5": Made(
        seed=9, model="T5", untie=True,
        settings=_T5_LIKE
        | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_layers=3, num_decoder_layers=2),
    ),
    "byt5": Made(
        model="T5", settings=_T5_LIKE | dict(vocab_size=391, feed_forward_proj="gated-gelu"),
        tokenizer_class="ByT5Tokenizer",
    ),
    "t5gemma": Made(
        seed=7, model="T5Gemma",
        settings=dict(
            encoder=_GEMMA_LIKE | dict(num_hidden_layers=3), decoder=_GEMMA_LIKE | dict(final_logit_softcapping=4.0),
            vocab_size=VOCAB_SIZE, initializer_range=0.3, tie_word_embeddings=False,
        ),
    ),
    "mt5": Made(seed=3, model="MT5", settings=_T5_LIKE, untie=True, generation=dict(early_stopping="never")),
}  # fmt: skip


def original(made: Made) -> Any:
    """Return the model of transformers with outputs of different tokens and lengths; biases and norms are random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(made.seed)
        described = getattr(transformers, f"{made.model}Config")(**made.settings)
        model = getattr(transformers, made.model + made.kind)(described).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                if name.endswith(("fc2.weight", "wo.weight")):
                    parameter.sub_(parameter.mean(dim=1, keepdim=True)).mul_(6)
            if hasattr(model, "final_logits_bias"):
                model.final_logits_bias.normal_()
            if made.untie:
                model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
            model.get_output_embeddings().weight[model.config.eos_token_id].mul_(1.3)
    return model


def save(
    folder: Path, name: str, change: Callable[[Any], Any] = lambda model: model, *, as_bin: bool = False, **options: Any
) -> None:
    """Write a checkpoint of CHECKPOINTS with its tokenizer and generation settings.

    change: returns the object to save instead of the model. as_bin: write PyTorch's pickle, which transformers no
    longer writes, instead of safetensors. options: options of save_pretrained.
    """
    made = CHECKPOINTS[name]
    model = original(made)
    settings = {"max_length": 12, "num_beams": 4, "suppress_tokens": [model.config.pad_token_id], **made.generation}
    model.generation_config.update(**settings)
    change(model).save_pretrained(folder, **options)
    if as_bin:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    _WRITERS.get(name, write_tokenizers)(folder, made)


def write_tokenizers(folder: Path, made: Made) -> None:
    """Write tokenizer.json: byte-level BPE with the special tokens of BART or T5, followed by language tokens."""
    is_t5 = "T5" in made.model or made.model == "Pegasus"
    special = ["<pad>", "</s>", "<unk>"] if is_t5 else ["<s>", "<pad>", "</s>", "<unk>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=120, special_tokens=[*special, *made.languages], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    end = backend.token_to_id("</s>")
    before = "" if is_t5 else "<s> "
    known = [("</s>", end)] + ([] if is_t5 else [("<s>", 0)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{before}$A </s>", pair=f"{before}$A </s> $B </s>", special_tokens=known
    )
    backend.save(str(folder / "tokenizer.json"))
    described = dict(tokenizer_class=made.tokenizer_class, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _write_pieces(folder: Path, names: Mapping[str, str]) -> None:
    """Write a SentencePiece model to each of these files, and a vocabulary from pieces to ids."""
    for model, vocabulary in names.items():
        stem = folder / "pieces"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(stem), vocab_size=60, minloglevel=2
        )
        stem.with_suffix(".model").rename(folder / model)
        stem.with_suffix(".vocab").unlink()
        held = sentencepiece.SentencePieceProcessor(model_file=str(folder / model))
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        pieces = [held.id_to_piece(index) for index in range(held.get_piece_size())]
        listed = [*special, *(piece for piece in pieces if piece not in special)]
        (folder / vocabulary).write_text(json.dumps({piece: index for index, piece in enumerate(listed)}))


def _write_marian(folder: Path, _: Made) -> None:
    _write_pieces(folder, {"source.spm": "vocab.json", "target.spm": "vocab.json"})


def _write_marian_of_two(folder: Path, _: Made) -> None:
    _write_pieces(folder, {"source.spm": "vocab.json", "target.spm": "target_vocab.json"})


def _write_m2m100(folder: Path, _: Made) -> None:
    _write_pieces(folder, {"sentencepiece.bpe.model": "vocab.json"})


def _write_byt5(folder: Path, _: Made) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="ByT5Tokenizer")))


_WRITERS: dict[str, Callable[[Path, Made], None]] = {
    "marian": _write_marian,
    "marian_of_two_vocabularies": _write_marian_of_two,
    "m2m100": _write_m2m100,
    "byt5": _write_byt5,
}
