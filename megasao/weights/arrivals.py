"""Buckets that arrive through a process group: a thread of their own receives them, and the one that checks them
notices at once when a rank is gone.

A wait in gloo cannot be ended from outside, and one for a bucket of which a part has come does not see that its sender
died. So the thread that checks waits for the receiving one and for the ranks' connections together. Invariants,
asserted by the tests:
- a rank that dies in the middle of a bucket is noticed at once;
- the receiving thread ends with the last bucket, or by its bound, and leaves no descriptor behind.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from megasao.weights.groups import Group, finish, under_way
from megasao.weights.intake import Stage


@dataclass(frozen=True)
class Bucket:
    """One that is to come: from ``member`` of the group, its number in that rank's share, and its ``place``."""

    member: int
    number: int
    place: np.ndarray


class Arrivals:
    """The ``buckets``, in their order, through the group of ``stage``.

    Use as a context; :meth:`take` once for each bucket.
    """

    def __init__(self, stage: Stage, buckets: Sequence[Bucket], *, ahead: int, seconds: float) -> None:
        """``ahead``: buckets that may be on their way at once; ``seconds`` bounds all of it."""
        assert stage.group is not None, "somebody must have something to send"
        self._group: Group | None = stage.group
        self._buckets, self._ahead, self._deadline = buckets, ahead, time.monotonic() + seconds
        self._came, self._come = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._came, select.POLLIN)
        self._ranks = {link.connection.fileno(): number for number, link in enumerate(stage.links)}
        for rank in self._ranks:
            self._poll.register(rank, select.POLLIN)
        self._problem, self._left = "its thread ended", False
        self._thread = threading.Thread(target=self._run, name="weight-group", daemon=True)

    def __enter__(self) -> "Arrivals":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The thread ends when it is out of gloo; after the last bucket that is now."""
        self._left = True
        os.close(self._came)

    def take(self) -> int | None:
        """Wait for the next bucket; None once it is here, or which of the ranks has ended its connection.

        ConnectionError if it cannot come, TimeoutError if it does not.
        """
        ready = {fd for fd, _ in self._poll.poll(max(self._deadline - time.monotonic(), 0) * 1000)}
        if self._came in ready:
            if os.read(self._came, 1):
                return None
            raise ConnectionError(self._problem)
        if not ready:
            raise TimeoutError("nothing arrived in time")
        return min(self._ranks[fd] for fd in ready)

    def join(self) -> None:
        """All buckets are here, and the thread does nothing any more."""
        self._thread.join()

    def _run(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        try:
            self._receive(group)
        except ConnectionError as error:
            self._problem = str(error)
        finally:
            del group  # before anybody is told: the ranks are not kept waiting
            os.close(self._come)

    def _receive(self, group: Group) -> None:
        with under_way() as works:
            for bucket in self._buckets:
                try:
                    works.append(group.receive(torch.from_numpy(bucket.place), bucket.member, bucket.number))
                except ConnectionError:
                    self._finish_all(works)  # so that it is this bucket that is waited for
                    raise
                if len(works) == self._ahead:
                    self._finish_one(works)
            self._finish_all(works)

    def _finish_all(self, works: deque[torch.distributed.Work]) -> None:
        while works:
            self._finish_one(works)

    def _finish_one(self, works: deque[torch.distributed.Work]) -> None:
        if self._left:
            raise ConnectionError("given up")
        finish(works.popleft(), self._deadline - time.monotonic())
        with suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(self._come, b".")
