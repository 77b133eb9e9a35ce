"""Checkpoints imported with a LoRA adapter compute what peft computes, with the adapter merged and beside the weights.

The adapters are trained by peft for a few steps: one case for each family, and for each way to adapt a module.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from antiphon.errors import SourceError, VerificationError
from antiphon.importer.importer import ImportOptions, _convert, _inspect
from antiphon.transformer.transformer import Transformer
from tests.marks import marked
from tests.parity import seq2seq_checkpoints
from tests.parity.adapters import open_adapted, outputs_of_ours, outputs_of_theirs, train_adapter
from tests.parity.decoder_checkpoints import DECODERS, write_decoder
from tests.parity.encoder_checkpoints import write_checkpoint

BERT: dict[str, Any] = dict(
    vocab_size=83, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=40,
)  # fmt: skip
SMALL: dict[str, Any] = dict(vocab_size=83, dim=36, n_layers=2, n_heads=3, hidden_dim=50, max_position_embeddings=40)
DEBERTA: dict[str, Any] = dict(BERT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)
LABELS: dict[str, Any] = dict(num_labels=4)
ATTENTION = ["q_proj", "v_proj"]
SEQ2SEQ = "SEQ_2_SEQ_LM"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint, the class of transformers in which the adapter is trained, and the settings of the adapter.

    base: name in CHECKPOINTS or DECODERS, or an encoder's class. settings: of the encoder, or of the decoder.
    labels: settings of a head that the training adds. untrained: outputs of the trained class that nobody has saved.
    """

    base: str
    kind: str = ""
    options: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()

    @property
    def trained(self) -> str:
        """Class of transformers of the trained model."""
        if self.base in seq2seq_checkpoints.CHECKPOINTS:
            made = seq2seq_checkpoints.CHECKPOINTS[self.base]
            return made.model + made.kind
        return self.kind or (DECODERS[self.base][0] if self.base in DECODERS else self.base)

    def write(self, folder: Path) -> None:
        """Save the checkpoint."""
        if self.base in seq2seq_checkpoints.CHECKPOINTS:
            seq2seq_checkpoints.save(folder, self.base)
        elif self.base in DECODERS:
            write_decoder(folder, self.base, **self.settings)
        else:
            kind: Any = getattr(transformers, self.base)
            write_checkpoint(folder, kind.config_class(**self.settings), self.base)


def lora(*targets: str, **options: Any) -> dict[str, Any]:
    return dict(r=3, lora_alpha=5, target_modules=list(targets)) | options


ENCODER_DECODERS = {
    "marian, feed-forward": Case(base="marian", options=lora(*ATTENTION, "fc1", "fc2", task_type=SEQ2SEQ)),
    "marian, all biases": Case(
        base="marian_of_two_vocabularies", options=lora(*ATTENTION, bias="all", task_type=SEQ2SEQ)
    ),
    "bart, patterns": Case(
        base="bart",
        options=lora(
            *ATTENTION, "fc1", r=4, use_rslora=True, rank_pattern={"q_proj": 2, "^model.decoder.layers.1.fc1": 5},
            alpha_pattern={"decoder.*v_proj": 9, "fc1": 2}, task_type=SEQ2SEQ,
        ),
    ),
    "bart, output saved": Case(
        base="bart_untied", options=lora("k_proj", modules_to_save=["lm_head"], task_type=SEQ2SEQ)
    ),
    "mbart, biases of products": Case(base="mbart", options=lora(*ATTENTION, lora_bias=True, task_type=SEQ2SEQ)),
    "pegasus, magnitudes": Case(base="pegasus", options=lora("out_proj", "fc2", use_dora=True, task_type=SEQ2SEQ)),
    "m2m100, biases of layers": Case(base="m2m100", options=lora(*ATTENTION, bias="lora_only", task_type=SEQ2SEQ)),
    "nllb, all": Case(base="nllb", options=dict(r=2, target_modules="all-linear", task_type=SEQ2SEQ)),
    "t5, relative positions": Case(base="t5", options=lora("q", "wo", "relative_attention_bias", task_type=SEQ2SEQ)),
    "flan_t5, output": Case(base="flan_t5", options=lora("q", "wi_1", "lm_head", use_dora=True, task_type=SEQ2SEQ)),
    "mt5, no task": Case(base="mt5", options=lora("k", "o")),
}  # fmt: skip
DECODER_ONLY = {
    "gpt2": Case(base="gpt2", options=lora("c_attn", "c_proj", "c_fc", fan_in_fan_out=True, task_type="CAUSAL_LM")),
    "gpt2, magnitudes": Case(base="gpt2", options=lora("c_proj", use_dora=True, bias="all")),
    "gpt2, embeddings saved": Case(
        base="gpt2", options=lora("c_attn", modules_to_save=["wte", "lm_head"], ensure_weight_tying=True)
    ),
    "gpt2, without head": Case(base="gpt2", kind="GPT2Model", options=lora("c_attn", task_type="FEATURE_EXTRACTION")),
    "llama, embeddings": Case(base="llama", options=lora(*ATTENTION, "embed_tokens", "lm_head", task_type="CAUSAL_LM")),
    "llama, magnitudes": Case(base="llama", options=lora("embed_tokens", "k_proj", "down_proj", use_dora=True)),
    "mistral": Case(base="mistral", options=dict(r=2, target_modules="all-linear", task_type="CAUSAL_LM")),
    "qwen2, embeddings saved": Case(
        base="qwen2", options=lora("q_proj", modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "qwen2": Case(base="qwen2", options=lora("k_proj", "gate_proj", "o_proj", task_type="CAUSAL_LM")),
}
ENCODER_ONLY = {
    "bert, pretraining": Case(
        base="BertForPreTraining", settings=BERT, options=lora("query", "dense", "seq_relationship", bias="all")
    ),
    "bert, new labels": Case(
        base="BertForPreTraining", kind="BertForSequenceClassification", settings=BERT, labels=LABELS,
        options=lora("query", "value", "word_embeddings", task_type="SEQ_CLS"),
    ),
    "bert, without head": Case(
        base="BertForMaskedLM", kind="BertModel", settings=BERT,
        options=lora("query", "dense", exclude_modules=["pooler.dense"], task_type="FEATURE_EXTRACTION"),
        untrained=("pooler_output",),
    ),
    "bert, magnitudes": Case(
        base="BertModel", kind="BertForSequenceClassification", settings=BERT, labels=LABELS,
        options=lora("key", task_type="SEQ_CLS", use_dora=True),
    ),
    "roberta, new labels, no task": Case(
        base="RobertaForMaskedLM", kind="RobertaForSequenceClassification", settings=dict(BERT, type_vocab_size=1),
        labels=LABELS, options=lora("query", "value", modules_to_save=["classifier"]),
    ),
    "xlm_roberta, other labels": Case(
        base="XLMRobertaForTokenClassification", kind="XLMRobertaForTokenClassification",
        settings=dict(BERT, num_labels=3), labels=LABELS | dict(ignore_mismatched_sizes=True),
        options=lora("query", "intermediate.dense", task_type="TOKEN_CLS"),
    ),
    "distilbert, new labels": Case(
        base="DistilBertForMaskedLM", kind="DistilBertForSequenceClassification", settings=SMALL, labels=LABELS,
        options=lora("q_lin", "lin2", task_type="SEQ_CLS"),
    ),
    "albert, shared layers": Case(
        base="AlbertForMaskedLM", kind="AlbertForTokenClassification", settings=dict(BERT, embedding_size=20),
        labels=LABELS, options=lora("query", "ffn", "embedding_hidden_mapping_in", task_type="TOKEN_CLS"),
    ),
    "deberta": Case(
        base="DebertaForTokenClassification", settings=DEBERTA | LABELS, options=lora("in_proj", "pos_q_proj")
    ),
    "deberta_v2, new labels": Case(
        base="DebertaV2ForMaskedLM", kind="DebertaV2ForSequenceClassification", labels=LABELS,
        settings=dict(DEBERTA, position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True),
        options=lora("query_proj", "value_proj", task_type="SEQ_CLS", modules_to_save=["pooler"]),
    ),
}  # fmt: skip
CASES = ENCODER_DECODERS | DECODER_ONLY | ENCODER_ONLY


def write_adapted(case: Case, folder: Path) -> tuple[Path, Path]:
    """Write the checkpoint and its adapter, with the model's config.json beside the adapter if it has new labels."""
    base, adapter = folder / "base", folder / "adapter"
    case.write(base)
    train_adapter(base, case.trained, adapter, case.options, **case.labels)
    if case.labels:
        getattr(transformers, case.trained).config_class.from_pretrained(base, num_labels=4).save_pretrained(adapter)
    return base, adapter


def import_adapted(base: Path, adapter: Path | None) -> Transformer:
    """Return the imported model, after the command's own comparison with peft."""
    options = ImportOptions(source=str(base), target=base / "unused", adapter=adapter)
    with tempfile.TemporaryDirectory() as text_folder:
        return _convert(_inspect(options), options, Path(text_folder))[0].model


@pytest.mark.parametrize("name", marked(CASES, "combinations", but=["marian, feed-forward", "gpt2, magnitudes"]))
def test_imported_model_equals_peft_merged_and_unmerged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base, adapter = write_adapted(case, tmp_path)
    found, plain = (outputs_of_ours(import_adapted(base, with_adapter)) for with_adapter in (adapter, None))
    changed = "states" if "states" in found else "logits"
    assert float((found[changed] - plain[changed]).abs().max()) > 0.1
    for merged in (False, True):
        expected = outputs_of_theirs(open_adapted(base, case.trained, adapter, merged=merged, **case.labels))
        assert expected
        for part in expected.keys() - case.untrained:
            # float32; sums run in another order, and merged weights are rounded once more
            scale = max(1.0, float(expected[part].abs().max()))
            torch.testing.assert_close(found[part] / scale, expected[part] / scale, atol=5e-6, rtol=0, msg=part)


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("gpt2", lora("wte")),
        ("gpt2", lora("wte", "lm_head")),
        ("gpt2", lora("wte", use_dora=True)),
        ("qwen2", lora("embed_tokens", ensure_weight_tying=True)),
    ],
    ids=["input", "both", "magnitudes", "tied_adapters"],
)
def test_change_of_a_tied_embedding_is_refused_because_peft_merges_it_into_another_model(
    base: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(base=base, options=options)
    folder, adapter = write_adapted(case, tmp_path)
    trained, merged = (
        outputs_of_theirs(open_adapted(folder, case.trained, adapter, merged=merged))["logits"]
        for merged in (False, True)
    )
    assert float((trained - merged).abs().max()) > 0.1
    with pytest.raises(SourceError, match=r"(wte|embed_tokens).weight.*the merged model can differ"):
        import_adapted(folder, adapter)


def test_adapter_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    """peft cannot load such a file, and the checkpoint's own head must not take its place."""
    case = Case(base="BertForSequenceClassification", settings=BERT, options=lora("query", task_type="SEQ_CLS"))
    base, adapter = write_adapted(case, tmp_path)
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "classifier" not in name}, path)
    with pytest.raises(VerificationError, match=r"peft cannot read the adapter .*classifier.weight"):
        import_adapted(base, adapter)


def test_missing_new_layers_are_named_with_the_setting_that_saves_them(tmp_path: Path) -> None:
    case = ENCODER_ONLY["deberta_v2, new labels"]
    options = {name: value for name, value in case.options.items() if name != "modules_to_save"}
    base, adapter = write_adapted(replace(case, options=options), tmp_path)
    with pytest.raises(SourceError, match=r"missing: pooler.dense.bias, pooler.dense.weight.*modules_to_save must"):
        import_adapted(base, adapter)


def test_head_without_tensors_is_refused(tmp_path: Path) -> None:
    case = ENCODER_ONLY["bert, new labels"]
    base, adapter = write_adapted(case, tmp_path)
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "classifier" not in name}, path)
    with pytest.raises(SourceError, match="BertForSequenceClassification, but there are no tensors of its head"):
        import_adapted(base, adapter)
