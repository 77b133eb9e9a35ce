"""Numbered requests of many kinds to the shipped bundle, and their expected answers.

Request n is a pure function of n, so an answer computed alone is the reference for every repetition.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.client import AsyncClient, Options

SENTENCES = [
    "How are you?", "I don't know.", "The weather is nice today.", "Where is the station?", "He has three dogs.",
    "My sister wants to learn German because she likes the language.", "Stop!", "Can you help me with this, please?",
    "We were very tired after the long journey, so we went to bed early.", "Tom isn't here.", "It's raining.",
    "She gave me a book.", "The train leaves at seven.", "They live in a small house by the sea.",
]  # fmt: skip
# These lengths and controls suffice for batches of every composition; more would only cost time for references.
NUM_KINDS = 56
# From this number on, requests are greedy and long, so that very many run at once; there are few kinds of them.
LONG = 1000
NUM_LONG_KINDS = 12
# One in five is long, so that a server still runs for seconds after the test has seen that it admitted the last one.
# Five is odd, so that two servers that get requests in turns share the long ones.
LASTING = tuple(kind if kind % 5 else LONG + kind % NUM_LONG_KINDS for kind in range(NUM_KINDS))

Texts = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request: text and options."""

    text: str
    options: Options


def ask(number: int) -> Ask:
    """Return a request: mostly greedy, some with samples, beams, penalties or stop strings; lengths from 2 to 57."""
    if number >= LONG:
        return _long(number % NUM_LONG_KINDS)
    kind = number % NUM_KINDS
    text = " ".join(SENTENCES[kind % len(SENTENCES) :][: 1 + kind % 3])
    longest = 2 + kind
    if kind % 8 == 1:
        options = Options(max_new_tokens=longest, temperature=1.3, top_k=40, top_p=0.95, seed=kind)
    elif kind % 8 == 3:
        options = Options(max_new_tokens=longest, beam_width=2 + kind % 3, num_return_sequences=2)
    elif kind % 8 == 5:
        options = Options(max_new_tokens=longest, temperature=0.9, num_return_sequences=2, seed=kind)
    elif kind % 8 == 7:
        options = Options(max_new_tokens=longest, repetition_penalty=1.3, stop_strings=["nicht", "e."])
    else:
        options = Options(max_new_tokens=longest)
    return Ask(text=text, options=options)


def _long(kind: int) -> Ask:
    return Ask(text=SENTENCES[kind], options=Options(max_new_tokens=230 + kind, ignore_eos=True))


async def references(client: AsyncClient, numbers: Iterable[int] = range(NUM_KINDS)) -> dict[int, Texts]:
    """Return the answer to each kind of request when it is sent alone."""
    return {number: await whole(client, number) for number in numbers}


async def whole(client: AsyncClient, number: int, *, timeout_s: float | None = None) -> Texts:
    asked = ask(number)
    outputs = await client.generate_outputs(asked.text, asked.options, timeout_s=timeout_s)
    return tuple(output.text for output in outputs)


@dataclass(slots=True)
class Heard:
    """Received part of a stream: text of each output, and the number of messages."""

    texts: defaultdict[int, str]
    messages: int = 0

    @property
    def outputs(self) -> Texts:
        return tuple(self.texts[index] for index in sorted(self.texts))

    def is_beginning_of(self, reference: Texts) -> bool:
        """Return whether each output so far is a prefix of the reference."""
        return all(reference[index].startswith(text) for index, text in self.texts.items())


async def streamed(
    client: AsyncClient, number: int, *, heard: Heard | None = None, first: asyncio.Event | None = None,
    timeout_s: float | None = None,
) -> Texts:  # fmt: skip
    """Return the outputs of a stream. heard: updated with every message. first: set by the first message."""
    heard = Heard(defaultdict(str)) if heard is None else heard
    asked = ask(number)
    async for delta in client.generate(asked.text, asked.options, timeout_s=timeout_s):
        heard.texts[delta.output_index] += delta.text
        heard.messages += 1
        if first is not None:
            first.set()
    return heard.outputs
