"""Languages and templates of a served model: positions of the codes, and refusals."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from antiphon.cli import main as cli
from antiphon.client import AsyncClient
from antiphon.text.format import TextFormat
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import BOS_ID, EOS_ID, FakeRunner
from tests.serving import SOURCE, Serving, details_of, refusal, serving, stub_of, tiny_tokenizer

EN, DE, FR = 270, 271, 272
FIRST = TextFormat(
    special_ids=(0, 1, 2, 3, EN, DE, FR),
    template=("$source_language", "$text", EOS_ID),
    languages={"en": EN, "de": DE, "fr": FR},
    default_source_language="en",
    target_language_place="first",
)
BEGIN = FIRST.model_copy(
    update=dict(
        template=("$text", EOS_ID, "$source_language"), target_language_place="begin", default_target_language="de"
    )
)
IN_SOURCE = FIRST.model_copy(
    update=dict(template=("$target_language", "$text", EOS_ID), target_language_place=None)
)  # Marian's >>fra<<


def request(ids: Sequence[int] = SOURCE, *, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    given = fields if "text" in fields else {"token_ids": pb.TokenIds(ids=ids), **fields}
    return pb.GenerateUnaryRequest(options=pb.GenerateOptions(**(options or {})), **given)


async def encoded(served: Serving, message: Any) -> tuple[int, ...]:
    """Return the source that the model received."""
    await stub_of(served).GenerateUnary(message)
    return served.runner.encoded[-1][0]


async def test_source_gets_the_tokens_of_its_default_or_named_languages() -> None:
    async with serving(text=FIRST) as served:
        text = tuple(tiny_tokenizer().encode("the cat"))
        assert await encoded(served, request()) == (EN, *SOURCE, EOS_ID)
        assert await encoded(served, request(source_language="de")) == (DE, *SOURCE, EOS_ID)
        assert await encoded(served, request(text="the cat", source_language="fr")) == (FR, *text, EOS_ID)


async def test_template_is_not_added_twice_to_ids_that_already_contain_it() -> None:
    async with serving(text=FIRST) as served:
        for ids in (SOURCE, (*SOURCE, EOS_ID), (EN, *SOURCE), (EN, *SOURCE, EOS_ID)):
            assert await encoded(served, request(ids)) == (EN, *SOURCE, EOS_ID)
        # A language other than the request's is an ordinary token.
        assert await encoded(served, request((DE, *SOURCE))) == (EN, DE, *SOURCE, EOS_ID)
        assert await encoded(served, request((DE, *SOURCE), source_language="de")) == (DE, *SOURCE, EOS_ID)


async def test_target_language_is_the_first_token_of_the_target() -> None:
    async with serving(text=FIRST) as served:
        stub = stub_of(served)
        output = (await stub.GenerateUnary(request(target_language="fr"))).outputs[0]
        free = (await stub.GenerateUnary(request())).outputs[0]
        assert output.token_ids[0] == FR != free.token_ids[0]
        assert output.token_ids[1:] == free.token_ids[1:]  # the output of the fake model depends only on positions


async def test_target_language_is_placed_before_a_prefix() -> None:
    async with serving(text=FIRST) as served:
        stub = stub_of(served)
        prefix = pb.TokenIds(ids=[30, 31])
        with_it = pb.TokenIds(ids=[FR, 30, 31])
        named = await stub.GenerateUnary(request(target_language="fr", options=dict(prefix_ids=prefix)))
        given = await stub.GenerateUnary(request(target_language="fr", options=dict(prefix_ids=with_it)))
        bare = await stub.GenerateUnary(request(options=dict(prefix_ids=with_it)))
    assert named.outputs == given.outputs == bare.outputs
    assert FR not in named.outputs[0].token_ids


async def test_score_includes_the_target_language_as_the_first_token() -> None:
    async with serving(text=FIRST) as served:
        stub, source = stub_of(served), pb.TokenIds(ids=SOURCE)
        target, with_it = pb.TokenIds(ids=[30, 31]), pb.TokenIds(ids=[FR, 30, 31])
        named = await stub.Score(pb.ScoreRequest(token_ids=source, target_token_ids=target, target_language="fr"))
        given = await stub.Score(pb.ScoreRequest(token_ids=source, target_token_ids=with_it))
    assert [entry.token_id for entry in named.logprobs] == [FR, 30, 31, EOS_ID]
    assert named.score == given.score


@pytest.mark.parametrize(("code", "expected"), [("", DE), ("fr", FR)])
async def test_target_language_is_the_begin_token(code: str, expected: int) -> None:
    """The fake model refuses any other first token."""

    def begin(runner: FakeRunner) -> None:
        runner.begin_id = expected

    async with serving(text=BEGIN, prepare=begin) as served:
        stub = stub_of(served)
        answer = await stub.GenerateUnary(request(target_language=code))
        assert served.runner.encoded[-1][0] == (*SOURCE, EOS_ID, EN)
        await stub.Score(
            pb.ScoreRequest(
                token_ids=pb.TokenIds(ids=SOURCE), target_token_ids=pb.TokenIds(ids=[30]), target_language=code
            )
        )
    assert expected not in answer.outputs[0].token_ids


async def test_target_language_in_the_source_is_optional() -> None:
    async with serving(text=IN_SOURCE) as served:
        assert await encoded(served, request(target_language="fr")) == (FR, *SOURCE, EOS_ID)
        assert await encoded(served, request()) == (*SOURCE, EOS_ID)


@pytest.mark.parametrize(
    ("text", "fields", "field", "allowed"),
    [
        (FIRST, dict(source_language="xx"), "source_language", "one of de, en, fr"),
        (FIRST, dict(target_language="EN"), "target_language", "one of de, en, fr"),
        (BEGIN, dict(target_language="xx"), "target_language", "one of de, en, fr"),
        (IN_SOURCE, dict(source_language="en"), "source_language", "takes none"),
        (None, dict(source_language="en"), "source_language", "takes none"),
        (None, dict(target_language="en"), "target_language", "takes none"),
        (FIRST, dict(target_language="fr", options=dict(forced_first_id=DE)), "target_language", "forced_first_id"),
        (FIRST, dict(target_language="fr", options=dict(suppressed_ids=[FR])), "target_language", "suppressed_ids"),
    ],
)
async def test_invalid_languages_are_refused(
    text: TextFormat | None, fields: dict[str, Any], field: str, allowed: str
) -> None:
    async with serving(text=text) as served:
        error = await refusal(stub_of(served).GenerateUnary(request(**fields)))
    assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert allowed in str(error.details())


async def test_forced_first_id_replaces_a_default_language() -> None:
    async with serving(text=FIRST.model_copy(update=dict(default_target_language="fr"))) as served:
        stub = stub_of(served)
        forced = await stub.GenerateUnary(request(options=dict(forced_first_id=DE)))
        default = await stub.GenerateUnary(request())
    assert (forced.outputs[0].token_ids[0], default.outputs[0].token_ids[0]) == (DE, FR)


async def test_embedded_source_has_its_language() -> None:
    async with serving(text=FIRST) as served:
        message = pb.EmbedRequest(token_ids=pb.TokenIds(ids=SOURCE), source_language="de")
        await stub_of(served).Embed(message)
        assert served.runner.encoded[-1][0] == (DE, *SOURCE, EOS_ID)


async def test_client_sends_its_languages() -> None:
    async with serving(text=FIRST) as served:
        encoded = served.runner.encoded
        async with AsyncClient(served.target, source_language="de", target_language="fr") as client:
            whole = await client.generate_text(SOURCE)
            assert (whole.token_ids[0], encoded[-1][0]) == (FR, (DE, *SOURCE, EOS_ID))
            streamed = [token async for delta in client.generate(SOURCE) for token in delta.token_ids]
            assert streamed == list(whole.token_ids)
            assert (await client.score(SOURCE, [30])).logprobs[0].token_id == FR
            await client.embed(SOURCE)
            assert encoded[-1][0] == (DE, *SOURCE, EOS_ID)
            other = client.with_languages("en", "de")
            assert (await other.generate_text(SOURCE)).token_ids[0] == DE
            assert encoded[-1][0] == (EN, *SOURCE, EOS_ID)
            assert (await client.generate_text(SOURCE)).token_ids == whole.token_ids


async def test_generate_command_sends_languages(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(text=FIRST) as served:
        command = ["generate", "--target", served.target, "the cat"]
        named = [*command, "--source-language", "de", "--target-language", "fr"]
        assert await asyncio.to_thread(cli.main, named) == 0
        assert served.runner.encoded[-1][0][0] == DE
        assert await asyncio.to_thread(cli.main, [*command, "--target-language", "xx"]) == 2
    assert "--target-language is 'xx'; it must be one of de, en, fr" in capsys.readouterr().err


async def test_pair_is_encoded_with_the_template_of_pairs() -> None:
    paired = TextFormat(template=(BOS_ID, "$text", EOS_ID), pair_template=(BOS_ID, "$text", EOS_ID, "$pair", EOS_ID))
    first, second = (tuple(tiny_tokenizer().encode(text)) for text in ("the", "cat"))
    async with serving(text=paired) as served:
        await stub_of(served).Embed(pb.EmbedRequest(text="the", text_pair="cat"))
        assert served.runner.encoded[-1][0] == (BOS_ID, *first, EOS_ID, *second, EOS_ID)
        by_ids = pb.EmbedRequest(token_ids=pb.TokenIds(ids=SOURCE), text_pair="cat")
        assert details_of(await refusal(stub_of(served).Embed(by_ids))).field == "text_pair"
    async with serving() as served:
        error = await refusal(stub_of(served).Embed(pb.EmbedRequest(text="the", text_pair="cat")))
    assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, "text_pair")
