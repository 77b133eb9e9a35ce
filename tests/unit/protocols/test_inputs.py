"""Special tokens in a target prefix of ids are refused, except those that the model uses there."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.architecture.config import preset
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import Controls, SamplingParams
from antiphon.rpc.v1.inputs import Inputs, LongTexts
from antiphon.rpc.v1.languages import NO_LANGUAGES
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import byte_bpe_format
from antiphon.v1 import inference_pb2 as pb
from tests.serving import tiny_tokenizer

PAD, BOS, EOS = 0, 1, 2
BOS_IS_A_LANGUAGE = byte_bpe_format(tiny_tokenizer()).model_copy(update=dict(languages={"de": BOS}))


async def prefix_of(ids: tuple[int, ...], text: TextFormat | None = None, **config: Any) -> tuple[int, ...]:
    """Return the prefix of these ids in the form that the model receives."""
    tokenizer = tiny_tokenizer()
    limits = pb.Limits(max_source_len=32, max_target_len=32, max_text_bytes=1024)
    model = preset("tiny", vocab_size=tokenizer.vocab_size, **config)
    inputs = Inputs(tokenizer, text or byte_bpe_format(tokenizer), model, limits, LongTexts())
    return await inputs.prefix_ids(Controls(params=SamplingParams(), prefix_ids=ids), NO_LANGUAGES)


@pytest.mark.parametrize(("token_id", "name"), [(PAD, "padding"), (BOS, "begin"), (EOS, "end")])
async def test_prefix_is_refused_when_it_has_a_token_that_no_target_contains(token_id: int, name: str) -> None:
    for ids in ((token_id,), (token_id, 30), (30, token_id)):
        with pytest.raises(InvalidArgument, match=f"options.prefix_ids is .*the {name} token {token_id}"):
            await prefix_of(ids)


async def test_prefix_can_contain_a_begin_token_that_is_a_language() -> None:
    assert await prefix_of((BOS, 30), BOS_IS_A_LANGUAGE) == (BOS, 30)


async def test_begin_token_that_is_the_end_token_is_called_the_end() -> None:
    with pytest.raises(InvalidArgument, match="the end token 2"):
        await prefix_of((2, 30), bos_id=2)


async def test_prefix_of_a_decoder_only_model_can_contain_every_token_except_the_end() -> None:
    architecture: dict[str, Any] = dict(architecture="decoder", encoder_layers=0)
    assert await prefix_of((30, BOS, PAD), **architecture) == (30, BOS, PAD)
    with pytest.raises(InvalidArgument, match="the end token 2"):
        await prefix_of((30, EOS), **architecture)
