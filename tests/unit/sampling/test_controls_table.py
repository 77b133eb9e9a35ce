"""The contract, the client's Options and docs/CONTROLS.md agree with the table of controls."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from antiphon.client.options import EarlyStopping, Options
from antiphon.controls.control import Control, Kind
from antiphon.controls.markdown import updated
from antiphon.controls.rules import RULES
from antiphon.controls.table import CONTROLS
from antiphon.v1 import inference_pb2 as pb

CONTROLS_MD = Path(__file__).parents[3] / "docs" / "CONTROLS.md"
FIELDS: dict[str, FieldDescriptor] = dict(pb.GenerateOptions.DESCRIPTOR.fields_by_name)

IN_OPTIONS: dict[Kind, Any] = {
    Kind.WHOLE_NUMBER: int,
    Kind.NUMBER: float,
    Kind.SWITCH: bool,
    Kind.CHOICE: EarlyStopping,  # the only one
    Kind.TOKEN_ID: int,
    Kind.TOKEN_IDS: Sequence[int],
    Kind.BIASES: Mapping[int, float],
    Kind.TEXT: str,
    Kind.TEXTS: Sequence[str],
}

IN_CONTRACT: dict[Kind, tuple[int, ...]] = {
    Kind.WHOLE_NUMBER: (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT64),
    Kind.NUMBER: (FieldDescriptor.TYPE_DOUBLE,),
    Kind.SWITCH: (FieldDescriptor.TYPE_BOOL,),
    Kind.CHOICE: (FieldDescriptor.TYPE_ENUM,),
    Kind.TOKEN_ID: (FieldDescriptor.TYPE_UINT32,),
    Kind.TOKEN_IDS: (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_MESSAGE),
    Kind.BIASES: (FieldDescriptor.TYPE_MESSAGE,),
    Kind.TEXT: (FieldDescriptor.TYPE_STRING,),
    Kind.TEXTS: (FieldDescriptor.TYPE_STRING,),
}


def test_contract_and_client_have_the_controls_of_the_table() -> None:
    names = [control.name for control in CONTROLS]
    assert len(set(names)) == len(names)
    assert set(FIELDS) == set(names)
    assert {field.name for field in dataclasses.fields(Options)} == set(names)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_contract_and_client_have_the_type_of_each_control(control: Control) -> None:
    assert FIELDS[control.name].type in IN_CONTRACT[control.kind]
    assert typing.get_type_hints(Options)[control.name] == IN_OPTIONS[control.kind] | None
    assert control.name in (Options.__doc__ or "")


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_defaults_and_neutral_values_are_in_range(control: Control) -> None:
    if control.range is None or control.kind is Kind.BIASES:
        return
    values = [value for value in (control.default, control.off) if value is not None]
    assert all(control.range.holds(value) for value in values)
    assert not control.range.holds(float("nan"))


def test_enumerated_control_has_the_names_of_the_contract_and_of_the_client() -> None:
    for control in CONTROLS:
        if control.kind is Kind.CHOICE:
            contract = FIELDS[control.name].enum_type
            assert contract is not None
            named = [value.name.lower() for value in contract.values[1:]]
            assert named == [f"{control.name}_{choice}" for choice in control.choices]
            assert control.choices == typing.get_args(IN_OPTIONS[control.kind])


def test_rules_name_only_controls_of_the_table() -> None:
    assert {rule.field for rule in RULES} <= {control.field for control in CONTROLS}


def test_docs_contain_the_tables_of_controls_and_rules() -> None:
    document = CONTROLS_MD.read_text(encoding="utf-8")
    assert updated(document) == document, "run: python -m antiphon.controls.markdown docs/CONTROLS.md"


def test_updated_replaces_rows_and_keeps_the_text_around_them() -> None:
    document = CONTROLS_MD.read_text(encoding="utf-8")
    older = document.replace("| `seed` |", "| `old_name` |")
    assert updated(older) == document


def test_updated_refuses_a_document_without_the_tables() -> None:
    with pytest.raises(ValueError, match="no table"):
        updated("# Decoding controls\n")
