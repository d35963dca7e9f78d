"""Helpers of the live-weights tests: real sockets, a sink that records, and a wire that can be tampered with."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import zmq

from megasao.config.rollout import TransportConfig
from megasao.launch.ports import free_ports
from megasao.storage.header import TensorInfo
from megasao.weights import directory
from megasao.weights.directory import PublishedWeights, WeightDirectory
from megasao.weights.publisher import WeightPublisher
from megasao.weights.receiver import WeightReceiver

FAST = TransportConfig(heartbeat_s=0.05, weights_timeout_s=60.0, dead_after_s=60.0)
"""Limits that no machine is slow enough to reach."""
SHORT = FAST.model_copy(update={"weights_timeout_s": 5.0, "dead_after_s": 4.0})
"""For tests in which one of the limits is what ends the wait."""
BUCKET = 1000
"""Smaller than a tensor, and no multiple of anything: tensors span buckets."""


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(32, 16, generator=generator),
        "scale": torch.randn((), generator=generator),
        "half": torch.randn(7, 3, generator=generator).bfloat16(),
        "turned": torch.randn(16, 32, generator=generator).t(),
        "empty": torch.zeros(0, 4),
    }


def equal(left: Mapping[str, torch.Tensor] | None, right: Mapping[str, torch.Tensor]) -> bool:
    return (
        left is not None
        and left.keys() == right.keys()
        and all(left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in right)
    )


class Stream:
    """Versions go out in buckets."""

    def send(self, sender: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        sender.publish(version, tensors)


class Disk:
    """Versions go out as directories below ``root``, each written by two ranks; as the trainer does it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        directory.prepare_root(root)

    def send(self, sender: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        sender.make_room(version)
        if sender._current is not None:
            directory.prune(self.root, sender.needed())
        sender.publish_elsewhere(write_version(self.root, version, sender.epoch, tensors))

    def versions(self) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in self.root.iterdir())


def write_version(root: Path, version: int, epoch: str, tensors: Mapping[str, torch.Tensor]) -> PublishedWeights:
    unfinished = directory.unfinished_path(root, version, epoch)
    unfinished.mkdir()
    for rank in range(2):
        infos = [TensorInfo(n, t.dtype, tuple(t.shape)) for n, t in list(tensors.items())[rank::2]]
        rows = [(info.name, 0, tensors[info.name]) for info in infos]
        directory.write_share(unfinished, rank, infos, rows, shard_bytes=BUCKET)
    return directory.complete(root, version, epoch, 2, tensors.keys())


def opened(published: PublishedWeights) -> WeightDirectory:
    """As a worker hands it to its engines."""
    found = WeightDirectory(published.path, published.manifest_crc32)
    found.verify(threading.Event())
    return found


class RecordingSink:
    """An engine as far as weights go. ``log`` holds every call."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.staged: dict[int, dict[str, torch.Tensor]] = {}
        self.current: dict[str, torch.Tensor] | None = None
        self.version: int | None = None

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.log.append(("prepare", version))
        self.staged[version] = {name: tensor.clone() for name, tensor in tensors.items()}

    async def commit_weights(self, version: int) -> None:
        self.log.append(("commit", version))
        self.current, self.version = self.staged.pop(version), version

    async def discard_weights(self, version: int) -> None:
        self.log.append(("discard", version))
        self.staged.pop(version, None)


@asynccontextmanager
async def receiving(
    address: str, *sinks: RecordingSink, name: str = "rollout-0", config: TransportConfig = FAST, **options: Any
) -> AsyncIterator[WeightReceiver]:
    """A receiver that runs for the length of the block."""
    receiver = WeightReceiver(address, *sinks, identity=name.encode(), config=config, **options)
    task = asyncio.create_task(receiver.run())
    try:
        yield receiver
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def publisher(address: str, config: TransportConfig = FAST, **options: Any) -> WeightPublisher:
    return WeightPublisher(address, config=config, bucket_bytes=BUCKET, **options)


async def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait, bounded."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}") from None


async def connected(publisher: WeightPublisher, count: int) -> None:
    """Until the publisher has heard ``count`` receivers."""
    await until(lambda: len(publisher._seen) == count, f"{count} receivers at the publisher")


class TamperedWire:
    """Sits between one receiver and the publisher; ``change(frames)`` may alter or drop (None) what goes to it."""

    def __init__(self, target: str, identity: bytes, change: Callable[[list[bytes]], list[bytes] | None]) -> None:
        self.address = free_address()
        self._context = zmq.Context()
        self._near = self._context.socket(zmq.ROUTER)
        self._near.bind(self.address)
        self._far = self._context.socket(zmq.DEALER)
        self._far.setsockopt(zmq.IDENTITY, identity)
        self._far.connect(target)
        self._change, self._stop = change, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._near, zmq.POLLIN)
        poller.register(self._far, zmq.POLLIN)
        peer = b""
        while not self._stop.is_set():
            events = dict(poller.poll(50))
            if self._near in events:
                peer, *frames = self._near.recv_multipart()
                self._far.send_multipart(frames)
            if self._far in events:
                changed = self._change(self._far.recv_multipart())
                if changed is not None:
                    self._near.send_multipart([peer, *changed])

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._near.close(linger=0)
        self._far.close(linger=0)
        self._context.term()
