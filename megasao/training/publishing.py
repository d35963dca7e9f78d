"""How the trainer's ranks hand a version of the policy to the engines: one interface, one class for each transport.

Every rank has a publishing and enters ``publish``; the publisher, which tells the receivers and commits, is on rank 0.
Invariants, asserted by the tests:
- with ``disk`` no rank holds more than a bucket beyond its own weights, and nothing passes through rank 0;
- with ``distributed`` nothing is sent between ranks, and no receiver can hold up the trainer: it waits for a copy of
  its own share into host memory, and, before the next version, for the bounded end of the one before;
- a rank that cannot write its share ends the publication on every rank, and no version appears.
"""

import secrets
import shutil
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.config.weights import WeightsConfig
from megasao.families.names import published_names
from megasao.megatron.bridge import export_hf
from megasao.megatron.bridge.outgoing import Outgoing, outgoing, stream_rows
from megasao.megatron.bridge.share import RankShare
from megasao.megatron.models import MegatronModel
from megasao.megatron.runtime import Topology, gather_bytes, gather_counts
from megasao.weights import directory
from megasao.weights.messages import Share
from megasao.weights.publisher import WeightPublisher
from megasao.weights.serving import ShareServer, address_towards
from megasao.weights.shared import SharedWeights, ShareManifest


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
        error: Exception | None = None
        mine = [info for share in self._shares if share.mine for info in share.infos]
        rows = stream_rows(model, self._shares, self.config.bucket_bytes)
        try:
            directory.write_share(path, self.topology.rank, mine, rows, shard_bytes=self.config.shard_bytes)
        except (OSError, ValueError) as failure:
            error = failure
        self._agree(path, error)
        ready, error = None, None
        if self.publisher is not None:
            names = published_names(model.hf_config, model.role, fp8=self._fp8)
            try:
                ready = directory.complete(self.root, version, epoch, self.topology.world_size, names)
            except OSError as failure:
                error = failure
        self._agree(path, error)
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
        self._agree(path, error)
        return self.topology.broadcast_bytes(epoch).decode()

    def _agree(self, path: Path, error: Exception | None) -> None:
        """End the publication on every rank, and remove what there is of it, if one rank has an error. Collective."""
        failed = [rank for rank, lost in enumerate(gather_counts(error is not None)) if lost]
        if not failed:
            return
        if self.topology.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        reason = error or "its own message says why"
        raise RuntimeError(f"rank {failed[0]} could not write weights to {path}: {reason}") from error


@dataclass
class DistributedPublishing(Publishing):
    """Every rank keeps its share in host memory and serves it, at ``host``, to each receiver that asks."""

    host: str
    config: Config
    topology: Topology
    publisher: WeightPublisher | None
    _share: RankShare | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        secret = secrets.token_bytes(32) if self.topology.rank == 0 else None
        self._secret = self.topology.broadcast_bytes(secret)
        self._server = ShareServer(self.host, self._secret, timeout_s=self.config.transport.weights_timeout_s)

    def publish(self, version: int, model: MegatronModel) -> None:
        if self.publisher is not None:
            self.publisher.make_room(version)
        self.topology.barrier()  # the version before is committed
        self._server.retire()
        if self._share is None:
            fp8 = self.config.weights.dtype == "fp8_block"
            self._share = RankShare(model, self.config.weights.bucket_bytes, fp8=fp8)
        share, sums = self._share, self._fill(self._share)
        manifest = msgspec.msgpack.encode(ShareManifest(share.pieces, share.total_bytes, share.bucket_bytes, sums))
        self._server.offer(version, manifest, share.data)
        place = Share(self.topology.rank, self.host, self._server.port, share.total_bytes, zlib.crc32(manifest))
        places = gather_bytes(msgspec.msgpack.encode(place))
        if self.publisher is not None:
            shares = [msgspec.msgpack.decode(each, type=Share) for each in places]
            self.publisher.publish_elsewhere(SharedWeights(version, shares, self._secret))

    def _fill(self, share: RankShare) -> list[int]:
        """Checksums; RuntimeError on every rank if one has numbers that cannot be published. Collective."""
        sums: list[int] = []
        error: ValueError | None = None
        try:
            sums = share.fill()
        except ValueError as failure:
            error = failure
        failed = [rank for rank, lost in enumerate(gather_counts(error is not None)) if lost]
        if failed:
            reason = error or "its own message says why"
            raise RuntimeError(f"rank {failed[0]} could not make a version: {reason}") from error
        return sums

    def close(self) -> None:
        super().close()
        self._server.close()


def make_publishing(
    run: RunDirectory, config: Config, topology: Topology, publisher: WeightPublisher | None
) -> Publishing:
    """The transport that the config asks for. ValueError if this machine has no way to where weights are announced."""
    if config.weight_transport == "distributed":
        announced_at = urlsplit(run.read_endpoints().weights).hostname
        assert announced_at is not None
        return DistributedPublishing(address_towards(announced_at), config, topology, publisher)
    if config.weight_transport == "disk":
        return DiskPublishing(run.published(config), config.weights, topology, publisher)
    return StreamPublishing(publisher)
