"""A receiver takes a version of a few megabytes: what has come before it was announced, and the rest in turn, over the
connections of the version before.

Invariants, asserted by the tests:
- a share that came before it was announced is taken only as the announced version, with the announced manifest;
- connections are kept where ranks have not closed them, and made anew where they have; those to ranks that do not
  announce any more are closed;
- no connection is closed while a thread may still read from it, so that none reads from what has its number next.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megasao.weights.ahead import Ahead, Arrived, Damaged
from megasao.weights.fetching import Fetching
from megasao.weights.incoming import Link, ask
from megasao.weights.intake import Intake
from megasao.weights.messages import AnnounceShares, Place, Share
from megasao.weights.serving import read_head


class SmallFetching(Fetching):
    """One attempt. What was not asked for ahead is read by one thread: more take longer than they save."""

    def __init__(self, announce: AnnounceShares, intake: Intake, timeout_s: float) -> None:
        super().__init__(announce, intake, timeout_s)
        self._ahead: Ahead | None = None
        """While its threads may read."""
        self._busy = False

    async def finish(self) -> None:
        """Take what has come, and fetch the rest. ValueError if a share is damaged or cannot be had."""
        try:
            links, found = await self._came_ahead()
            missing = [share for share in self._announce.shares if not self._accepts(share, found.get(share.place))]
            if missing:
                await asyncio.to_thread(self._fetch_over, links, missing)
        except BaseException:
            self._end_all()
            raise
        with self._lock:
            self._open.clear()
        ordered = [links[share.place] for share in self._announce.shares]
        self._intake.keep_ahead(Ahead(self._announce, ordered, self._intake.memory))

    async def _came_ahead(self) -> tuple[dict[Place, Link], dict[Place, Arrived | Damaged]]:
        """Open connections to ranks, and what has come over them."""
        ahead = self._ahead = self._intake.take_ahead()
        if self._intake.has_stages:  # leaving a group takes a moment
            await asyncio.to_thread(self._intake.keep_only, ())
        if ahead is None:
            return {}, {}
        if not ahead.may_have(self._announce):
            ahead.end()
            self._ahead = None
            return {}, {}
        if ahead.asked:
            await asyncio.wrap_future(ahead.answered)
        links = ahead.close_lost()
        for link in links.values():
            self._enter(link.connection)
        self._ahead = None
        return links, ahead.found

    def _accepts(self, share: Share, one: Arrived | Damaged | None) -> bool:
        """Whether it is what is announced. ValueError if that is damaged."""
        if one is None or one.version != self._announce.version:
            return False
        with self._named(share):
            if isinstance(one, Damaged):
                raise ValueError(one.reason)
            self._check_announced(one.manifest_crc32, share)
        self._found.append((one.manifest, one.buffer))
        return True

    def _fetch_over(self, links: dict[Place, Link], shares: Sequence[Share]) -> None:
        """Take ``shares``; ``links`` has the connections that there are, and gets those over which they came."""
        with self._at_work():
            asked = {share.place: self._asks(links.pop(share.place, None)) for share in shares}
            for share in shares:
                with self._named(share):
                    links[share.place] = self._answered(asked[share.place], share) or self._anew(share)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Between :meth:`_end_all` and the thread that reads, the later one closes the connections."""
        with self._lock:
            if self._stopped:
                raise ValueError("given up")
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                if self._stopped:
                    self._close_open()

    def _asks(self, link: Link | None) -> Link | None:
        """The connection, if it is one still."""
        if link is None:
            return None
        try:
            ask(link, self._announce.secret, self._announce.version)
        except OSError:
            self._close(link.connection)
            return None
        return link

    def _answered(self, link: Link | None, share: Share) -> Link | None:
        """Take a share that we have asked for; None if the rank had closed the connection before."""
        if link is None:
            return None
        try:
            size = read_head(link.connection)[1]
        except ConnectionError:
            self._close(link.connection)
            return None
        self._read(link, share, size)
        return link

    def _anew(self, share: Share) -> Link:
        """Take a share over a new connection."""
        link = self._opened(share)
        ask(link, self._announce.secret, self._announce.version)
        self._read(link, share, read_head(link.connection)[1])
        return link

    def _end_all(self) -> None:
        self.stop()
        if self._ahead is not None:
            self._ahead.end()
        with self._lock:
            if not self._busy:
                self._close_open()

    def _close_open(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
