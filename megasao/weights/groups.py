"""Process groups of gloo that carry weights: one for each pipeline stage and receiver.

Members are the stage's ranks that have bytes to give, from 1 on, and the receiver, 0. Nobody else is in a group, so it
can be made alone at any time, and what ends it ends only this receiver's transfer of this stage. Members are connected
when they first exchange something: ranks with the receiver, never with one another. Invariants, asserted by the tests:
- every wait is bounded;
- a name is used for one group only;
- an address of another form than one's own is refused: gloo would read beyond it, and end the process;
- a group leaves no thread and no descriptor behind.
"""

import re
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, Work

RECEIVER = 0
"""The receiver's rank in each of its groups."""
AHEAD = 2
"""Buckets of one rank that are under way at once: one travels while the other's checksum is compared."""
MOST_CALL_BYTES = 4096
GO = b"+"
"""From a receiver: it knows what will come, and waits for it."""
_AT_ONCE_S = 0.001
_MOST_MEMBERS = 2**16
_Gloo: Any = ProcessGroupGloo  # torch's type stubs lack its methods
_LENGTH = struct.Struct("@N")
"""As gloo writes one, which is for machines of one kind."""
_SOURCE = re.compile(r"^\[[^\]]*\]\s*")


class GroupCall(msgspec.Struct, frozen=True):
    """What a receiver asks a rank to join: the group ``name``, as its member ``rank`` of ``size``. ``address``: of the
    receiver, as gloo writes it. Without a name there is none to join: the rank has no bytes to give."""

    name: str
    rank: int
    size: int
    address: bytes


NO_GROUP = GroupCall("", RECEIVER, 1, b"")


def check_call(call: GroupCall) -> None:
    """ValueError saying what is wrong with a call that arrived."""
    if not RECEIVER < call.rank < call.size <= _MOST_MEMBERS:
        raise ValueError(f"member {call.rank} of a group of {call.size}")


class Group:
    """One process group, from the side of one member. Any error ends it.

    There is no store that members share: each hands its ``address`` to those that it exchanges something with.
    """

    def __init__(self, name: str, rank: int, size: int, own_host: str, timeout_s: float) -> None:
        """``own_host``: the address of this machine at which the others reach it; ``timeout_s`` bounds every
        wait; gloo itself makes it five times that for a member that does not connect. ConnectionError if it cannot."""
        self.name, self.size = name, size
        limit = timedelta(seconds=timeout_s)
        with _told():
            options = _Gloo._Options()
            options._timeout, options._threads = limit, 1
            options._devices = [_Gloo.create_device(hostname=own_host, lazy_init=True)]
            self._addresses: Any = HashStore()
            self._addresses.set_timeout(limit)
            self._group = _Gloo(PrefixStore(name, self._addresses), rank, size, options)
            (key,) = self._addresses.list_keys()
            self.address: bytes = self._addresses.get(key)
        self._path = key.removesuffix(str(rank))

    def meet(self, member: int, address: bytes) -> None:
        """Before anything is exchanged with ``member``: its address. ValueError if that is none."""
        if _form(address) != _form(self.address):
            raise ValueError(
                f"member {member} gives {len(address)} bytes that are no address of gloo's as here; do both sides have "
                "the same torch?"
            )
        self._addresses.set(f"{self._path}{member}", address)

    def send(self, bucket: Tensor, tag: int) -> Work:
        """To the receiver; ``bucket``, uint8 [n], must not change before :func:`finish`. ConnectionError."""
        with _told():
            work: Work = self._group.send([bucket], RECEIVER, tag)
            return work

    def receive(self, place: Tensor, member: int, tag: int) -> Work:
        """Into ``place``, uint8 [n], what ``member`` sends under ``tag``: exactly n bytes, since gloo ends the process
        where more arrive. ConnectionError."""
        with _told():
            work: Work = self._group.recv([place], member, tag)
            return work


def _form(address: bytes) -> int | None:
    """How long what gloo has written behind the host's name is, which is the same everywhere; None if it is not whole.

    Length of the name, the name, length of the rest, the rest.
    """
    if len(address) < 2 * _LENGTH.size:
        return None
    (name,) = _LENGTH.unpack_from(address)
    at = _LENGTH.size + name
    if at + _LENGTH.size > len(address):
        return None
    (rest,) = _LENGTH.unpack_from(address, at)
    return int(rest) if at + _LENGTH.size + rest == len(address) else None


def finish(work: Work, seconds: float | None = None) -> None:
    """Wait for it, at most ``seconds`` or the bound of its group. ConnectionError if it failed; the group is over."""
    with _told():
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(seconds, _AT_ONCE_S)))


@contextmanager
def under_way() -> Iterator[deque[Work]]:
    """For what is being sent or received: on an error the rest is ended, and the group with it.

    What is only forgotten is not: gloo's thread would turn in circles, and the group could never be left.
    """
    works: deque[Work] = deque()
    try:
        yield works
    finally:
        for work in works:
            with suppress(ConnectionError):
                finish(work, _AT_ONCE_S)


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong in torch is a ConnectionError, in one line."""
    try:
        yield
    except RuntimeError as error:
        first = _SOURCE.sub("", str(error).partition("\n")[0])
        raise ConnectionError(first.partition(". This is typically")[0]) from error
