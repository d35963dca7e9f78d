"""Time of a weight update: ``python benchmarks/weights.py [--gb 0.01 1] [--sglang .venv-sglang/bin/python]``.

A random bfloat16 llama on two trainer ranks (TP2) is published to one receiver over every transport; over distributed
with both carriers, and as to a receiver on another machine (TCP: on one machine it is a Unix socket). In the same run,
in turn with them: the same bytes by a bare gloo broadcast between the two ranks, and as a bare write of files by both
(with fsync). Seconds are wall time, the median of the repeats; ``held`` is how long the trainer's ranks wait. Then
what an update cannot do without, each part alone: the ranks' collectives; their copy, with checksums; the receiver's
checksums; the four messages of a version without bytes. At last the time in which an engine samples nothing: from
commit to committed, the engine idle. ``--json FILE`` also writes the numbers.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conversion import write_source
from ranks import run_ranks

RANKS = 2
WAYS = 6
"""In which a version goes to a receiver of its own."""
BUCKET = 16 * 2**20
PATIENT = {"heartbeat_s": 0.2, "weights_timeout_s": 120.0, "dead_after_s": 60.0}


class NullSink:
    """An engine that takes everything and keeps nothing."""

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None: ...

    async def commit_weights(self, version: int) -> None: ...

    async def discard_weights(self, version: int) -> None: ...


def make_config(directory: Path, *, carrier: str = "tcp", **rollout: Any) -> Any:
    """A run of the model at ``directory``/hf."""
    from megasao.config import Config

    carried = {} if carrier == "tcp" else {"transport": "distributed", "carrier": carrier}
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "directory": str(directory)},
            "model": {"path": str(directory / "hf"), "dtype": "bfloat16"},
            "actor": {"optimizer": {"lr": 1e-3}},
            "critic": {"optimizer": {"lr": 1e-3}},
            "loop": {"steps": 100},
            "environment": {"max_tokens": 64},
            "parallel": {
                "ranks": RANKS,
                "tensor": RANKS,
                "sequence": True,
                "expert_tensor": RANKS,
                "timeout_s": 600.0,
            },
            "rollout": rollout,
            "transport": PATIENT,
            "weights": {"bucket_bytes": BUCKET, **carried},
        }
    )


def rank_main(directory: Path, addresses: Sequence[str], repeats: int) -> None:
    """One trainer rank: everything, one after the other."""
    import torch
    from torch import distributed

    from megasao.config.weights import WeightsConfig
    from megasao.megatron.bridge.share import RankShare
    from megasao.megatron.models import build_model
    from megasao.training.publishing import (
        DiskPublishing,
        DistributedPublishing,
        EmbeddedPublishing,
        Publishing,
        StreamPublishing,
    )
    from megasao.training.world import trainer_world
    from megasao.weights.publisher import WeightPublisher

    config = make_config(directory)
    with trainer_world(config) as topology:
        model = build_model("actor", directory / "hf", config)
        total = sum(file.stat().st_size for file in (directory / "hf").glob("*.safetensors"))

        def publisher(address: str) -> WeightPublisher | None:
            return WeightPublisher(address, config=config.transport, bucket_bytes=BUCKET) if not topology.rank else None

        ways: dict[str, Publishing] = {
            "stream": StreamPublishing(publisher(addresses[0])),
            "disk": DiskPublishing(
                directory / "published", WeightsConfig(bucket_bytes=BUCKET), topology, publisher(addresses[1])
            ),
            "distributed": DistributedPublishing("127.0.0.1", config, topology, publisher(addresses[2])),
            "distributed, gloo": DistributedPublishing(
                "127.0.0.1", make_config(directory, carrier="gloo"), topology, publisher(addresses[3])
            ),
            "distributed, TCP": _by_network(
                DistributedPublishing("127.0.0.1", config, topology, publisher(addresses[4]))
            ),
            "embedded": EmbeddedPublishing(config, topology, publisher(addresses[5])),
        }
        versions = itertools.count()
        for way in ways.values():
            while not _publish(way, next(versions), model, topology)[2]:
                time.sleep(0.2)  # until the receiver is there
        flat = torch.zeros(total, dtype=torch.uint8)

        def broadcast() -> None:
            for piece in flat.split(BUCKET):
                distributed.broadcast(piece, src=0)

        def write() -> None:
            file = directory / f"bare-{topology.rank}"
            with file.open("wb", buffering=0) as stream:
                for piece in flat[: total // RANKS].split(BUCKET):
                    stream.write(piece.numpy().data)
                os.fsync(stream.fileno())
            file.unlink()

        bare = {"bare gloo broadcast": broadcast, "bare file write": write}
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(repeats + 1):
            for name, way in ways.items():
                found.setdefault(name, []).append(_publish(way, next(versions), model, topology)[:2])
            for name, work in bare.items():
                found.setdefault(name, []).append(_timed(work, topology))
        rows = {name: _medians(times[1:]) for name, times in found.items()}  # without the first
        parts = _parts(ways["embedded"], next(versions), RankShare(model, BUCKET), topology, repeats)
        for way in ways.values():
            way.close()
    print(json.dumps({"gb": total / 1e9, "rows": rows, "parts": parts}))


def _by_network(way: Any) -> Any:
    """Announced under a name by which no receiver finds the ranks' Unix sockets."""
    way._hosts = ["localhost"] * RANKS
    return way


def _parts(way: Any, version: int, share: Any, topology: Any, repeats: int) -> dict[str, float]:
    """Seconds of what no update can do without, each alone."""
    import torch

    from megasao.megatron.bridge.share import ShareCopy
    from megasao.megatron.runtime import gather_numbers
    from megasao.weights.mapped import MappedWeights
    from megasao.weights.shared import SMALL_BYTES, bucket_sum

    memory = ShareCopy(share, torch.zeros(share.total_bytes, dtype=torch.uint8))
    whole = torch.zeros(share.total_bytes * RANKS, dtype=torch.uint8)
    versions = itertools.count(version)

    def collectives() -> None:
        if len(whole) > SMALL_BYTES:
            topology.barrier()
        gather_numbers([0] * 5)

    def sums() -> None:
        if topology.rank == 0:
            for piece in whole.split(BUCKET):
                bucket_sum(piece.numpy())

    def messages() -> None:
        if way.publisher is not None:
            way.publisher.publish_elsewhere(MappedWeights(next(versions), []))
            assert way.publisher.wait().engines

    parts = {
        "collectives": collectives,
        "copy and checksums": memory.fill,
        "receiver's checksums": sums,
        "messages": messages,
    }
    found = {name: [_timed(work, topology) for _ in range(repeats + 1)] for name, work in parts.items()}
    return {name: _medians(times[1:])[0] for name, times in found.items()}


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(first for first, _ in times), statistics.median(second for _, second in times)


def _publish(way: Any, version: int, model: Any, topology: Any) -> tuple[float, float, bool]:
    """Seconds until it is committed, seconds until the ranks may go on, and whether a receiver took it."""
    topology.barrier()
    start = time.perf_counter()
    way.publish(version, model)
    held = time.perf_counter() - start
    taken = b"yes"
    if way.publisher is not None:
        taken = b"yes" if way.publisher.wait().engines else b"no"
    seconds = time.perf_counter() - start
    taken = topology.broadcast_bytes(taken if topology.rank == 0 else None)
    return seconds, held, taken == b"yes"


def _timed(work: Callable[[], object], topology: Any) -> tuple[float, float]:
    topology.barrier()
    start = time.perf_counter()
    work()
    topology.barrier()
    seconds = time.perf_counter() - start
    return seconds, seconds


async def publish_everything(directory: Path, repeats: int) -> Any:
    """The ranks beside the receivers; what rank 0 measured."""
    from megasao.launch.ports import free_ports
    from megasao.weights.receiver import WeightReceiver

    config = make_config(directory)
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(WAYS)]
    receivers = [
        WeightReceiver(address, NullSink(), identity=b"engine", config=config.transport) for address in addresses
    ]
    tasks = [asyncio.create_task(receiver.run()) for receiver in receivers]
    arguments = ["--rank", str(directory), *addresses, "--repeats", str(repeats)]
    found = (await asyncio.to_thread(run_ranks, __file__, RANKS, arguments))[0]
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return found


async def pauses(directory: Path, sglang: Path | None, repeats: int) -> dict[str, float]:
    """Seconds in which an engine samples nothing: from ``commit_weights`` to its end."""
    from megasao.config.rollout import EmbeddedEngineConfig
    from megasao.rollout.engines.embedded import EmbeddedEngine

    found = {}
    embedded = EmbeddedEngine(directory / "hf", EmbeddedEngineConfig(slots=1), max_total_tokens=64, seed=0)
    await embedded.start()
    try:
        found["embedded"] = await _commit(embedded, directory, repeats)
    finally:
        await embedded.close()
    if sglang is not None:
        found |= await _sglang_pauses(directory, sglang, repeats)
    return found


async def _sglang_pauses(directory: Path, python: Path, repeats: int) -> dict[str, float]:
    """Of a server that loads a published directory, and one that its node has from the ranks' memory."""
    from megasao.config.rundir import RunDirectory
    from megasao.launch.ports import free_ports
    from megasao.rollout import server
    from megasao.rollout.engines.sglang import SGLangEngine
    from megasao.transport.keys import make_server_key
    from megasao.weights.nodes import NodeWeights, ServerNodes

    config = make_config(directory, engine="sglang", sglang={"python": str(python)})
    run, (port,), name = RunDirectory(directory / "run"), free_ports(1), "engine-0-0"
    run.engine(name).mkdir(parents=True, exist_ok=True)
    key = make_server_key(run.keys)
    url = f"http://127.0.0.1:{port}"
    process = server.start(run, config, server.Part(name, url, {}))
    found = {}
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            nodes = ServerNodes(Path(memory) / "node", [directory / "node.json"])
            await _write_on_node(directory, nodes)
            for kind, weights, at in (("disk", None, None), ("distributed", NodeWeights(_LABEL), nodes)):
                engine = SGLangEngine(
                    url,
                    directory / "hf",
                    config.rollout.sglang,
                    staging=run.staging(kind),
                    max_total_tokens=64,
                    seed=0,
                    start_timeout_s=240.0,
                    update_timeout_s=120.0,
                    key=key,
                    nodes=at,
                )
                starting = asyncio.create_task(engine.start())
                try:
                    while not starting.done():
                        if process.poll() is not None:
                            raise SystemExit(f"the SGLang server ended with {process.returncode}; see above")
                        await asyncio.sleep(0.2)
                    starting.result()
                    found[f"sglang, {kind}"] = await _commit(engine, directory, repeats, weights)
                finally:
                    starting.cancel()
                    await engine.close()
    finally:
        process.kill()
        process.wait()
    return found


_LABEL = "1.benchmark"


async def _write_on_node(directory: Path, nodes: Any) -> None:
    """The published version, as a server's node writes what it has from the ranks."""
    import numpy as np

    from megasao.rollout.engines.sglang_weights import read_layout
    from megasao.weights.flat import pack
    from megasao.weights.nodes import NodeDirectory
    from megasao.weights.shared import Piece, ShareLayout, ShareManifest, ShareTensors

    flat = pack(1, dict(_published(directory)), BUCKET)
    pieces = [Piece(spec.name, spec.dtype, spec.shape, 0, 0, spec.shape, spec.offset) for spec in flat.specs]
    manifest = ShareManifest(ShareLayout(pieces, flat.total_bytes, BUCKET), [])
    share = ShareTensors([(manifest, np.asarray(flat.buffer))], _LABEL)
    node = NodeDirectory(nodes.directory, nodes.markers[0], read_layout(directory / "hf"), file_bytes=2**31)
    await node.prepare_weights(1, share)


def _published(directory: Path) -> Any:
    """The last version on disk."""
    import threading

    from megasao.storage.writer import checksum
    from megasao.weights.directory import MANIFEST, WeightDirectory

    path = max((directory / "published").iterdir())
    weights = WeightDirectory(path, checksum(path / MANIFEST))
    weights.verify(threading.Event())
    return weights


async def _commit(engine: Any, directory: Path, repeats: int, weights: Any = None) -> float:
    """The median of some updates, from the last published directory where no ``weights`` are given."""
    weights = _published(directory) if weights is None else weights
    seconds = []
    for version in range(1, repeats + 1):
        await engine.prepare_weights(version, weights)
        start = time.perf_counter()
        await engine.commit_weights(version)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(directory: Path, gigabytes: float, repeats: int, sglang: Path | None) -> dict[str, Any]:
    """All numbers of one model."""
    (directory / "hf").mkdir(parents=True)
    write_source(directory / "hf", gigabytes)
    found: dict[str, Any] = asyncio.run(publish_everything(directory, repeats))
    found["paused"] = asyncio.run(pauses(directory, sglang, repeats))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """One table for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.01, 1.0], help="sizes of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sglang", type=Path, help="the Python that has SGLang; without, its pause is not measured")
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=1 + WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        rank_main(Path(options.rank[0]), options.rank[1:], options.repeats)
        return
    report = []
    for gigabytes in options.gb:
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            found = measure(Path(directory) / "work", gigabytes, options.repeats, options.sglang)
        report.append(found)
        bare = {name: found["rows"][f"bare {name}"][0] for name in ("gloo broadcast", "file write")}
        print(f"{found['gb']:.3f} GB, TP{RANKS}, buckets of {BUCKET / 2**20:g} MiB")
        print(f"{'what':<22}{'seconds':>9}{'held':>8}{'GB/s':>7}{'of broadcast':>14}{'of file write':>15}")
        for name, (seconds, held) in found["rows"].items():
            shares = [f"{bare[other] / seconds:.2f}" for other in bare]
            print(f"{name:<22}{seconds:>9.4f}{held:>8.4f}{found['gb'] / seconds:>7.2f}{shares[0]:>14}{shares[1]:>15}")
        parts = {name: seconds * 1000 for name, seconds in found["parts"].items()}
        print(
            ", ".join(f"{name} {each:.2f} ms" for name, each in parts.items())
            + f"; together {sum(parts.values()):.2f} ms"
        )
        print("paused: " + ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in found["paused"].items()))
    if options.json:
        options.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
