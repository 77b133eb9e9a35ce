from pathlib import Path

import pytest

from antiphon.lab.sequence_models import OPEN_TASKS, PEAK_LR, sequence_recipe
from antiphon.training.trainer import Trainer
from tests.unit.lab.recurrent_models import ALONE, SIZES, made_dataset


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_both_models_have_a_similar_size(kind: str, tmp_path: Path) -> None:
    lens = (SIZES.longest_tokens, SIZES.longest_tokens)
    recipe = sequence_recipe("copy", made_dataset(tmp_path), lens, max_steps=1, peak_lr=PEAK_LR[kind])
    trainer = Trainer(recipe, tmp_path, tmp_path / "run", ALONE, open_task=OPEN_TASKS[kind])
    assert 300_000 < sum(parameter.numel() for parameter in trainer.model.parameters()) < 600_000
