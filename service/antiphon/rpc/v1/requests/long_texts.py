"""One thread that tokenises the long texts of all callers and models, with a limit on the bytes that wait for it.

Tokenising a text takes many times its size in memory: 130 to 400 times for most texts, at most 600 times with the
shipped tokenizer, at most 1,105 times over all tokenizers (T5's, for U+FDFA, which becomes 18 characters). So only one
text is tokenised at a time. Callers take turns. For the event loop; knows no tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from antiphon.domain.errors import TooManyTexts
from antiphon.observability.call import current_call

# Bytes of text tokenised in a second by the slowest kind, texts of one-letter words.
_BYTES_PER_S = 700_000

_T = TypeVar("_T")


class LongTexts:
    """Thread for long texts, and the texts that wait for it or are being tokenised.

    max_bytes: limit on the total bytes of these texts; one caller may have half of it.
    """

    def __init__(self, max_bytes: int = 2 << 20) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "long-texts")
        self._is_busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; the next one comes first
        self._held_bytes: Counter[str] = Counter()  # by caller

    @property
    def held_bytes(self) -> int:
        """Bytes of the texts that wait or are being tokenised."""
        return self._held_bytes.total()

    async def run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """Run work on a text of num_bytes bytes in the thread, when it is the caller's turn.

        Raises TooManyTexts at once if too many bytes wait already, and every error of the work.
        """
        call = current_call()
        caller = "" if call is None else call.caller
        self._check_room(caller, num_bytes)
        self._held_bytes[caller] += num_bytes
        try:
            await self._turn(caller)
        except BaseException:
            self._release(caller, num_bytes)
            raise
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(lambda _: self._end(caller, num_bytes))
        try:
            # The thread continues if the caller leaves: the text counts until its work has ended.
            return await asyncio.shield(done)
        finally:
            del done  # breaks a reference cycle: its error references this frame, which references the text

    def _check_room(self, caller: str, num_bytes: int) -> None:
        of_all, of_caller = self.held_bytes, self._held_bytes[caller]
        if of_all + num_bytes > self._max_bytes:
            found, most = f"{of_all} bytes of long texts", self._max_bytes
        elif of_caller + num_bytes > self._max_bytes // 2:
            found, most = f"{of_caller} bytes of this caller's long texts", self._max_bytes // 2
        else:
            return
        message = f"{found} wait to be tokenised; with {num_bytes} more they would be above {most}"
        raise TooManyTexts(message, retry_after_s=of_all / _BYTES_PER_S)

    async def _turn(self, caller: str) -> None:
        """Wait until the thread is free for the caller's next text."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(caller, deque())
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given, but the caller has left
                self._next()
            with contextlib.suppress(ValueError):
                line.remove(turn)
            raise

    def _next(self) -> None:
        """Give the thread to the next caller. Its remaining texts wait behind those of the other callers."""
        while self._waiting:
            caller = next(iter(self._waiting))
            line = self._waiting.pop(caller)
            turn = line.popleft() if line else None
            if line:
                self._waiting[caller] = line
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    def _end(self, caller: str, num_bytes: int) -> None:
        self._release(caller, num_bytes)
        self._next()

    def _release(self, caller: str, num_bytes: int) -> None:
        self._held_bytes[caller] -= num_bytes
        if not self._held_bytes[caller]:
            del self._held_bytes[caller]
