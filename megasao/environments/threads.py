"""Calls into code that may hang, in a thread that nobody has to wait for.

Invariants:
- calls run one after the other, each with the caller waiting for it as long as the caller likes;
- a call that hangs keeps neither the event loop nor the end of the process waiting (the thread is a daemon).
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

MOST_HUNG = 8
"""Calls that may hang in a process before its owner makes no further ones."""

Result = TypeVar("Result")
_Call = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class CallingThread:
    """One daemon thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._unfinished = 0
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended yet."""
        return self._unfinished > 0

    async def run(self, call: Callable[[], Result]) -> Result:
        """What ``call`` returns or raises. If the wait is cancelled the call goes on, and later ones wait behind it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._unfinished += 1
        self._calls.put((call, loop, future))
        return await future

    def end(self) -> None:
        """The thread ends after the calls that it has."""
        self._calls.put(None)

    def _work(self) -> None:
        while (found := self._calls.get()) is not None:
            call, loop, future = found
            result, error = None, None
            try:
                result = call()
            except Exception as raised:  # handed on to whoever waits
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._settle, future, result, error)

    def _settle(self, future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
        self._unfinished -= 1
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
