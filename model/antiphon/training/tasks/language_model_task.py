"""Training of a decoder-only model: windows of running text, and the loss of the next token (Radford et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.errors import CheckpointError, RecipeError
from antiphon.text.exact_bpe import END_ID, exact_bpe_format, train_exact_bpe
from antiphon.training.data.running_text import read_running_text
from antiphon.training.data.text_files import Part
from antiphon.training.data.text_windows import Windows, adjacent_starts, shuffled_starts
from antiphon.training.recipe import LanguageModelRecipe
from antiphon.training.tasks.language_loss import LanguageLoss, language_loss
from antiphon.training.tasks.training_task import RunFolders, TransformerTask, run_tokenizer
from antiphon.transformer.transformer import Transformer


class LanguageModelTask(TransformerTask[LanguageModelRecipe]):
    """TrainingTask of running text; an initial checkpoint replaces the recipe's tokenizer, shape and weights.

    An epoch is one pass through the text in windows that begin at a random token, so every epoch has other windows.
    """

    num_losses = 1

    def __init__(self, recipe: LanguageModelRecipe, folders: RunFolders) -> None:
        self.recipe = recipe
        self.folders = folders
        init = folders.init
        if init is not None and init.config.architecture != "decoder":
            raise CheckpointError(f"--init: architecture={init.config.architecture!r}; it must be 'decoder'")
        texts = read_running_text(recipe.data, folders.data)
        self.text = exact_bpe_format() if init is None else init.text
        self.tokenizer = run_tokenizer(folders, lambda: train_exact_bpe([texts["train"]], recipe.vocab_size), self.text)
        self.config = self._config() if init is None else init.config
        self.tokens: dict[Part, Tensor] = {
            part: torch.tensor(self.tokenizer.encode(text)) for part, text in texts.items()
        }
        self._check_parts()

    def _config(self) -> ModelConfig:
        """Return the recipe's shape. An empty prompt begins with a line break, because texts have no begin token."""
        (line_break,) = self.tokenizer.encode("\n")
        ids = dict(pad_id=END_ID, bos_id=line_break, eos_id=END_ID, unk_id=END_ID)
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
