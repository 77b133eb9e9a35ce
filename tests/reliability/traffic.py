"""Mixed traffic of the endurance run. Each answer is compared with its reference."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from antiphon.client import AsyncClient, Options, ServerError
from tests.reliability.asking import NUM_KINDS, SENTENCES, Heard, Texts, ask, streamed, whole

# Statuses that a valid call can get.
OVERLOAD = {grpc.StatusCode.RESOURCE_EXHAUSTED}


@dataclass(kw_only=True, slots=True)
class Tally:
    """Results of the calls so far: counts by kind and outcome, and the first few errors in words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, kind: str, outcome: str) -> None:
        self.outcomes[f"{kind}:{outcome}"] += 1

    def blame(self, kind: str, complaint: str) -> None:
        self.count(kind, "wrong")
        if len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {complaint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Makes random calls. expected: answer to each kind of request. client: connected to target."""

    target: str
    client: AsyncClient
    expected: dict[int, Texts]
    tally: Tally
    rng: random.Random

    async def one(self) -> None:
        """Make one call of any kind and count its outcome. Raises nothing."""
        kind = self.rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        number = self.rng.randrange(NUM_KINDS)
        try:
            self.tally.count(kind, await _KINDS[kind](self, number))
        except AssertionError as error:
            self.tally.blame(kind, str(error))
        except ServerError as error:
            if error.code in OVERLOAD:
                self.tally.count(kind, error.code.name)
            else:
                self.tally.blame(kind, f"{error.code}: {error}")

    async def stream(self, number: int) -> str:
        self._compare(number, await streamed(self.client, number))
        return "ok"

    async def unary(self, number: int) -> str:
        self._compare(number, await whole(self.client, number))
        return "ok"

    async def score(self, number: int) -> str:
        source, target = ask(number).text, self.expected[number][0]
        first, again = [await self.client.score(source, target) for _ in range(2)]
        assert first.logprobs == again.logprobs, f"{number} was scored differently"
        return "ok"

    async def embed(self, number: int) -> str:
        first, again = [await self.client.embed(ask(number).text, normalize=True) for _ in range(2)]
        assert first.vector == again.vector, f"{number} was embedded differently"
        return "ok"

    async def explain(self, number: int) -> str:
        maps = await self.client.explain(SENTENCES[number % len(SENTENCES)], self.expected[number][0][:20])
        assert len(maps.cross) > 0, f"{number} has no maps"
        return "ok"

    async def next_token(self, number: int) -> str:
        first, again = [await self.client.next_token(ask(number).text) for _ in range(2)]
        assert first == again, f"{number} has another next token"
        return "ok"

    async def cancel(self, number: int) -> str:
        """Cancel a stream after its first message, or before."""
        heard, first = Heard(defaultdict(str)), asyncio.Event()
        task = asyncio.ensure_future(streamed(self.client, number, heard=heard, first=first))
        leave = asyncio.ensure_future(first.wait()) if number % 2 else asyncio.ensure_future(asyncio.sleep(0))
        await asyncio.wait({task, leave}, return_when=asyncio.FIRST_COMPLETED)
        leave.cancel()
        task.cancel()
        await asyncio.wait({task})
        assert heard.is_beginning_of(self.expected[number]), f"{number} began {heard.texts}"
        return "left" if task.cancelled() else "ok"

    async def deadline(self, number: int) -> str:
        try:
            self._compare(number, await whole(self.client, number, timeout_s=0.002 + 0.03 * self.rng.random()))
        except ServerError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return "expired"
        return "ok"

    async def refused(self, number: int) -> str:
        bad = [("", Options()), ("wort " * 3000, Options()), ("a", Options(top_p=2.0)), ("a", Options(beam_width=99))]
        text, options = bad[number % len(bad)]
        try:
            await self.client.generate_outputs(text, options)
        except ServerError as error:
            if error.code is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            return "refused"
        raise AssertionError(f"bad input {number} was answered")

    async def reconnect(self, number: int) -> str:
        async with AsyncClient(self.target) as client:
            self._compare(number, await whole(client, number))
        return "ok"

    def _compare(self, number: int, found: Texts) -> None:
        assert found == self.expected[number], f"{number} was answered {found}, not {self.expected[number]}"


async def warm_up(traffic: Traffic) -> None:
    """Make many concurrent calls of every kind, after which all permanent threads of the server exist."""
    await asyncio.gather(*(_KINDS[kind](traffic, number) for kind in _SHARES for number in range(16)))


_SHARES = {
    "unary": 30, "stream": 30, "score": 8, "embed": 8, "explain": 1, "next_token": 1, "cancel": 10, "deadline": 5,
    "refused": 4, "reconnect": 4,
}  # fmt: skip
_KINDS: dict[str, Callable[[Traffic, int], Awaitable[str]]] = {name: getattr(Traffic, name) for name in _SHARES}
