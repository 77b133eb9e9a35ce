"""Distillation of an encoder into one with fewer layers: DistilBERT (Sanh et al. 2019).

The student has the teacher's tokenizer and width. It begins with the teacher's embeddings, head for masked tokens, and
a part of its layers: one in two for half the layers. It learns the teacher's distribution, the masked tokens, and the
direction of the teacher's states. Sanh et al. (section 2) compare both distributions at every token; here, as for the
labels, only masked tokens are compared.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import CheckpointError, RecipeError
from antiphon.ops.attention import Backend
from antiphon.training.batches import IGNORED_LABEL, EncoderBatch
from antiphon.training.losses import labelled_states
from antiphon.training.masked_model import PretrainTask
from antiphon.training.recipe import Distillation, PretrainRecipe
from antiphon.training.task import RunFolders, provenance_of
from antiphon.transformer.heads import Head
from antiphon.transformer.transformer import Transformer


class DistillationLoss(nn.Module):
    """Weighted sum of three losses in training mode; only the cross entropy of masked tokens in evaluation mode.

    The teacher is not trained, and is always in evaluation mode.
    """

    def __init__(self, student: Transformer, teacher: Transformer, config: Distillation) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.requires_grad_(False).eval()
        self.config = config

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Set the mode of the student as nn.Module.train does."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: EncoderBatch, smoothing: float) -> Tensor:
        """Return the loss summed over the masked tokens, [1] float32, in nats; the cosine loss counts as its mean."""
        states = self.student.encode(batch.ids, batch.lens, batch.type_ids)
        logits, labels = _fill_mask(self.student, states, batch)
        cross_entropy = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        if not self.training:
            return cross_entropy[None]
        with torch.no_grad():
            expected = self.teacher.encode(batch.ids, batch.lens, batch.type_ids)
            taught, _ = _fill_mask(self.teacher, expected, batch)
        distance = _cosine_distance(states, expected, batch.lens) * len(labels)
        config = self.config
        soft = _soft_cross_entropy(logits, taught, config.temperature)
        return (config.soft * soft + config.labels * cross_entropy + config.cosine * distance)[None]


def _fill_mask(model: Transformer, states: Tensor, batch: EncoderBatch) -> tuple[Tensor, Tensor]:
    """Return the logits [K, V] float32 and labels [K] of the masked tokens; states [B, S, M]."""
    head = model.heads["fill_mask"]
    assert isinstance(head, Head)
    hidden, labels = labelled_states(states, batch.labels["fill_mask"])
    is_labelled = labels != IGNORED_LABEL
    return head(hidden).float()[is_labelled], labels[is_labelled]


def _soft_cross_entropy(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Return the divergence of the student's distribution from the teacher's, summed over rows, times temperature^2.

    The factor keeps the size of the gradient (Hinton et al. 2015, section 2.1).
    """
    actual = functional.log_softmax(logits / temperature, dim=-1)
    wanted = functional.log_softmax(taught / temperature, dim=-1)
    return functional.kl_div(actual, wanted, reduction="sum", log_target=True) * temperature**2


def _cosine_distance(states: Tensor, expected: Tensor, lens: Tensor) -> Tensor:
    """Return the mean of 1 - cos over all tokens that are not padding; states, expected [B, S, M], lens [B]."""
    is_token = torch.arange(states.shape[1], device=states.device) < lens[:, None]
    similarity = functional.cosine_similarity(states.float(), expected.float(), dim=-1)
    return (1 - similarity)[is_token].mean()


_LAYER = "encoder.layers."
# Fields in which a student may differ, because no weight has another shape then.
_FREE = frozenset({"encoder_layers", "decoder_layers", "dropout", "activation_dropout", "heads", "max_target_len"})


class DistillTask(PretrainTask):
    """TrainingTask of a student. Raises RecipeError without a teacher, CheckpointError for one of another shape."""

    def __init__(self, recipe: PretrainRecipe, folders: RunFolders) -> None:
        if recipe.distillation is None or folders.teacher is None:
            raise RecipeError(f"recipe {recipe.name!r} has a distillation section: --teacher must name the teacher")
        self.distillation = recipe.distillation
        self.teacher: Checkpoint = folders.teacher
        super().__init__(recipe, folders)
        _check_shapes(self.config, self.teacher.config)

    @property
    def provenance(self) -> Provenance:
        """Origin of data, and of the weights that the student began with, see TrainingTask."""
        return provenance_of(self.recipe, self.folders.init or self.teacher)

    def make_model(self, backend: Backend) -> Transformer:
        """Return the student with weights of the teacher, or with those of init; see TrainingTask."""
        model = super().make_model(backend)
        if self.folders.init is None:
            layers = taught_layers(self.config.encoder_layers, self.teacher.config.encoder_layers)
            weights = self.teacher.model.state_dict()
            model.load_state_dict({name: weights[_source(name, layers)] for name in model.state_dict()})
        return model

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss beside the teacher, see TrainingTask."""
        device = next(model.parameters()).device
        return DistillationLoss(model, self.teacher.model.to(device), self.distillation)


def taught_layers(student: int, teacher: int) -> list[int]:
    """Return the teacher's layer from which each layer of the student begins; evenly distributed, from the first on."""
    return [index * teacher // student for index in range(student)]


def _source(name: str, layers: list[int]) -> str:
    """Return the name of a student's weight in its teacher."""
    if not name.startswith(_LAYER):
        return name
    number, _, rest = name.removeprefix(_LAYER).partition(".")
    return f"{_LAYER}{layers[int(number)]}.{rest}"


def _check_shapes(student: ModelConfig, teacher: ModelConfig) -> None:
    if "fill_mask" not in [head.task for head in teacher.heads]:
        raise CheckpointError("--teacher: the model has no fill_mask head; distillation needs one")
    if student.encoder_layers > teacher.encoder_layers:
        raise CheckpointError(
            f"--teacher has {teacher.encoder_layers} layers; the student's model.encoder_layers="
            f"{student.encoder_layers} must be at most as many"
        )
    ours, theirs = student.model_dump(exclude=set(_FREE)), teacher.model_dump(exclude=set(_FREE))
    for name, value in ours.items():
        if value != theirs[name]:
            raise CheckpointError(f"--teacher has {name}={theirs[name]!r}; the student's model.{name} is {value!r}")
