"""Processes beside this one, for what takes long."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Any


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Processes that start meanwhile leave Ctrl-C to this one: what is blocked here is blocked in them for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Pool(ProcessPoolExecutor):
    """Processes that leave Ctrl-C to the one that has started them, and end with it, however it ends."""

    def __init__(self, count: int | None = None, initializer: Callable[[], None] | None = None) -> None:
        """As many as there are cores, or `count`."""
        super().__init__(count, mp_context=get_context("spawn"), initializer=partial(_begin, initializer))

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a process, too, as long as more are needed."""
        with unheard():
            return super().submit(work, *args, **kwargs)


def _begin(initializer: Callable[[], None] | None) -> None:
    """In a new process; without the watch it would wait for ever for what a killed one wanted next."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer:
        initializer()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
