"""Stop strings: found in an output's text as its tokens arrive, across token borders, and never sent in part.

The first completed match counts; among matches that complete at the same character, the longest. Only generated text
is searched, not the target prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from antiphon.controls.table import MAX_STOP_STRING_LEN, MAX_STOP_STRINGS
from antiphon.domain.errors import InvalidArgument
from antiphon.text.tokenizer import IncrementalDecoder


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raise InvalidArgument if there are too many stop strings, or one is empty or too long."""
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidArgument("stop_strings", f"{len(stops)} entries long", f"at most {MAX_STOP_STRINGS} entries long")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_STRING_LEN:
            raise InvalidArgument("stop_strings", stop, f"of 1 to {MAX_STOP_STRING_LEN} characters each")


class StopScanner:
    """Reads characters one by one. For each stop string, counts the first characters of it with which the text ends.

    The algorithm of Knuth, Morris and Pratt 1977 does constant work per character on average, for any strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)

    def push(self, char: str) -> int:
        """Read a character. Return the length of the longest stop string that it completes, 0 if it completes none."""
        completed = 0
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                completed = max(completed, matched)
                matched = borders[matched - 1]
            self._matched[index] = matched
        return completed

    @property
    def num_matched(self) -> int:
        """Number of characters at the end of the text that can be the beginning of a stop string."""
        return max(self._matched, default=0)


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of a string, the length of the longest shorter prefix that it also ends with."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders


class TokenStopMatcher:
    """Finds the token of one output at which a stop string completes, for the engine."""

    def __init__(self, stops: Sequence[str], decoder: IncrementalDecoder) -> None:
        self._scanner = StopScanner(stops)
        self._decoder = decoder
        self._is_complete = False

    def push(self, token_id: int) -> bool:
        """Read a token. Return True once the text so far has completed a stop string."""
        for char in self._decoder.push((token_id,)):
            self._is_complete = self._scanner.push(char) > 0 or self._is_complete
        return self._is_complete


class StopFilter:
    """Text of one output for its client, without stop strings and without text that can still become one."""

    def __init__(self, stops: Sequence[str], decoder: IncrementalDecoder) -> None:
        self._scanner = StopScanner(stops) if stops else None
        self._decoder = decoder
        self._held = ""
        self._is_complete = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that cannot become a stop string any more; none once a stop string has completed."""
        return self._without_stop_strings(self._decoder.push(token_ids))

    def finish(self) -> str:
        """Return the text held back until the end; none if a stop string has completed, or completes now."""
        rest = self._without_stop_strings(self._decoder.finish())
        return rest if self._is_complete else rest + self._held

    def _without_stop_strings(self, text: str) -> str:
        if self._scanner is None:
            return text
        if self._is_complete:
            return ""
        window = self._held + text
        for index, char in enumerate(text, len(self._held) + 1):
            if length := self._scanner.push(char):
                self._is_complete = True
                return window[: index - length]
        kept = len(window) - self._scanner.num_matched
        self._held = window[kept:]
        return window[:kept]
