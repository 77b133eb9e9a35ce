"""Settings of config.json for the head that an adapter was trained with.

An adapter for labels usually starts from a checkpoint without them, whose config.json describes other heads. The class
of the trained model is in adapter_config.json. Number and names of the labels are in the config.json that the user
saved beside the adapter, because peft does not save them.
"""

from __future__ import annotations

from collections.abc import Mapping

from antiphon.checkpoints.adapters.adapter import Adapter
from antiphon.checkpoints.settings import Settings, read_json

# Settings of the labels, which are taken from the adapter's config.json if it is there.
_OF_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


def with_trained_head(settings: Settings, adapter: Adapter) -> Settings:
    """Return the settings with the architecture and the labels of the model that the adapter was trained in."""
    if found := read_json(adapter.folder / "config.json"):
        kept = {name: value for name, value in settings.items() if name not in _OF_LABELS}
        settings = {**kept, **{name: found[name] for name in _OF_LABELS if name in found}}
    trained = _trained_class(str(settings.get("model_type")), adapter)
    return {**settings, "architectures": [trained]} if trained else settings


def _trained_class(model_type: str, adapter: Adapter) -> str | None:
    """Return the class of transformers that the adapter was trained in if it has a head for a task; else None."""
    named = str((adapter.config.auto_mapping or {}).get("base_model_class", ""))
    if named.endswith(_HEADS):
        return named
    return _classes(adapter.config.task_type).get(model_type)


def _classes(task_type: str | None) -> Mapping[str, str]:
    """Return the class of each model type for a task of peft; empty for tasks that keep the checkpoint's head."""
    from transformers.models.auto import modeling_auto

    tables: dict[str, Mapping[str, str]] = {
        "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    }
    return tables.get(task_type or "", {})
