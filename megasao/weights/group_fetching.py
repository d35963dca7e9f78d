"""A receiver takes the shares of all ranks through process groups, one for each pipeline stage.

It makes each group itself, alone, the first time that it wants a version from these ranks, and keeps it, with the
connections over which it asks for the next ones. Invariants, asserted by the tests:
- every size comes from a manifest that is the announced one, before anything is received;
- whatever goes wrong ends the groups that were in use, and the next attempt makes new ones, with new names;
- as without groups: nothing is handed on before all of it is intact, faults are named, and every wait is bounded.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import msgspec
import numpy as np

from megasao.weights.arrivals import Arrivals, Bucket
from megasao.weights.fetching import Fetching
from megasao.weights.groups import AHEAD, GO, MOST_CALL_BYTES, NO_GROUP, RECEIVER, Group, GroupCall
from megasao.weights.incoming import Link, proven
from megasao.weights.intake import Intake, Stage
from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.serving import LENGTH, read_head, receive_into
from megasao.weights.shared import ShareManifest


@dataclass(frozen=True)
class _Lane:
    """A rank of a stage, its number in the group, what it sends, and where that goes."""

    share: Share
    member: int
    manifest: ShareManifest
    buffer: np.ndarray

    def bucket(self, number: int) -> Bucket:
        """One that is to come."""
        return Bucket(self.member, number, self.manifest.bucket(self.buffer, number))

    def about(self, number: int) -> str:
        """Which one it is, for errors."""
        return f"bucket {number} of {len(self.manifest.sums)}: "


class GroupsFetching(Fetching):
    """One attempt."""

    def __init__(self, announce: AnnounceShares, intake: Intake, timeout_s: float) -> None:
        super().__init__(announce, intake, timeout_s)
        self._deadline = time.monotonic() + timeout_s

    def _run(self) -> None:
        shares = sorted(self._announce.shares, key=lambda share: (share.stage, share.rank))
        self._intake.keep_only(share.place for share in shares)
        stages = [list(of) for _, of in groupby(shares, key=lambda share: share.stage)]
        if len(stages) == 1:
            self._fetch_stage(stages[0])
        else:
            self._beside([partial(self._fetch_stage, of) for of in stages])

    def _connected(self, share: Share) -> socket.socket:
        return self._by_network(share)  # which tells us our address in the group

    def _fetch_stage(self, shares: Sequence[Share]) -> None:
        stage = self._intake.take_stage(tuple(share.place for share in shares)) or Stage()
        try:
            sizes = self._asked_again(stage, shares) or self._asked(stage, shares)
            problem = self._problem(stage, shares, sizes)
            if problem is not None:
                raise ValueError(problem)
        except BaseException:
            self._end(stage)
            raise
        with self._lock:
            self._open.difference_update(link.connection for link in stage.links)
        self._intake.keep_stage(stage)

    def _asked_again(self, stage: Stage, shares: Sequence[Share]) -> list[int] | None:
        """Ask over the connections of the version before; how long each manifest is, None if one is closed."""
        if not stage.links:
            return None
        try:
            for link in stage.links:
                self._enter(link.connection)
            for number, link in enumerate(stage.links):
                self._call(link, stage.group, number, shares)
            return [read_head(link.connection)[1] for link in stage.links]
        except ConnectionError:
            self._end(stage)
            return None

    def _asked(self, stage: Stage, shares: Sequence[Share]) -> list[int]:
        """Connect to the ranks, and ask them, in a new group; how long each manifest is."""
        for share in shares:
            with self._named(share):
                stage.links.append(self._opened(share))
        with self._named(shares[0]):
            if any(share.total_bytes for share in shares):
                host = str(stage.links[0].connection.getsockname()[0])
                name = self._intake.group_name(self._announce.epoch, shares[0].stage)
                stage.group = Group(name, RECEIVER, 1 + max(_members(shares)), host, self._timeout_s)
        for number, (share, link) in enumerate(zip(shares, stage.links, strict=True)):
            with self._named(share):
                self._call(link, stage.group, number, shares)
        sizes = []
        for share, link in zip(shares, stage.links, strict=True):
            with self._named(share):
                sizes.append(read_head(link.connection)[1])
        return sizes

    def _call(self, link: Link, group: Group | None, number: int, shares: Sequence[Share]) -> None:
        """Ask one rank for the version, through the group."""
        member, call = _members(shares)[number], NO_GROUP
        if group is not None and member != RECEIVER:
            call = GroupCall(group.name, member, group.size, group.address)
        body = msgspec.msgpack.encode(call)
        secret, version = self._announce.secret, LENGTH.pack(self._announce.version)
        called = LENGTH.pack(len(body)) + body
        # In one piece: a second small one would wait until the first is acknowledged.
        link.connection.sendall(proven(link, secret, version) + proven(link, secret, called))

    def _problem(self, stage: Stage, shares: Sequence[Share], sizes: Sequence[int]) -> str | None:
        """Receive everything; what went wrong, in words: an error would keep the group for a while."""
        try:
            self._receive(stage, self._lanes(stage, shares, sizes))
        except ValueError as error:
            return str(error)
        return None

    def _lanes(self, stage: Stage, shares: Sequence[Share], sizes: Sequence[int]) -> list[_Lane]:
        """What each rank will send, by its manifest, and where it goes."""
        lanes = []
        for share, link, member, size in zip(shares, stage.links, _members(shares), sizes, strict=True):
            with self._named(share):
                manifest = self._manifest(link, share, size)
                address = self._address(link)
                if stage.group is not None and member != RECEIVER:
                    stage.group.meet(member, address)
            lanes.append(_Lane(share, member, manifest, self._intake.memory.take(manifest.layout.total_bytes)))
        for share, link in zip(shares, stage.links, strict=True):
            with self._named(share):
                link.connection.sendall(GO)
        return lanes

    def _address(self, link: Link) -> bytes:
        length = bytearray(LENGTH.size)
        receive_into(link.connection, memoryview(length))
        (size,) = LENGTH.unpack(length)
        if size > MOST_CALL_BYTES:
            raise ValueError(f"an address of {size} bytes")
        address = bytearray(size)
        receive_into(link.connection, memoryview(address))
        return bytes(address)

    def _receive(self, stage: Stage, lanes: Sequence[_Lane]) -> None:
        """All buckets, of all ranks beside one another. ValueError names the rank and the bucket."""
        order = sorted((number, at) for at, lane in enumerate(lanes) for number in range(len(lane.manifest.sums)))
        if order:
            coming = [lanes[at].bucket(number) for number, at in order]
            seconds = self._deadline - time.monotonic()
            ahead = AHEAD * max(lane.member for lane in lanes)
            with Arrivals(stage, coming, ahead=ahead, seconds=seconds) as arrivals:
                for number, at in order:
                    self._take(arrivals, lanes, lanes[at], number)
                arrivals.join()
        self._found.extend((lane.manifest, lane.buffer) for lane in lanes)

    def _take(self, arrivals: Arrivals, lanes: Sequence[_Lane], lane: _Lane, number: int) -> None:
        """Wait for a bucket, and compare its checksum."""
        with self._named(lane.share, lane.about(number)):
            gone = arrivals.take()
        if gone is not None:
            with self._named(lanes[gone].share, lanes[gone].about(number)):
                raise ConnectionError("its connection ended" if not self._stopped else "given up")
        with self._named(lane.share):
            lane.manifest.check(lane.buffer, number)

    def _end(self, stage: Stage) -> None:
        with self._lock:
            self._open.difference_update(link.connection for link in stage.links)
        stage.end()  # without the lock: leaving a group takes a moment, and `stop` is called by an event loop


def _members(shares: Sequence[Share]) -> list[int]:
    """Each rank's number in the group of its stage; one without bytes is not in it, and has the receiver's."""
    held = 0
    numbers = []
    for share in shares:
        held += share.total_bytes > 0
        numbers.append(held if share.total_bytes else RECEIVER)
    return numbers
