from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from antiphon.model.lab.distances import gradient_by_distance
from antiphon.model.lab.recurrent.recurrent_task import RecurrentTask
from antiphon.model.training.data.translation_data import Example, collate
from antiphon.model.training.tasks.training_task import RunFolders, TrainingTask
from antiphon.model.training.tasks.translation_task import TranslationTask
from tests.unit.lab.recurrent_models import ALONE, SHAPE, small_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads

SOURCES = [[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]


def open_task(kind: str, folder: Path) -> RecurrentTask | TranslationTask:
    folders = RunFolders(data=folder, run=folder / "run", group=ALONE)
    recipe = small_recipe(folder)
    return RecurrentTask(recipe, folders, SHAPE) if kind == "lstm" else TranslationTask(recipe, folders)


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_gradient_equals_finite_differences(kind: str, tmp_path: Path) -> None:
    """The change of the loss along each axis of one embedding, in float64, gives the norm of its gradient."""
    task: TrainingTask[nn.Module] = open_task(kind, tmp_path)  # type: ignore[assignment]
    torch.manual_seed(1)
    model = task.make_model("eager").double().eval()
    loss, embedding = task.make_loss(model), model.encoder.embedding
    assert isinstance(embedding, nn.Embedding)
    examples = [Example(source=[*ids, task.tokenizer.eos_id], target=ids) for ids in SOURCES]
    found = gradient_by_distance(loss, embedding, collate(examples, task.tokenizer))
    assert len(found) == 5
    for distance in (0, 4):
        slopes = [slope(loss, embedding, examples[row], task, 4 - distance) for row in range(2)]
        expected = sum(float(torch.tensor(values).norm()) for values in slopes) / 2
        assert found[distance] == pytest.approx(expected, rel=1e-3)


def slope(
    loss: nn.Module, embedding: nn.Embedding, example: Example, task: TrainingTask[nn.Module], position: int
) -> list[float]:
    """Return the change of the last word's loss for each axis of the embedding of one source position."""
    ends = collate([example], task.tokenizer)
    shorter = ends.labels.clone()
    shorter[:, : len(example.target) - 1] = -100
    shorter[:, len(example.target)] = -100
    last = type(ends)(source=ends.source, source_lens=ends.source_lens, inputs=ends.inputs, labels=shorter)

    def shifted(axis: int, by: float) -> float:
        calls = []

        def add(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            calls.append(output)
            changed = output.clone()
            changed[0, position, axis] += by if len(calls) == 1 else 0.0
            return changed

        hook = embedding.register_forward_hook(add)
        with torch.no_grad():
            value = float(loss(last, 0.0))
        hook.remove()
        return value

    step = 1e-3
    return [(shifted(axis, step) - shifted(axis, -step)) / (2 * step) for axis in range(embedding.embedding_dim)]


def test_sources_of_different_lengths_are_refused(tmp_path: Path) -> None:
    task = open_task("lstm", tmp_path)
    examples = [Example(source=[20, 2], target=[20]), Example(source=[20, 21, 2], target=[20])]
    model = task.make_model("eager")
    with pytest.raises(ValueError, match=r"source_lens has the values \[2, 3\]"):
        gradient_by_distance(nn.Identity(), model.encoder.embedding, collate(examples, task.tokenizer))  # type: ignore[arg-type, union-attr]


def test_target_without_a_word_is_refused(tmp_path: Path) -> None:
    task = open_task("lstm", tmp_path)
    batch = collate([Example(source=[20, 2], target=[])], task.tokenizer)
    with pytest.raises(ValueError, match="a target has no token before its end token"):
        gradient_by_distance(nn.Identity(), nn.Embedding(4, 8), batch)
