"""Small random checkpoints of public encoder families, written by transformers, with the original models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.family import family_in, read_config
from antiphon.checkpoints.settings import Settings
from antiphon.transformer.transformer import Transformer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "##s", "##ed", "big", "small", "red", "blue")


def randomise(model: Any) -> Any:
    """Make biases and norms random too, so that code that forgets one of them gives a different result."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            if parameter.ndim == 1 and name.endswith(("norm.weight", "Norm.weight")):
                parameter.add_(1.0)
    return model.eval()


def write_tokenizer(folder: Path, *, has_types: bool = True) -> None:
    """Write a tokenizer.json with a few words and BERT's templates, which transformers reads as it is.

    has_types: the model reads token types.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    described["model_input_names"] = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def write_checkpoint(folder: Path, config: Any, kind: str) -> Any:
    """Save a random model of a class of transformers with a tokenizer, and return the model."""
    original = randomise(getattr(transformers, kind)(config))
    original.save_pretrained(folder)
    write_tokenizer(folder, has_types=getattr(config, "type_vocab_size", 0) > 1)
    return original


def read_checkpoint(folder: Path) -> tuple[Transformer, ModelConfig, Settings]:
    """Return our model of a checkpoint, loaded by the functions of its family."""
    family = family_in(folder)
    with family.open_weights(folder) as weights:
        settings = family.resolve(read_config(folder), weights)
    config = family.configure(settings)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # a weight that is not filled stays NaN
    with family.open_weights(folder) as weights:
        family.load(model, weights, settings)
        weights.check(family.name)
    return model, config, settings
