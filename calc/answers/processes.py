"""Child processes, for long computations."""

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
    """Child processes that start in this context leave Ctrl-C to this one: they inherit the blocked signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Pool(ProcessPoolExecutor):
    """Processes that leave Ctrl-C to their parent, and end with it, however it ends."""

    def __init__(self, count: int | None = None, initializer: Callable[[], None] | None = None) -> None:
        """With as many processes as there are cores, or `count`."""
        super().__init__(count, mp_context=get_context("spawn"), initializer=partial(_begin, initializer))

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Also starts a process, as long as more are needed."""
        with unheard():
            return super().submit(work, *args, **kwargs)


def _begin(initializer: Callable[[], None] | None) -> None:
    """Begins a new process by watching its parent: otherwise it would wait for ever for work from a killed one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer:
        initializer()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
