"""Imported encoder-only models: states and outputs of heads, in PyTorch and in graphs, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import FIRST_TOKEN_TASKS, Task
from antiphon.errors import SourceError
from antiphon.export.bundle_model import NativeEncoder
from antiphon.importer.importer import ImportOptions, import_checkpoint
from tests.marks import marked
from tests.parity.encoder_checkpoints import SPECIAL, read_checkpoint, write_checkpoint

LENS = (13, 1, 29, 6)
CLOSE: dict[str, Any] = dict(atol=2e-5, rtol=1e-4)

# Uncommon sizes on purpose: a padded vocabulary, widths that are not powers of two, every activation once.
BERT = dict(
    vocab_size=83, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40, hidden_act="gelu_new", layer_norm_eps=1e-7,
)  # fmt: skip
DISTILBERT = dict(
    vocab_size=83, dim=36, n_layers=2, n_heads=4, hidden_dim=50, max_position_embeddings=40, activation="gelu"
)
ALBERT = dict(BERT, embedding_size=20, num_hidden_layers=3, hidden_act="relu")
DEBERTA: dict[str, Any] = dict(
    vocab_size=83, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40, hidden_act="gelu", layer_norm_eps=1e-7, relative_attention=True,
)  # fmt: skip
BOTH = ["c2p", "p2c"]
# The settings of deberta-v3-base with smaller sizes: buckets end at the last position.
V3 = dict(
    DEBERTA, position_buckets=12, share_att_key=True, norm_rel_ebd="layer_norm", pos_att_type="p2c|c2p",
    position_biased_input=False,
)  # fmt: skip
LABELS = {0: "cat", 1: "dog", 2: "bird"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint: a class of transformers, its settings, and the output names of the heads."""

    family: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    outputs: dict[Task, str]


CASES: dict[str, Case] = {
    "bert_pretraining": Case(
        family="Bert", kind="ForPreTraining", settings=BERT,
        outputs={"fill_mask": "prediction_logits", "next_sentence": "seq_relationship_logits"},
    ),
    "bert_untied_one_type": Case(
        family="Bert", kind="ForMaskedLM", settings={**BERT, "tie_word_embeddings": False, "type_vocab_size": 1},
        outputs={"fill_mask": "logits"},
    ),
    "bert_next_sentence": Case(
        family="Bert", kind="ForNextSentencePrediction", settings={**BERT, "hidden_act": "silu"},
        outputs={"next_sentence": "logits"},
    ),
    "bert_classify": Case(
        family="Bert", kind="ForSequenceClassification", settings={**BERT, "id2label": LABELS},
        outputs={"classify": "logits"},
    ),
    "bert_tag": Case(
        family="Bert", kind="ForTokenClassification", settings={**BERT, "id2label": LABELS}, outputs={"tag": "logits"}
    ),
    "bert_base": Case(family="Bert", kind="Model", settings=BERT, outputs={"pool": "pooler_output"}),
    "roberta_masked": Case(
        family="Roberta", kind="ForMaskedLM",
        settings={**BERT, "type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "relu"},
        outputs={"fill_mask": "logits"},
    ),
    "roberta_classify": Case(
        family="Roberta", kind="ForSequenceClassification",
        settings={**BERT, "type_vocab_size": 1, "num_labels": 1}, outputs={"classify": "logits"},
    ),
    "roberta_without_padding": Case(
        family="Roberta", kind="ForMaskedLM", settings={**BERT, "type_vocab_size": 1, "pad_token_id": -1},
        outputs={"fill_mask": "logits"},
    ),
    "bert_without_padding": Case(
        family="Bert", kind="Model", settings={**BERT, "pad_token_id": -1}, outputs={"pool": "pooler_output"}
    ),
    "xlm_roberta_tag": Case(
        family="XLMRoberta", kind="ForTokenClassification", settings={**BERT, "id2label": LABELS},
        outputs={"tag": "logits"},
    ),
    "camembert_base": Case(
        family="Camembert", kind="Model", settings={**BERT, "type_vocab_size": 1}, outputs={"pool": "pooler_output"}
    ),
    "distilbert_masked": Case(
        family="DistilBert", kind="ForMaskedLM", settings={**DISTILBERT, "sinusoidal_pos_embds": True},
        outputs={"fill_mask": "logits"},
    ),
    "distilbert_classify": Case(
        family="DistilBert", kind="ForSequenceClassification",
        settings={**DISTILBERT, "id2label": LABELS, "problem_type": "multi_label_classification"},
        outputs={"classify": "logits"},
    ),
    "distilbert_tag": Case(
        family="DistilBert", kind="ForTokenClassification", settings=DISTILBERT, outputs={"tag": "logits"}
    ),
    "albert_pretraining": Case(
        family="Albert", kind="ForPreTraining", settings=ALBERT,
        outputs={"fill_mask": "prediction_logits", "next_sentence": "sop_logits"},
    ),
    "albert_untied": Case(
        family="Albert", kind="ForMaskedLM", settings={**ALBERT, "tie_word_embeddings": False},
        outputs={"fill_mask": "logits"},
    ),
    "albert_classify": Case(
        family="Albert", kind="ForSequenceClassification", settings={**ALBERT, "id2label": LABELS},
        outputs={"classify": "logits"},
    ),
    "albert_tag": Case(family="Albert", kind="ForTokenClassification", settings=ALBERT, outputs={"tag": "logits"}),
    "albert_base": Case(family="Albert", kind="Model", settings=ALBERT, outputs={"pool": "pooler_output"}),
    # Distances beyond the table of v1: sources are longer than max_relative_positions.
    "deberta_v1_masked": Case(
        family="Deberta", kind="ForMaskedLM", outputs={"fill_mask": "logits"},
        settings={**DEBERTA, "pos_att_type": BOTH, "max_relative_positions": 9, "position_biased_input": False},
    ),
    "deberta_v1_c2p_classify": Case(
        family="Deberta", kind="ForSequenceClassification", outputs={"classify": "logits"},
        settings={**DEBERTA, "pos_att_type": ["c2p"], "type_vocab_size": 2, "id2label": LABELS},
    ),
    "deberta_v1_p2c_tag": Case(
        family="Deberta", kind="ForTokenClassification", outputs={"tag": "logits"},
        settings={**DEBERTA, "pos_att_type": ["p2c"], "type_vocab_size": 1, "position_biased_input": False},
    ),
    "deberta_v3_masked": Case(family="DebertaV2", kind="ForMaskedLM", settings=V3, outputs={"fill_mask": "logits"}),
    "deberta_v3_legacy_off": Case(
        family="DebertaV2", kind="ForMaskedLM", settings={**V3, "legacy": False}, outputs={"fill_mask": "logits"}
    ),
    "deberta_v2_classify": Case(
        family="DebertaV2", kind="ForSequenceClassification", outputs={"classify": "logits"},
        settings={**V3, "share_att_key": False, "pooler_hidden_act": "tanh", "max_relative_positions": 17},
    ),
    "deberta_v2_tag_exact_distances": Case(
        family="DebertaV2", kind="ForTokenClassification", outputs={"tag": "logits"},
        settings={**DEBERTA, "pos_att_type": BOTH, "max_relative_positions": 11, "type_vocab_size": 2},
    ),
    "deberta_v2_base_c2p": Case(
        family="DebertaV2", kind="Model", outputs={},
        settings={**V3, "share_att_key": False, "pos_att_type": "c2p", "norm_rel_ebd": "none"},
    ),
    "deberta_v2_base_p2c": Case(family="DebertaV2", kind="Model", outputs={}, settings={**V3, "pos_att_type": "p2c"}),
}  # fmt: skip
# One checkpoint of each family is exported too: the one with the most heads. DeBERTa v1 and v2 differ in their tables.
EXPORTED = (
    "bert_pretraining", "roberta_masked", "distilbert_classify", "albert_pretraining", "deberta_v1_masked",
    "deberta_v2_classify",
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Random tokens [B, S] with token types, valid up to `lens`; none of them is the padding token."""

    ids: Tensor
    types: Tensor
    lens: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.ids.shape[1])[None] < self.lens[:, None]

    def rows(self, tensor: Tensor) -> list[Any]:
        """Return the valid part of each row as a NumPy array."""
        return [row[:length].numpy() for row, length in zip(tensor, self.lens.tolist(), strict=True)]


def random_batch(config: ModelConfig) -> Batch:
    generator = torch.Generator().manual_seed(9)
    shape, lens = (len(LENS), max(LENS)), torch.tensor(LENS, dtype=torch.int32)
    ids = torch.randint(4, config.vocab_size, shape, generator=generator)
    types = torch.randint(0, max(config.token_types, 1), shape, generator=generator)
    ids[torch.arange(shape[1])[None] >= lens[:, None]] = config.pad_id
    return Batch(ids, types, lens)


def settings_of(case: Case) -> Any:
    return getattr(transformers, f"{case.family}Config")(**case.settings)


def write(case: Case, folder: Path) -> Any:
    return write_checkpoint(folder, settings_of(case), f"{case.family}{case.kind}")


@torch.no_grad()
def run_theirs(original: Any, case: Case, config: ModelConfig, batch: Batch) -> dict[str, Tensor]:
    """Return states [N, M] of valid tokens, and outputs of each head for all valid tokens or for the first one."""
    types = dict(token_type_ids=batch.types) if config.token_types else {}
    made = original(batch.ids, attention_mask=batch.mask.long(), output_hidden_states=True, **types)
    found: dict[str, Tensor] = {"states": made.hidden_states[-1][batch.mask]}
    for task, name in case.outputs.items():
        found[task] = made[name] if task in FIRST_TOKEN_TASKS else made[name][batch.mask]
    return found


@pytest.mark.parametrize("name", CASES)
def test_encoder_and_heads_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    original = write(case, tmp_path)
    model, config, _ = read_checkpoint(tmp_path)
    batch = random_batch(config)
    expected = run_theirs(original, case, config, batch)
    assert case.outputs.keys() <= {head.task for head in config.heads}
    with torch.no_grad():
        states = model.encode(batch.ids, batch.lens, batch.types if config.token_types else None)
        torch.testing.assert_close(states[batch.mask], expected["states"], **CLOSE)
        for task in case.outputs:
            read = states[:, 0] if task in FIRST_TOKEN_TASKS else states[batch.mask]
            torch.testing.assert_close(model.read_out(task, read), expected[task], **CLOSE)


@pytest.mark.parametrize("name", marked(EXPORTED, "combinations", but=["albert_pretraining"]))
def test_imported_graphs_equal_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    """The whole command is tested: weights, text files and graphs; int8 within the tolerance of the verification."""
    case = CASES[name]
    original = write(case, tmp_path / "theirs")
    bundle = import_checkpoint(ImportOptions(source=str(tmp_path / "theirs"), target=tmp_path / "ours"))
    config = bundle.manifest.model
    batch = random_batch(config)
    expected = run_theirs(original, case, config, batch)
    for precision, allowed in (("float32", 5e-5), ("int8", 0.2)):
        encoder = NativeEncoder(bundle.path, bundle.graph_set(precision), config)  # type: ignore[arg-type]
        sources, types = batch.rows(batch.ids), batch.rows(batch.types)
        states = encoder.encode(sources, types)
        found = {"states": np.concatenate(states)}
        for task in case.outputs:
            read = np.stack([row[0] for row in states]) if task in FIRST_TOKEN_TASKS else found["states"]
            found[task] = encoder.read_out(task, read)
        for part, values in expected.items():
            error = np.abs(found[part] - values.numpy()).max() / max(1.0, float(values.abs().max()))
            assert error < allowed, (precision, part, error)
        for source, kinds, together in zip(sources, types, states, strict=True):
            np.testing.assert_array_equal(encoder.encode([source], [kinds])[0], together)
    assert bundle.manifest.text.template == (2, "$text", 3)
    assert bundle.manifest.text.mask_id == SPECIAL.index("[MASK]")
    assert bundle.manifest.text.pair_start == (3 if config.token_types else None)


def test_labels_and_scores_equal_those_of_the_checkpoint(tmp_path: Path) -> None:
    heads = {}
    for name in ("bert_classify", "roberta_classify", "distilbert_classify", "distilbert_tag"):
        write(CASES[name], tmp_path / name)
        heads[name] = next(head for head in read_checkpoint(tmp_path / name)[1].heads if head.task != "pool")
    assert {name: (head.labels, head.scores) for name, head in heads.items()} == {
        "bert_classify": (("cat", "dog", "bird"), "softmax"),
        "roberta_classify": (("LABEL_0",), "sigmoid"),
        "distilbert_classify": (("cat", "dog", "bird"), "sigmoid"),
        "distilbert_tag": (("LABEL_0", "LABEL_1"), "softmax"),
    }


def test_norms_with_tensorflow_names_are_read(tmp_path: Path) -> None:
    original = write(CASES["bert_pretraining"], tmp_path)
    path = tmp_path / "model.safetensors"
    renames = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(path)
    for old, new in renames.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    model, config, _ = read_checkpoint(tmp_path)
    batch = random_batch(config)
    expected = run_theirs(original, CASES["bert_pretraining"], config, batch)["states"]
    with torch.no_grad():
        states = model.encode(batch.ids, batch.lens, batch.types)
    torch.testing.assert_close(states[batch.mask], expected, **CLOSE)


def test_tied_output_is_stored_once_when_the_file_has_it_under_both_names(tmp_path: Path) -> None:
    write(CASES["bert_pretraining"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    words = tensors["bert.embeddings.word_embeddings.weight"]
    save_file({**tensors, "cls.predictions.decoder.weight": words.clone()}, path)
    model, config, _ = read_checkpoint(tmp_path)
    assert [head.tied for head in config.heads if head.task == "fill_mask"] == [True]
    assert model.encoder is not None
    torch.testing.assert_close(model.encoder.embedding.weight, words)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("bert_base", dict(architectures=["BertForQuestionAnswering"]), "architectures names BertForQuestionAnswering"),
        ("bert_base", dict(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
        ("bert_base", dict(is_decoder=True), "is_decoder is True"),
        ("bert_base", dict(hidden_act="mish"), "hidden_act is 'mish'"),
        ("bert_classify", dict(problem_type="ranking"), "problem_type is 'ranking'"),
        ("bert_classify", dict(id2label={"zero": "a"}), "id2label is {'zero': 'a'}"),
        ("bert_tag", dict(architectures=["BertModel"]), "unexpected: classifier.bias, classifier.weight"),
        ("albert_base", dict(num_hidden_groups=2), "num_hidden_groups is 2"),
        ("deberta_v1_masked", dict(relative_attention=False), "relative_attention is False"),
        ("deberta_v1_masked", dict(pos_att_type=["p2p"]), "pos_att_type is ['p2p']"),
        ("deberta_v1_masked", dict(talking_head=True), "talking_head is True"),
        ("deberta_v1_masked", dict(embedding_size=20), "embedding_size is 20"),
        ("deberta_v3_masked", dict(conv_kernel_size=3), "conv_kernel_size is 3"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(CASES[case], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(SourceError) as refusal:
        read_checkpoint(tmp_path)
    assert message in str(refusal.value)
