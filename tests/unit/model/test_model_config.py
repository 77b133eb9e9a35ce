from typing import get_args

import pytest
import torch
import transformers
from pydantic import ValidationError

from antiphon.architecture.config import Activation, ModelConfig, preset
from antiphon.architecture.heads import HeadActivation
from antiphon.ops.activations import ACTIVATIONS
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
def test_preset_of_bert_has_the_published_number_of_parameters(
    name: str, published: int, fields: dict[str, int]
) -> None:
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 3),
        ("num_heads", 5),
        ("encoder_layers", 0),
        ("decoder_layers", 0),
        ("norm", "batchnorm"),
        ("dropout", 1.0),
        ("eos_id", 96),
        ("attention_scale", 0),
        ("positions_offset", -1),
        ("no_such_field", 1),
    ],
)
def test_config_names_the_wrong_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        preset("tiny", **{field: value})
    assert field in str(error.value)


def test_rope_needs_an_even_head_width() -> None:
    with pytest.raises(ValidationError, match="head_dim=7"):
        preset("tiny", positions="rope", head_dim=7)


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
    heads: dict[str, object] = dict(encoder_self=[4, 2], decoder_self=[1, 3], decoder_cross=[1, 2])
    assert preset("tiny", module_heads=heads).cache_heads == 3
    with pytest.raises(ValidationError, match=message):
        preset("tiny", module_heads={**heads, **changes})


@pytest.mark.parametrize("positions", ["alibi", "t5_relative"])
def test_heads_of_modules_need_positions_without_a_bias_by_head(positions: str) -> None:
    heads = dict(encoder_self=[4, 2], decoder_self=[1, 3], decoder_cross=[1, 2])
    with pytest.raises(ValidationError, match=f"module_heads does not fit positions='{positions}'"):
        preset("tiny", module_heads=heads, positions=positions)


def test_heads_of_modules_need_an_encoder_and_a_decoder() -> None:
    heads = dict(encoder_self=[4, 2], decoder_self=[], decoder_cross=[])
    with pytest.raises(ValidationError, match="module_heads does not fit architecture='encoder'"):
        preset("tiny", module_heads=heads, architecture="encoder", decoder_layers=0)


def test_configurations_without_heads_of_modules_are_written_as_before() -> None:
    assert "module_heads" not in preset("tiny").model_dump(mode="json", exclude_none=True)
    assert preset("tiny").cache_heads == preset("tiny").num_heads


def test_relative_distances_must_exceed_the_exact_buckets() -> None:
    """At or below half of the buckets, the logarithm for the others is at most 0, so none of them would exist."""
    preset("tiny", positions="t5_relative", relative_buckets=32, relative_max_distance=17)
    with pytest.raises(ValidationError, match="relative_max_distance=16"):
        preset("tiny", positions="t5_relative", relative_buckets=32, relative_max_distance=16)


def test_settings_of_position_tables_need_a_table() -> None:
    with pytest.raises(ValidationError, match="positions_offset=2 does not fit positions='rope'"):
        preset("tiny", positions="rope", positions_offset=2)
    with pytest.raises(ValidationError, match="sinusoids='halves' does not fit positions='learned'"):
        preset("tiny", positions="learned", sinusoids="halves")


LLAMA3 = dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (dict(kind="yarn", factor=2.0), r"rope_scaling\n.*'yarn'.*'linear', 'llama3'"),
        (dict(kind="linear"), r"rope_scaling\.linear\.factor\n.*required"),
        (dict(kind="linear", factor=0.5), r"rope_scaling\.linear\.factor\n.*greater than or equal to 1"),
        (dict(kind="linear", factor=float("inf")), r"rope_scaling\.linear\.factor\n.*less than or equal to 65536"),
        (dict(kind="linear", factor="2"), r"rope_scaling\.linear\.factor\n.*valid number"),
        (dict(kind="linear", factor=2.0, low_freq_factor=1.0), r"rope_scaling\.linear\.low_freq_factor\n"),
        ({**LLAMA3, "low_freq_factor": 0.0}, r"rope_scaling\.llama3\.low_freq_factor\n.*greater than 0"),
        ({**LLAMA3, "high_freq_factor": 1.0}, r"high_freq_factor=1\.0 must be above low_freq_factor=1\.0"),
        (
            {**LLAMA3, "original_max_position_embeddings": 0},
            r"rope_scaling\.llama3\.original_max_position_embeddings\n.*greater than or equal to 1",
        ),
    ],
)
def test_scaling_of_rotary_positions_names_the_wrong_field(scaling: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        preset("tiny", positions="rope", rope_scaling=scaling)


def test_scaling_needs_rotary_positions() -> None:
    with pytest.raises(ValidationError, match="rope_scaling='llama3' does not fit positions='sinusoidal'"):
        preset("tiny", rope_scaling=LLAMA3)


def test_unknown_preset_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"preset='huge'.*base, big, tiny"):
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


def test_options_of_encoders_are_refused_in_other_architectures() -> None:
    for name, value in dict(token_types=2, embedding_width=16, share_layers=True).items():
        with pytest.raises(ValidationError, match=f"{name}={value} does not fit architecture='encoder-decoder'"):
            preset("tiny", **{name: value})


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
