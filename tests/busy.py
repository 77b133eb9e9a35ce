"""Work that keeps a server busy while a test looks at it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeated(work: Callable[[], object], num_threads: int = 2) -> Iterator[None]:
    """Do some work again and again, in threads, while the context lasts."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    threads = [threading.Thread(target=repeat) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
