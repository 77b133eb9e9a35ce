"""Distillation of an encoder into one with fewer layers: DistilBERT (Sanh et al. 2019).

The student has the teacher's tokenizer and width. It begins with the teacher's embeddings, head for masked tokens, and
a part of its layers: one in two for half the layers. It learns the teacher's distribution, the masked tokens, and the
direction of the teacher's states.
"""

from __future__ import annotations

from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import CheckpointError, RecipeError
from antiphon.ops.attention import Backend
from antiphon.training.recipe import PretrainRecipe
from antiphon.training.tasks.distillation_loss import DistillationLoss
from antiphon.training.tasks.pretrain_task import PretrainTask
from antiphon.training.tasks.training_task import RunFolders, provenance_of
from antiphon.transformer.transformer import Transformer

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
