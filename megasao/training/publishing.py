"""How the trainer's ranks hand a version of the policy to the engines: one interface, one class for each transport.

Every rank has a publishing and enters ``publish``; the publisher, which tells the receivers and commits, is on rank 0.
Invariants, asserted by the tests:
- with ``disk`` no rank holds more than a bucket beyond its own weights, and nothing passes through rank 0;
- with ``distributed`` and ``embedded`` nothing is sent between ranks, and no receiver can hold up the trainer: it waits
  for a copy of its own share into host memory, and, before the next version, for the bounded end of the one before;
- a rank that cannot write its share ends the publication on every rank, and no version appears.
"""

import os
import secrets
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.config.weights import WeightsConfig
from megasao.families.names import published_names
from megasao.megatron.bridge import export_hf
from megasao.megatron.bridge.outgoing import Outgoing, outgoing, stream_rows
from megasao.megatron.bridge.saving import agree, attempt
from megasao.megatron.bridge.share import RankShare, ShareCopy
from megasao.megatron.models import MegatronModel
from megasao.megatron.runtime import Topology, gather_bytes, gather_counts, gather_numbers
from megasao.weights import directory
from megasao.weights.group_serving import GroupShareServer
from megasao.weights.mapped import MappedWeights, Segment, SegmentPair, room_for
from megasao.weights.messages import Mapped, Share
from megasao.weights.ownership import this_machine
from megasao.weights.publication import Elsewhere
from megasao.weights.publisher import WeightPublisher
from megasao.weights.serving import ShareServer, address_towards
from megasao.weights.shared import SMALL_BYTES, SharedWeights


class Publishing(ABC):
    """A transport. ``publisher`` is there on rank 0 only."""

    publisher: WeightPublisher | None

    @abstractmethod
    def publish(self, version: int, model: MegatronModel) -> None:
        """Hand out the model's weights as ``version``, and let the engines take them in the background. Collective.

        The model may change as soon as this returns. RuntimeError if it failed; then the version is on no engine.
        """

    def close(self) -> None:
        """Stop serving."""
        if self.publisher is not None:
            self.publisher.close()


@dataclass
class StreamPublishing(Publishing):
    """Everything is gathered on rank 0, which sends it to each receiver."""

    publisher: WeightPublisher | None

    def publish(self, version: int, model: MegatronModel) -> None:
        tensors = export_hf(model)
        if self.publisher is not None:
            self.publisher.publish(version, tensors)


@dataclass
class DiskPublishing(Publishing):
    """Every rank writes its share below ``root``, which all ranks and workers see; rank 0 names the version."""

    root: Path
    config: WeightsConfig
    topology: Topology
    publisher: WeightPublisher | None
    _shares: list[Outgoing] | None = field(default=None, init=False)
    _published: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.topology.rank == 0:
            directory.prepare_root(self.root)

    def publish(self, version: int, model: MegatronModel) -> None:
        epoch = self._begin(version)
        if self._shares is None:
            self._shares = outgoing(model, fp8=self._fp8)
        path = directory.unfinished_path(self.root, version, epoch)
        mine = [info for share in self._shares if share.mine for info in share.infos]
        rows = stream_rows(model, self._shares, self.config.bucket_bytes)
        write = partial(directory.write_share, shard_bytes=self.config.shard_bytes)
        agree(path, attempt(write, path, self.topology.rank, mine, rows))
        ready, error = None, None
        if self.publisher is not None:
            names = published_names(model.hf_config, model.role, fp8=self._fp8)
            try:
                ready = directory.complete(self.root, version, epoch, self.topology.world_size, names)
            except OSError as failure:
                error = failure
        agree(path, error)
        if self.publisher is not None and ready is not None:
            self.publisher.publish_elsewhere(ready)

    @property
    def _fp8(self) -> bool:
        return self.config.dtype == "fp8_block"

    def _begin(self, version: int) -> str:
        """Make the version's hidden directory; the publisher's epoch, on every rank."""
        epoch, path = None, self.root
        error: Exception | None = None
        if self.publisher is not None:
            self.publisher.make_room(version)
            epoch = self.publisher.epoch.encode()
            path = directory.unfinished_path(self.root, version, self.publisher.epoch)
            try:
                if self._published:  # before, live receivers of an earlier life may not have said what they need
                    directory.prune(self.root, self.publisher.needed())
                path.mkdir()
            except OSError as failure:
                error = failure
            self._published = True
        agree(path, error)
        return self.topology.broadcast_bytes(epoch).decode()


_COLUMNS = 4
"""Numbers by which a rank says where its share is."""


class _SharePublishing(Publishing):
    """Every rank copies its share into memory of its host, from which the engines take it."""

    config: Config
    topology: Topology
    share: RankShare | None = None
    small = False
    """Whether versions are kept twice, so that one is copied without asking whether the one before is committed."""

    def publish(self, version: int, model: MegatronModel) -> None:
        if self.publisher is not None:
            self.publisher.make_room(version)
        if not self.small:
            self.topology.barrier()  # the version before is committed
        if self.share is None:
            fp8 = self.config.weights.dtype == "fp8_block"
            self.share = RankShare(model, self.config.weights.bucket_bytes, fp8=fp8)
            self.small = sum(gather_counts(self.share.total_bytes)) <= SMALL_BYTES
        row, error = [0] * _COLUMNS, None
        try:
            row = self._copy(version, self.share)
        except (OSError, ValueError) as failure:
            error = failure
        rows = gather_numbers([error is not None, *row])
        failed = [rank for rank, (lost, *_) in enumerate(rows) if lost]
        if failed:
            reason = error or "its own message says why"
            rank = failed[0] if error is None else self.topology.rank
            raise RuntimeError(f"rank {rank} could not make a version: {reason}") from error
        if self.publisher is not None:
            self.publisher.publish_elsewhere(self._whole(version, [row for _, *row in rows]))

    @abstractmethod
    def _copy(self, version: int, share: RankShare) -> list[int]:
        """Copy this rank's share and let it be read; ``_COLUMNS`` numbers that rank 0 needs to announce it.

        OSError or ValueError if it cannot be published. Collective over the ranks that hold the same.
        """

    @abstractmethod
    def _whole(self, version: int, rows: list[list[int]]) -> Elsewhere:
        """The version, from what each rank has said."""


@dataclass
class DistributedPublishing(_SharePublishing):
    """Every rank serves its share, at ``host``, to each receiver that asks."""

    host: str
    config: Config
    topology: Topology
    publisher: WeightPublisher | None
    _memories: list[tuple[int, ShareCopy]] = field(default_factory=list, init=False)
    """With the version in each, the oldest first."""

    def __post_init__(self) -> None:
        secret = secrets.token_bytes(32) if self.topology.rank == 0 else None
        self._secret = self.topology.broadcast_bytes(secret)
        self._carrier = self.config.weights.carrier
        serve = GroupShareServer if self._carrier == "gloo" else ShareServer
        self._server = serve(self.host, self._secret, timeout_s=self.config.transport.weights_timeout_s)
        self._hosts = [host.decode() for host in gather_bytes(self.host.encode())]

    def _copy(self, version: int, share: RankShare) -> list[int]:
        memory = self._free_memory(share)
        manifest = share.manifest(memory.fill())
        self._server.offer(version, manifest, memory.data)
        self._memories.append((version, memory))
        return [self._server.port, share.total_bytes, zlib.crc32(manifest), self.topology.pipeline_rank]

    def _free_memory(self, share: RankShare) -> ShareCopy:
        """That of the version before, or of a small one the version before that; new one if somebody hangs with it."""
        if len(self._memories) > self.small:
            version, memory = self._memories.pop(0)
            if self._server.retire(version):
                return memory
        # Memory that a GPU copies into directly.
        return ShareCopy(share, torch.zeros(share.total_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))

    def _whole(self, version: int, rows: list[list[int]]) -> SharedWeights:
        shares = [Share(rank, host, *row) for rank, (host, row) in enumerate(zip(self._hosts, rows, strict=True))]
        return SharedWeights(version, shares, self._secret, self._carrier)

    def close(self) -> None:
        super().close()
        self._server.close()


@dataclass
class EmbeddedPublishing(_SharePublishing):
    """Every rank copies its share into memory that engines on its machine map."""

    config: Config
    topology: Topology
    publisher: WeightPublisher | None
    _has_room: bool = field(default=False, init=False)
    _memory: SegmentPair | None = field(default=None, init=False)
    _copies: WeakKeyDictionary[Segment, ShareCopy] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        machines = set(gather_bytes(this_machine().encode()))
        if len(machines) > 1:
            raise ValueError(
                f"weights.transport = embedded needs all ranks on one machine, they are on {len(machines)}; "
                "use distributed"
            )
        self._pids = gather_counts(os.getpid())

    def _copy(self, version: int, share: RankShare) -> list[int]:
        if not self._has_room:
            lacking = room_for(gather_counts(share.total_bytes))
            lacks = gather_counts(lacking is not None)
            if any(lacks):
                raise ValueError(lacking or f"rank {lacks.index(1)} sees too little memory")
            self._has_room = True
        try:
            if self._memory is None:
                self._memory = SegmentPair(share.total_bytes)
            segment = self._memory.begin()
        except OSError:
            share.model.finish_gathering()  # the others wait for us there
            raise
        if segment not in self._copies:
            self._copies[segment] = ShareCopy(share, segment.flat)
        manifest = share.manifest(self._copies[segment].fill())
        return [self._memory.show(manifest), share.total_bytes, len(manifest), zlib.crc32(manifest)]

    def _whole(self, version: int, rows: list[list[int]]) -> MappedWeights:
        return MappedWeights(version, [Mapped(rank, self._pids[rank], *row) for rank, row in enumerate(rows)])

    def close(self) -> None:
        super().close()
        self._copies.clear()
        if self._memory is not None:
            self._memory.close()


def make_publishing(
    run: RunDirectory, config: Config, topology: Topology, publisher: WeightPublisher | None
) -> Publishing:
    """The transport that the config asks for. ValueError if this machine has no way to where weights are announced."""
    if config.weight_transport == "distributed":
        announced_at = urlsplit(run.read_endpoints().weights).hostname
        assert announced_at is not None
        return DistributedPublishing(address_towards(announced_at), config, topology, publisher)
    if config.weight_transport == "embedded":
        return EmbeddedPublishing(config, topology, publisher)
    if config.weight_transport == "disk":
        return DiskPublishing(run.published(config), config.weights, topology, publisher)
    return StreamPublishing(publisher)
