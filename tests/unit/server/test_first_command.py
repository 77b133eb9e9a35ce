"""The first command that `antiphon serve` suggests works with its default model."""

from __future__ import annotations

import pytest

from antiphon.server.ports import first_command
from antiphon.v1 import inference_pb2 as pb

TARGET = "--target 127.0.0.1:1 "


def model(architecture: pb.Architecture.ValueType, *tasks: pb.Task.ValueType, mask_token: str = "") -> pb.Model:
    described = [pb.TaskDescription(task=task) for task in tasks]
    return pb.Model(architecture=architecture, tasks=described, mask_token=mask_token)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (model(pb.ARCHITECTURE_ENCODER_DECODER), f'generate {TARGET}"How are you?"'),
        (model(pb.ARCHITECTURE_DECODER), f'generate {TARGET}"How are you?"'),
        (model(pb.ARCHITECTURE_ENCODER, pb.TASK_POOL, pb.TASK_CLASSIFY), f'classify {TARGET}"How are you?"'),
        (model(pb.ARCHITECTURE_ENCODER, pb.TASK_TAG), f'tag {TARGET}"How are you?"'),
        (
            model(pb.ARCHITECTURE_ENCODER, pb.TASK_NEXT_SENTENCE, pb.TASK_FILL_MASK, mask_token="[MASK]"),
            f'fill-mask {TARGET}"How are [MASK]?"',
        ),
        (model(pb.ARCHITECTURE_ENCODER), "models list --target 127.0.0.1:1"),
    ],
)
def test_first_command_matches_the_abilities_of_the_model(served: pb.Model, expected: str) -> None:
    assert first_command(served, TARGET) == expected


def test_first_command_omits_the_target_when_it_is_the_default() -> None:
    assert first_command(model(pb.ARCHITECTURE_ENCODER), "") == "models list"
