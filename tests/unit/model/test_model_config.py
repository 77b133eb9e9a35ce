from typing import Any, get_args

import pytest
import torch
import transformers
from pydantic import ValidationError

from antiphon.architecture.config import Activation, ModelConfig, preset
from antiphon.architecture.heads import HeadActivation
from antiphon.ops.activations import ACTIVATIONS
from antiphon.transformer.dropout import Dropout
from antiphon.transformer.transformer import Transformer


@pytest.mark.parametrize(("name", "millions"), [("base", 65), ("big", 213)])
def test_preset_has_the_size_given_in_the_paper(name: str, millions: int) -> None:
    """The paper's table 3 has rounded sizes; all embeddings of our models are tied."""
    with torch.device("meta"):
        parameters = Transformer(preset(name)).num_parameters
    assert parameters / 1e6 == pytest.approx(millions, rel=0.04)


@pytest.mark.parametrize(
    ("name", "published", "fields"),
    [
        ("bert-base", 109_482_240, dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12)),
        ("bert-large", 335_141_888, dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)),
    ],
)
def test_preset_of_bert_has_the_published_size(name: str, published: int, fields: dict[str, int]) -> None:
    """Counted: all embeddings and their norm, the layers and the pooler, as in BertModel; no head for pre-training."""
    with torch.device("meta"):
        ours = Transformer(preset(name))
        theirs = transformers.BertModel(
            transformers.BertConfig(**fields, intermediate_size=4 * fields["hidden_size"])  # type: ignore[arg-type]
        )
    assert ours.num_parameters == published == theirs.num_parameters()
    assert {head.task for head in preset(name).heads} == {"pool"}


def test_every_activation_of_a_configuration_has_a_function() -> None:
    """Heads may have every activation; layers those that public models use there."""
    assert set(get_args(HeadActivation)) == ACTIVATIONS.keys()
    assert set(get_args(Activation)) < ACTIVATIONS.keys()


LLAMA3 = dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
HEADS: dict[str, Any] = dict(encoder_self=[4, 2], decoder_self=[1, 3], decoder_cross=[1, 2])
SCALING = r"rope_scaling\."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=3), "vocab_size"),
        (dict(num_heads=5), "num_heads"),
        (dict(encoder_layers=0), "encoder_layers"),
        (dict(decoder_layers=0), "decoder_layers"),
        (dict(norm="batchnorm"), "norm"),
        (dict(dropout=1.0), "dropout"),
        (dict(eos_id=96), "eos_id"),
        (dict(attention_scale=0), "attention_scale"),
        (dict(positions_offset=-1), "positions_offset"),
        (dict(no_such_field=1), "no_such_field"),
        (dict(positions="rope", head_dim=7), "head_dim=7"),
        (dict(positions="rope", positions_offset=2), "positions_offset=2 does not fit positions='rope'"),
        (dict(positions="learned", sinusoids="halves"), "sinusoids='halves' does not fit positions='learned'"),
        (dict(positions="t5_relative", relative_buckets=32, relative_max_distance=16), "relative_max_distance=16"),
        (dict(rope_scaling=LLAMA3), "rope_scaling='llama3' does not fit positions='sinusoidal'"),
        (dict(token_types=2), "token_types=2 does not fit architecture='encoder-decoder'"),
        (dict(embedding_width=16), "embedding_width=16 does not fit architecture='encoder-decoder'"),
        (dict(share_layers=True), "share_layers=True does not fit architecture='encoder-decoder'"),
        (dict(module_heads=HEADS, positions="alibi"), "module_heads does not fit positions='alibi'"),
        (dict(module_heads=HEADS, positions="t5_relative"), "module_heads does not fit positions='t5_relative'"),
        (
            dict(module_heads={**HEADS, "decoder_self": []}, architecture="encoder", decoder_layers=0),
            "module_heads does not fit architecture='encoder'",
        ),
    ],
)
def test_config_names_the_wrong_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        preset("tiny", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(encoder_self=[4]), r"module_heads\.encoder_self=\[4\] must have 2 numbers \(encoder_layers\)"),
        (dict(decoder_self=[4, 5]), r"module_heads\.decoder_self=\[4, 5\] .* each from 1 to num_heads=4"),
        (dict(decoder_cross=[0, 1]), r"module_heads\.decoder_cross=\[0, 1\] .* each from 1 to num_heads=4"),
        (dict(decoder_cross=None), r"module_heads\.decoder_cross"),
        (dict(positions=[1, 1]), r"module_heads\.positions"),
    ],
)
def test_heads_of_modules_fit_layers_and_num_heads(changes: dict[str, object], message: str) -> None:
    assert preset("tiny", module_heads=HEADS).cache_heads == 3
    with pytest.raises(ValidationError, match=message):
        preset("tiny", module_heads={**HEADS, **changes})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (dict(kind="yarn", factor=2.0), r"rope_scaling\n.*'yarn'.*'linear', 'llama3'"),
        (dict(kind="linear"), SCALING + r"linear\.factor\n.*required"),
        (dict(kind="linear", factor=0.5), SCALING + r"linear\.factor\n.*greater than or equal to 1"),
        (dict(kind="linear", factor=float("inf")), SCALING + r"linear\.factor\n.*less than or equal to 65536"),
        (dict(kind="linear", factor="2"), SCALING + r"linear\.factor\n.*valid number"),
        (dict(kind="linear", factor=2.0, low_freq_factor=1.0), SCALING + r"linear\.low_freq_factor\n"),
        (LLAMA3 | dict(low_freq_factor=0.0), SCALING + r"llama3\.low_freq_factor\n.*greater than 0"),
        (LLAMA3 | dict(high_freq_factor=1.0), r"high_freq_factor=1\.0 must be above low_freq_factor=1\.0"),
        (
            LLAMA3 | dict(original_max_position_embeddings=0),
            SCALING + r"llama3\.original_max_position_embeddings\n.*greater than or equal to 1",
        ),
    ],
)
def test_scaling_of_rotary_positions_names_the_wrong_field(scaling: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        preset("tiny", positions="rope", rope_scaling=scaling)


def test_relative_distances_may_just_exceed_the_exact_buckets() -> None:
    """At or below half of the buckets, the logarithm for the others is at most 0, so none of them would exist."""
    preset("tiny", positions="t5_relative", relative_buckets=32, relative_max_distance=17)


def test_configurations_without_heads_of_modules_are_written_as_before() -> None:
    assert "module_heads" not in preset("tiny").model_dump(mode="json", exclude_none=True)
    assert preset("tiny").cache_heads == preset("tiny").num_heads


def test_unknown_preset_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"preset='huge'.*base, big, nllb, tiny"):
        preset("huge")


@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_encoder_only_and_decoder_only_models_are_valid(architecture: str) -> None:
    other = {"encoder": "decoder_layers", "decoder": "encoder_layers"}[architecture]
    model = Transformer(preset("tiny", architecture=architecture, **{other: 0})).eval()
    ids = torch.arange(4, 10)[None]
    hidden = model.encode(ids) if architecture == "encoder" else model.decode(ids, None)
    assert hidden.shape == (1, 6, 32)
    with pytest.raises(ValueError, match="has no"):
        model.decode(ids, None) if architecture == "encoder" else model.encode(ids)
    if architecture == "encoder":
        with pytest.raises(ValueError, match="has no output projection"):
            model.logits(hidden)


def test_decoder_only_model_is_causal() -> None:
    model = Transformer(preset("tiny", architecture="decoder", encoder_layers=0)).eval()
    ids = torch.arange(4, 12)[None]
    changed = ids.clone()
    changed[0, 5] = 50
    before, after = model.decode(ids, None), model.decode(changed, None)
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=0, rtol=0)
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_config_is_equal_after_a_round_trip_through_json() -> None:
    config = preset("base", positions="rope", attention_scale=0.5, rope_scaling=LLAMA3)
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


def test_tied_head_needs_the_width_of_the_embeddings() -> None:
    encoder = dict(architecture="encoder", decoder_layers=0, embedding_width=16)
    head = dict(task="fill_mask", tied=True)
    preset("tiny", **encoder, heads=[{**head, "transform_width": 16}])
    with pytest.raises(ValidationError, match=r"fill_mask is tied to embeddings of width 16, .* has width 32"):
        preset("tiny", **encoder, heads=[head])


def test_head_for_embed_needs_the_width_of_the_declared_poolings() -> None:
    encoder = dict(architecture="encoder", decoder_layers=0, embedding=dict(poolings=("cls", "mean")))
    head = dict(task="embed", transform_width=16)
    preset("tiny", **encoder, heads=[{**head, "input_width": 64}])
    for wrong in (encoder | dict(heads=[head]), encoder | dict(embedding=None, heads=[{**head, "input_width": 64}])):
        with pytest.raises(ValidationError, match=r"embed reads .* numbers, which is not the width of embedding"):
            preset("tiny", **wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_share_scale_and_gradient(p: float, dtype: torch.dtype) -> None:
    dropout = Dropout(p)
    x = torch.ones(400, 257, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    y = dropout(x)
    rounded = round(256 * p) / 256
    is_dropped = y == 0
    assert is_dropped.double().mean() == pytest.approx(rounded, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert abs(rounded - p) <= 1 / 512
    torch.testing.assert_close(
        y[~is_dropped].float(), torch.full([int((~is_dropped).sum())], 1 / (1 - rounded)), rtol=4e-3, atol=0
    )
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)  # the gradient has the same elements and the same scale


def test_elements_are_independent() -> None:
    torch.manual_seed(4)
    dropped = (Dropout(0.25)(torch.ones(20_000, 16)) == 0).double()
    correlations = torch.corrcoef(dropped.T) - torch.eye(16)
    assert correlations.abs().max() < 5 / 20_000**0.5


def test_seed_decides_the_elements() -> None:
    x = torch.ones(30, 30)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(Dropout(0.3)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_nothing_changes_outside_training() -> None:
    x = torch.ones(5, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
