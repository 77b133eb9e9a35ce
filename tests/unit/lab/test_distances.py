from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from antiphon.lab.recurrent import RecurrentModel, RecurrentTask
from antiphon.lab.sequence_models import gradient_by_distance
from antiphon.training.task import RunFolders
from antiphon.training.translation import Batch, Example, TranslationTask, collate
from antiphon.transformer.transformer import Transformer
from tests.unit.lab.recurrent_models import ALONE, SHAPE, small_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads

Model = Transformer | RecurrentModel

SOURCES = [[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]


def open_task(kind: str, folder: Path) -> RecurrentTask | TranslationTask:
    folders = RunFolders(data=folder, run=folder / "run", group=ALONE)
    recipe = small_recipe(folder)
    return RecurrentTask(recipe, folders, SHAPE) if kind == "lstm" else TranslationTask(recipe, folders)


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_gradient_equals_finite_differences(kind: str, tmp_path: Path) -> None:
    """The change of the loss along each axis of one embedding, in float64, gives the norm of its gradient."""
    task = open_task(kind, tmp_path)
    torch.manual_seed(1)
    model: Model = task.make_model("eager").double().eval()
    loss: nn.Module = task.make_loss(model)  # type: ignore[arg-type]
    examples = [Example(source=[*ids, task.tokenizer.eos_id], target=ids) for ids in SOURCES]
    found = gradient_by_distance(loss, source_embedding(model), collate(examples, task.tokenizer))
    assert len(found) == 5
    for distance in (0, 4):
        norms = [
            torch.tensor(slopes(model, collate([example], task.tokenizer), 4 - distance)).norm() for example in examples
        ]
        assert found[distance] == pytest.approx(float(sum(norms)) / 2, rel=1e-5)  # the loss's gradient is float64


def source_embedding(model: Model) -> nn.Embedding:
    assert model.encoder is not None
    return model.encoder.embedding


def slopes(model: Model, batch: Batch, position: int) -> list[float]:
    """Return the change of the last word's loss for each axis of the embedding of one source position."""
    step = 1e-4
    return [
        (shifted_loss(model, batch, position, axis, step) - shifted_loss(model, batch, position, axis, -step))
        / (2 * step)
        for axis in range(source_embedding(model).embedding_dim)
    ]


@torch.no_grad()
def shifted_loss(model: Model, batch: Batch, position: int, axis: int, by: float) -> float:
    """Return the loss of the fifth target token if the source's embedding, the first in the pass, is changed."""
    shifts = [by]

    def add(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, position, axis] += shifts.pop() if shifts else 0.0
        return output

    hook = source_embedding(model).register_forward_hook(add)
    if isinstance(model, Transformer):
        logits = model(batch.source, batch.inputs, batch.source_lens)
    else:
        logits = model.logits(model.decode(batch.inputs, model.encode(batch.source, batch.source_lens)))
    hook.remove()
    return -float(logits[0, 4].log_softmax(0)[batch.labels[0, 4]])


def test_sources_of_different_lengths_are_refused(tmp_path: Path) -> None:
    task = open_task("lstm", tmp_path)
    examples = [Example(source=[20, 2], target=[20]), Example(source=[20, 21, 2], target=[20])]
    with pytest.raises(ValueError, match=r"source_lens has the values \[2, 3\]"):
        gradient_by_distance(nn.Identity(), nn.Embedding(4, 8), collate(examples, task.tokenizer))


def test_target_without_a_word_is_refused(tmp_path: Path) -> None:
    task = open_task("lstm", tmp_path)
    batch = collate([Example(source=[20, 2], target=[])], task.tokenizer)
    with pytest.raises(ValueError, match="a target has no token before its end token"):
        gradient_by_distance(nn.Identity(), nn.Embedding(4, 8), batch)
