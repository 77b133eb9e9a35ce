"""Training of a decoder-only model: windows of running text, and the loss of the next token (Radford et al. 2019).

A window has one token more than the model predicts in it: the first token is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.errors import CheckpointError, RecipeError
from antiphon.text.subwords import EXACT_END_ID
from antiphon.text.tokenizer import Tokenizer, exact_bpe_format
from antiphon.training.batches import IGNORED_LABEL, TargetBatch
from antiphon.training.corpus import Part, read_running_text
from antiphon.training.losses import linear_cross_entropy
from antiphon.training.recipe import LanguageModelRecipe
from antiphon.training.scores import TextLoss, text_loss
from antiphon.training.task import RunFolders, TransformerTask, run_tokenizer
from antiphon.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Planned batches of one pass through a text.

    tokens: [N] int64. plan: first token of each window, by batch. num_predicted: labels T of a window.
    """

    tokens: Tensor
    plan: Sequence[Tensor]
    num_predicted: int

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> TargetBatch:
        places = self.plan[index][:, None] + torch.arange(self.num_predicted + 1)  # [B, T + 1]
        last = len(self.tokens) - 1
        window = self.tokens[places.clamp(max=last)]
        return TargetBatch(inputs=window[:, :-1], labels=window[:, 1:].masked_fill(places[:, 1:] > last, IGNORED_LABEL))


def shuffled_starts(num_tokens: int, num_predicted: int, seed: int) -> Tensor:
    """Return the first tokens of adjacent windows from a random token on, in random order; the seed decides both.

    The number of windows depends only on the lengths. It is 0 for a text shorter than two windows.
    """
    chance = torch.Generator().manual_seed(seed)
    offset = torch.randint(num_predicted, (), generator=chance)
    count = max(0, (num_tokens - num_predicted) // num_predicted)
    return offset + num_predicted * torch.randperm(count, generator=chance)


def adjacent_starts(num_tokens: int, num_predicted: int) -> Tensor:
    """Return the first tokens of adjacent windows that predict every token of a text but the first."""
    return torch.arange(0, num_tokens - 1, num_predicted)


SCORED_TOKENS = 4096  # of the windows that are scored together; limits memory


class LanguageLoss(nn.Module):
    """Loss of the next token at every position of a batch of windows."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TargetBatch, smoothing: float) -> Tensor:
        """Return the summed label-smoothed cross entropy of the labels, [1], in nats."""
        hidden = self.model.decode(batch.inputs, None).flatten(0, 1)
        output, labels = self.model.output, batch.labels.flatten()
        return linear_cross_entropy(hidden, output.weight, labels, smoothing=smoothing, bias=output.bias)[None]


@torch.no_grad()
def language_loss(model: Transformer, tokenizer: Tokenizer, ids: Sequence[int]) -> TextLoss:
    """Return the loss of a text of at least two tokens, in float32.

    The text is split into adjacent windows of the model's length. Every token except the first is predicted once, from
    the tokens before it in its window. The model must be in evaluation mode.
    """
    num_predicted = model.config.max_target_len - 1
    starts = adjacent_starts(len(ids), num_predicted)
    plan = torch.split(starts, max(1, SCORED_TOKENS // num_predicted))
    windows = Windows(tokens=torch.tensor(ids), plan=plan, num_predicted=num_predicted)
    device, loss = next(model.parameters()).device, LanguageLoss(model)
    nats = math.fsum(float(loss(windows[index].to(device), 0.0)) for index in range(len(windows)))
    return text_loss(nats, tokenizer.bytes_of(ids[1:]))


class LanguageModelTask(TransformerTask[LanguageModelRecipe]):
    """TrainingTask of running text; an initial checkpoint replaces the recipe's tokenizer, shape and weights.

    An epoch is one pass through the text in windows that begin at a random token, so every epoch has other windows.
    """

    def __init__(self, recipe: LanguageModelRecipe, folders: RunFolders) -> None:
        self.recipe = recipe
        self.folders = folders
        init = folders.init
        if init is not None and init.config.architecture != "decoder":
            raise CheckpointError(f"--init: architecture={init.config.architecture!r}; it must be 'decoder'")
        texts = read_running_text(recipe.data, folders.data)
        self.text = exact_bpe_format() if init is None else init.text
        self.tokenizer = run_tokenizer(
            folders, lambda: Tokenizer.train_exact_bpe([texts["train"]], recipe.vocab_size), self.text
        )
        self.config = self._config() if init is None else init.config
        self.tokens: dict[Part, Tensor] = {
            part: torch.tensor(self.tokenizer.encode(text)) for part, text in texts.items()
        }
        self._check_parts()

    def _config(self) -> ModelConfig:
        """Return the recipe's shape. An empty prompt begins with a line break, because texts have no begin token."""
        (line_break,) = self.tokenizer.encode("\n")
        ids = dict(pad_id=EXACT_END_ID, bos_id=line_break, eos_id=EXACT_END_ID, unk_id=EXACT_END_ID)
        return self.recipe.model_config_for(self.tokenizer.vocab_size, **ids)

    def _check_parts(self) -> None:
        for part, tokens in self.tokens.items():
            if len(tokens) < 2:
                raise RecipeError(f"data.split: the {part} part has {len(tokens)} tokens; it needs at least 2")

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss of the next token, see TrainingTask."""
        return LanguageLoss(model)

    def batches(self, part: Part, seed: int) -> Windows:
        """Return the batches of one epoch, see TrainingTask; validation and test predict every token but the first."""
        tokens, num_predicted = self.tokens[part], self.config.max_target_len - 1
        if part == "train":
            starts = shuffled_starts(len(tokens), num_predicted, seed)
        else:
            starts = adjacent_starts(len(tokens), num_predicted)
        rows = max(1, self.recipe.train.batch_tokens // num_predicted)
        plan = torch.split(starts, rows) if len(starts) else ()
        return Windows(tokens=tokens, plan=plan, num_predicted=num_predicted)

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return the loss of a part per character and per byte, see language_loss."""
        loss = language_loss(model, self.tokenizer, self.tokens[part].tolist())
        return {
            "nats_per_character": loss.nats_per_character,
            "bits_per_byte": loss.bits_per_byte,
            "characters": loss.num_characters,
        }
