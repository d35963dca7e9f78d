"""What test worlds run for publishing on disk: JSON in, JSON out."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor, distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasao.config.rollout import TransportConfig
from megasao.config.weights import WeightsConfig
from megasao.launch.ports import free_ports
from megasao.megatron import runtime
from megasao.megatron.bridge import export_hf, outgoing
from megasao.megatron.bridge import share as share_module
from megasao.megatron.bridge.share import RankShare, ShareCopy
from megasao.megatron.checkpoint import save_model
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.optimizer import build_optimizer
from megasao.training.publishing import DiskPublishing
from megasao.weights import directory
from megasao.weights.publisher import WeightPublisher
from tests.megatron.tiny import make_config

Payload = dict[str, Any]


def publish(payload: Payload) -> Any:
    """For each of ``jobs``: publish the model on disk, and save the same weights as a training checkpoint.

    Gives the directory (rank 0), the most bytes that publishing held beside the model, and this rank's bytes written.
    """
    return [_publish(job) for job in payload["jobs"]]


def _publish(job: Payload) -> Any:
    config = make_config(Path(job["path"]), job["parallel"], job.get("model"))
    topology = runtime.set_layout(config.parallel, seed=1)
    model = build_model("actor", Path(job["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer)
    save_model(model, optimizer, Path(job["out"]) / "checkpoint")
    publisher = None
    if topology.rank == 0:
        address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        publisher = WeightPublisher(address, config=TransportConfig())
    options = WeightsConfig(bucket_bytes=job["bucket_bytes"], shard_bytes=2**20, **job.get("weights", {}))
    publishing = DiskPublishing(Path(job["out"]) / "published", options, topology, publisher)
    with mistake(job.get("mistake")):
        publishing.publish(0, model)
        peak = peak_bytes(lambda: publishing.publish(1, model))
    whole = peak_bytes(lambda: export_hf(model))
    found = sorted(map(str, publishing.root.glob("000001-*"))) if topology.rank == 0 else []
    shares = outgoing.outgoing(model, fp8=options.dtype == "fp8_block")
    written = sum(info.nbytes for share in shares if share.mine for info in share.infos)
    publishing.close()
    keep_share(model, job, topology.rank)
    runtime.clear_layout()
    return {"directory": found, "peak": peak, "gathered_peak": whole, "written": written}


def keep_share(model: MegatronModel, job: Payload, rank: int) -> None:
    """Write what this rank would give out from its memory."""
    with mistake(job.get("mistake")):
        share = RankShare(model, job["bucket_bytes"], fp8="weights" in job)
        memory = ShareCopy(share, torch.zeros(share.total_bytes, dtype=torch.uint8))
        manifest = share.manifest(memory.fill())
    out = Path(job["out"])
    (out / f"{rank}.manifest").write_bytes(manifest)
    (out / f"{rank}.share").write_bytes(memory.data)


def cannot_write(payload: Payload) -> Any:
    """The error of each rank where the last one cannot write."""
    config = make_config(Path(payload["path"]), payload["parallel"])
    topology = runtime.set_layout(config.parallel, seed=1)
    model = build_model("actor", Path(payload["path"]), config)
    publisher = None
    if topology.rank == 0:
        publisher = WeightPublisher(f"tcp://127.0.0.1:{free_ports(1)[0]}", config=TransportConfig())
    root = Path(payload["out"]) / "published"
    publishing = DiskPublishing(root, WeightsConfig(), topology, publisher)
    last = topology.rank == topology.world_size - 1
    try:
        with patch("megasao.storage.writer.os.pwrite", _full) if last else nullcontext():
            publishing.publish(0, model)
        error = ""
    except RuntimeError as failure:
        error = str(failure)
    distributed.barrier()
    left = [path.name for path in root.iterdir()]
    distributed.barrier()
    publishing.publish(1, model)
    after = [path.name.partition("-")[0] for path in root.iterdir()] if topology.rank == 0 else ["000001"]
    late = _rank_0_alone(publishing, model)
    publishing.close()
    runtime.clear_layout()
    return [error, left, after, late]


def _rank_0_alone(publishing: DiskPublishing, model: MegatronModel) -> str:
    """The error of each rank where rank 0 cannot put the version together."""
    with patch.object(directory, "complete", side_effect=OSError(5, "Input/output error")):
        try:
            publishing.publish(2, model)
        except RuntimeError as failure:
            return str(failure)
    return ""


def _full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def peak_bytes(work: Any) -> int:
    """Most bytes of tensors that ``work()`` made and had at once."""
    with Watch() as watch:
        work()
    return watch.peak


class Watch(TorchDispatchMode):
    """Counts the memory of tensors that operations make; a profiler would miss what other threads free."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tensors_in([args, kwargs or {}])}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def mistake(name: str | None) -> Iterator[None]:
    """A deliberate mistake: ``order`` puts shards together, or says that they lie, the wrong way round, ``blocks``
    begins blocks at the cut, ``alone`` makes scales of this rank's numbers."""
    if name is None:
        yield
        return
    if name == "blocks":
        with patch.object(outgoing.Outgoing, "place", lambda self, part, start: (start, 0)):
            yield
        return
    if name == "alone":
        with patch.object(outgoing.distributed, "all_reduce"):
            yield
        return
    right, placed = outgoing._whole_rows, share_module._piece

    def turned(chunk: Any, pieces: list[Tensor]) -> Iterator[Any]:
        return right(chunk, pieces[::-1])

    def misplaced(of: Any, part: int, offset: int) -> Any:
        piece = placed(of, part, offset)
        if piece is None or piece.whole == piece.shape:
            return piece
        last = piece.whole[piece.dim] - piece.shape[piece.dim]
        return msgspec.structs.replace(piece, start=last - piece.start)

    with patch.object(outgoing, "_whole_rows", turned), patch.object(share_module, "_piece", misplaced):
        yield


def not_finite(payload: Payload) -> Any:
    """The error of each rank where a number of the last one's shard is none, in FP8; then it is mended."""
    config = make_config(Path(payload["path"]), payload["parallel"])
    topology = runtime.set_layout(config.parallel, seed=1)
    model = build_model("actor", Path(payload["path"]), config)
    publisher = None
    if topology.rank == 0:
        publisher = WeightPublisher(f"tcp://127.0.0.1:{free_ports(1)[0]}", config=TransportConfig())
    root = Path(payload["out"]) / "published"
    publishing = DiskPublishing(root, WeightsConfig(dtype="fp8_block"), topology, publisher)
    number = dict(model.modules[0].named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"].data[3, 5]
    before = number.item()
    if topology.rank == topology.world_size - 1:
        number.fill_(float("nan"))
    error = ""
    try:
        publishing.publish(0, model)
    except RuntimeError as failure:
        error = str(failure)
    distributed.barrier()
    left = [path.name for path in root.iterdir()]
    distributed.barrier()
    number.fill_(before)
    publishing.publish(1, model)
    after = [path.name.partition("-")[0] for path in root.iterdir()] if topology.rank == 0 else ["000001"]
    publishing.close()
    runtime.clear_layout()
    return [error, left, after]
