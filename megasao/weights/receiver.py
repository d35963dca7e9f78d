"""The rollout worker's side of live weights: fetches new versions, stages them in the engines, commits when told.

Invariants, asserted by the tests:
- an engine sees a version only when every bucket or file of it has the right checksum, and runs it only after the
  publisher's commit;
- a version that was not taken is tried again, each time after a longer pause;
- a restarted publisher is recognised by its epoch, and its version is taken even if the number is lower;
- nothing that arrives can end the receiver: a wrong message is counted and the next heartbeat starts again;
- an engine's failure is reported to the publisher and shown as ``quarantined``.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import torch
import zmq
import zmq.asyncio

from megasao.config.rollout import TransportConfig
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.endpoints import connect_dealer
from megasao.transport.keys import CurveKeys
from megasao.weights.download import DirectoryDownload, Download
from megasao.weights.intake import Intake
from megasao.weights.mapped import MappedDownload, Mappings
from megasao.weights.messages import (
    Announce,
    AnnounceDirectory,
    AnnounceMapped,
    AnyAnnounce,
    Bucket,
    Commit,
    Committed,
    Current,
    Failed,
    Fetch,
    Hello,
    Quarantine,
    Ready,
    Refused,
    ToReceiver,
)
from megasao.weights.shares_download import NodesDownload, SharesDownload

_log = logging.getLogger(__name__)

AnyDownload = Download | DirectoryDownload | SharesDownload | NodesDownload | MappedDownload
"""A version on its way in, by one transport."""

LONGEST_PAUSE_S = 60.0
"""Between two attempts at one version."""


class WeightSink(Protocol):
    """What takes the weights; every ``Engine`` is one."""

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Stage a complete set."""

    async def commit_weights(self, version: int) -> None:
        """Make the staged set current."""

    async def discard_weights(self, version: int) -> None:
        """Forget a staged set."""


class WeightReceiver:
    """Keeps ``engines`` at the publisher's newest version. Run it as a task: ``asyncio.create_task(receiver.run())``.

    ``identity`` (UTF-8 text) names the receiver at the publisher and must be unique in the run.
    """

    def __init__(
        self,
        address: str,
        *engines: WeightSink,
        identity: bytes,
        config: TransportConfig,
        keys: CurveKeys | None = None,
        on_nodes: bool = False,
    ) -> None:
        """``config.weights_timeout_s`` bounds every call of an engine and every wait for a bucket.

        ``on_nodes``: what lies in the memory of the trainer's ranks is taken by the nodes of the engines themselves.
        """
        self._on_nodes = on_nodes
        self._address, self._identity, self._engines = address, identity, engines
        self._name = identity.decode("utf-8")
        self._keys, self._high_water_mark = keys, config.high_water_mark
        self._timeout_s, self._heartbeat_s = config.weights_timeout_s, config.heartbeat_s
        self._socket: Any = None
        self._epoch: str | None = None
        self._version: int | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._download: AnyDownload | None = None
        self._intake, self._mappings = Intake(self._name), Mappings()
        self._pauses = _Pauses(self._heartbeat_s)
        self._changed = asyncio.Condition()
        self._heard_at: float | None = None
        self.quarantined: str | None = None
        """Why the engines are not at the publisher's version though they should be; null when in sync."""
        self.malformed = 0
        """Messages that were not understood or refused, total."""

    @property
    def version(self) -> int | None:
        """The version that every engine runs, null before the first sync."""
        return self._version

    def latest(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The committed version and its tensors (read-only: shared), for an engine that is loaded by hand."""
        return None if self._version is None else (self._version, self._tensors)

    async def wait_for_version(self, version: int, timeout: float) -> int:
        """Wait until the engines run ``version`` or a newer one, and return it. TimeoutError names the publisher."""
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._version is not None and self._version >= version), timeout
                )
            except TimeoutError:
                heard = "never" if self._heard_at is None else f"{time.monotonic() - self._heard_at:.1f} s ago"
                raise TimeoutError(
                    f"no weight version >= {version} after {timeout:g} s (at {self._version}); the publisher at "
                    f"{self._address} was last heard {heard}; quarantined: {self.quarantined}"
                ) from None
        assert self._version is not None
        return self._version

    async def run(self) -> None:
        """Serve until cancelled. An error that is not the publisher's or an engine's doing is raised."""
        context = zmq.asyncio.Context()
        self._socket = connect_dealer(
            context,
            self._address,
            identity=self._identity,
            high_water_mark=self._high_water_mark,
            keys=self._keys,
        )
        tasks = {asyncio.create_task(self._receive_all()), asyncio.create_task(self._beat_forever())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.close(linger=0)
            context.term()
            self._intake.close()

    async def _beat_forever(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(self._heartbeat_s)

    async def _beat(self) -> None:
        """Repeat our state, so that anything that was lost on the way is sent again."""
        download = self._download
        idle = download.idle_s if download is not None else 0.0
        if download is not None and not download.staged and not download.complete and idle > self._timeout_s:
            await self._give_up(download, f"no bucket arrived for {self._timeout_s:g} s")
            download = None
        loading = download.version if download is not None else None
        epoch = self._epoch if download is None else download.epoch
        version = self._version if epoch == self._epoch else None
        await self._send(Hello(epoch, version, loading))
        if download is None:
            return
        if download.staged:
            await self._send(Ready(download.epoch, download.version))
        elif isinstance(download, Download) and idle > self._heartbeat_s:
            for bucket in sorted(download.asked):
                await self._send(Fetch(download.epoch, download.version, bucket))

    async def _send(self, message: msgspec.Struct) -> None:
        """Without waiting: with the publisher away the queue fills, and what does not fit is said again later."""
        try:
            await self._socket.send_multipart(encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            _log.debug("weights: %s not sent, the queue to %s is full", type(message).__name__, self._address)

    async def _receive_all(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._heard_at = time.monotonic()
            try:
                message, payload = decode(frames, ToReceiver)
            except MalformedMessage as error:
                self._refuse(str(error))
                continue
            await self._handle(message, payload)

    def _refuse(self, reason: str) -> None:
        self.malformed += 1
        _log.warning("weights: a message from %s was refused: %s", self._address, reason)

    async def _handle(self, message: Any, payload: bytes) -> None:
        download = self._download
        if isinstance(message, AnyAnnounce):
            await self._on_announce(message)
        elif isinstance(message, Refused):
            self._refuse(f"the publisher refused ours: {message.reason}")
        elif isinstance(message, Quarantine):
            if (message.epoch, message.version) != (self._epoch, self._version):
                self.quarantined = message.reason
        elif isinstance(message, Commit) and (message.epoch, message.version) == (self._epoch, self._version):
            await self._send(Committed(message.epoch, message.version))
        elif download is None or isinstance(message, Current):
            return
        elif (message.epoch, message.version) == (download.epoch, download.version):
            if isinstance(message, Bucket):
                if isinstance(download, Download):
                    await self._on_bucket(download, message, payload)
            elif download.staged:
                await self._commit(download)

    async def _on_announce(self, announce: AnyAnnounce) -> None:
        """Start on a version, unless it is the one that we run or are loading already, or has just failed."""
        wanted = (announce.epoch, announce.version)
        if wanted == (self._epoch, self._version) or self._pauses.holds(wanted):
            return
        if self._download is not None:
            if wanted == (self._download.epoch, self._download.version):
                return
            await self._discard(self._download)
        try:
            self._download = self._begin(announce)
        except ValueError as error:
            self._refuse(str(error))
            self.quarantined = str(error)
            await self._send(Failed(announce.epoch, announce.version, str(error)))
            return
        await self._go_on(self._download)

    def _begin(self, announce: AnyAnnounce) -> AnyDownload:
        """ValueError for a version that cannot be."""
        if isinstance(announce, Announce):
            return Download(announce)
        if isinstance(announce, AnnounceDirectory):
            return DirectoryDownload(announce)
        if isinstance(announce, AnnounceMapped):
            return MappedDownload(announce, self._mappings, self._intake.threads)
        return NodesDownload(announce) if self._on_nodes else SharesDownload(announce, self._intake)

    async def _on_bucket(self, download: Download, bucket: Bucket, payload: bytes) -> None:
        try:
            download.take(bucket, payload)
        except ValueError as error:
            await self._give_up(download, str(error))
            return
        await self._go_on(download)

    async def _go_on(self, download: AnyDownload) -> None:
        """Ask for what is missing; once all is here and intact, stage it in the engines."""
        if isinstance(download, Download):
            for bucket in download.next_buckets():
                await self._send(Fetch(download.epoch, download.version, bucket))
            if not download.complete or download.staged:
                return
        elif (damage := await download.verify(self._timeout_s)) is not None:
            await self._give_up(download, damage)
            return
        reason = await self._on_engines("prepare_weights", download.version, download.tensors())
        if reason is not None:
            await self._give_up(download, reason)
            return
        download.staged = True
        await self._send(Ready(download.epoch, download.version))

    async def _commit(self, download: AnyDownload) -> None:
        reason = await self._on_engines("commit_weights", download.version)
        if reason is not None:
            await self._give_up(download, reason)
            return
        async with self._changed:
            self._epoch, self._version = download.epoch, download.version
            self._tensors = download.tensors()
            self._download, self.quarantined = None, None
            self._changed.notify_all()
        await self._send(Committed(download.epoch, download.version))
        self._intake.ask_ahead()

    async def _on_engines(self, method: str, *arguments: Any) -> str | None:
        """Call ``method`` on every engine; the reason if one failed."""
        for index, engine in enumerate(self._engines):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await getattr(engine, method)(*arguments)
            except TimeoutError:
                return f"engine {index} of {self._name}: {method} took more than {self._timeout_s:g} s"
            except (RuntimeError, ValueError, OSError) as error:
                return f"engine {index} of {self._name}: {method}: {error}"
        return None

    async def _give_up(self, download: AnyDownload, reason: str) -> None:
        """Tell the publisher, forget the download; the next heartbeat starts again."""
        _log.warning("weights %d not taken: %s", download.version, reason)
        self.quarantined = reason
        self._pauses.failed((download.epoch, download.version))
        await self._discard(download)
        await self._send(Failed(download.epoch, download.version, reason))

    async def _discard(self, download: AnyDownload) -> None:
        await self._on_engines("discard_weights", download.version)
        if self._download is download:
            self._download = None


class _Pauses:
    """How long to wait before the next attempt at a version that was not taken: twice as long each time."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._version: tuple[str, int] | None = None
        self._pause_s = self._until = 0.0

    def failed(self, version: tuple[str, int]) -> None:
        """One more attempt has failed."""
        self._pause_s = self._first_s if version != self._version else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._version, self._until = version, time.monotonic() + self._pause_s

    def holds(self, version: tuple[str, int]) -> bool:
        """Whether it is too early to try ``version`` again."""
        return version == self._version and time.monotonic() < self._until
