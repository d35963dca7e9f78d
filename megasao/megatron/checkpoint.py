"""Saving and loading one model's weights and Adam state, independent of the parallel layout.

In format ``safetensors`` tensors are stored under their Hugging Face names (``megasao.storage.model_parts`` says how),
through the same table as the weights' import and export; in format ``torch_dist`` under Megatron's names, by Megatron
(:mod:`megasao.megatron.torch_dist`). Either loads under any layout, and loading needs no word of which it is.

Invariants (tests assert them):

- save + load gives the same weights and Adam state, bit for bit, also under another layout;
- a checkpoint without its manifest, or with a part missing or damaged, is refused: the manifest is written last;
- loading needs every tensor and leaves none over;
- a snapshot is a copy: training may go on while it is written.

The caller makes the directory appear atomically together with everything else that it stores (training/).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor, distributed

from megasao.families.names import shape_problem
from megasao.megatron import torch_dist
from megasao.megatron.bridge.export import local_hf_tensors
from megasao.megatron.bridge.load import check_shape, read_part
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import merge
from megasao.megatron.models import MegatronModel
from megasao.megatron.optimizer import MOMENTS, Optimizer
from megasao.megatron.runtime import gather_counts
from megasao.storage import torch_dist as torch_dist_files
from megasao.storage.atomic import sync
from megasao.storage.model_parts import (
    FORMAT,
    MANIFEST,
    damage,
    is_whole,
    manifest_of,
    part_name,
    read_manifest,
    write_json,
    write_sum,
)
from megasao.storage.reader import TensorFiles

Format = Literal["safetensors", "torch_dist"]


@dataclass(frozen=True)
class ModelSnapshot:
    """A model's state at one moment, this rank's part of it in host memory.

    Attributes:
        tensors: what this rank writes.
        manifest: what says which parts there are; the same on every rank.
    """

    tensors: dict[str, Tensor]
    manifest: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write this rank's part, then its length and checksum beside it. Not collective."""
        if not self.tensors:
            return
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / part_name(distributed.get_rank())
        save_file(self.tensors, part)
        sync(part)
        write_sum(part)

    def finish(self, directory: Path) -> None:
        """Make the checkpoint whole, once every rank has written its part. Every rank enters."""
        if distributed.get_rank() == 0:
            write_json(directory / MANIFEST, self.manifest)
            sync(directory)


@dataclass(frozen=True)
class TorchDistSnapshot:
    """The same in format torch_dist: planned by all ranks together, for one directory.

    Attributes:
        request: Megatron's, which writes and finishes.
        manifest: as above.
    """

    request: torch_dist.AsyncRequest
    manifest: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write this rank's part, then its length and checksum beside it. Not collective."""
        assert self.request.async_fn is not None
        self.request.async_fn()
        part = torch_dist_files.data_file(distributed.get_rank())
        if part in self.manifest["parts"]:
            write_sum(directory / part)

    def finish(self, directory: Path) -> None:
        """Make the checkpoint whole, once every rank has written its part. Every rank enters."""
        for finalize in self.request.finalize_fns:
            finalize()
        if distributed.get_rank() == 0:
            for name in torch_dist_files.DESCRIPTIONS:
                sync(directory / name)
                write_sum(directory / name)
            write_json(directory / MANIFEST, self.manifest)
            sync(directory)


Snapshot = ModelSnapshot | TorchDistSnapshot


def take_snapshot(model: MegatronModel, optimizer: Optimizer, directory: Path, format: Format) -> Snapshot:
    """Copy weights and Adam state to host memory, to be written to ``directory``. Collective."""
    if format == "safetensors":
        return _take_safetensors(model, optimizer)
    updates = max(gather_counts(optimizer.updates()))
    if distributed.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    request, writes = torch_dist.plan_save(model, optimizer, directory)
    parts = [torch_dist_files.data_file(rank) for rank, some in enumerate(gather_counts(writes)) if some]
    parts += torch_dist_files.DESCRIPTIONS
    return TorchDistSnapshot(request, manifest_of(model.role, updates, parts, format=torch_dist_files.FORMAT))


def _take_safetensors(model: MegatronModel, optimizer: Optimizer) -> ModelSnapshot:
    """Under bfloat16 the weights are the optimizer's fp32 copies."""
    tensors = dict(_local_tensors(model, optimizer))
    writers, updates = gather_counts(bool(tensors)), max(gather_counts(optimizer.updates()))
    parts = [part_name(rank) for rank, wrote in enumerate(writers) if wrote]
    return ModelSnapshot(tensors, manifest_of(model.role, updates, parts))


def save_model(model: MegatronModel, optimizer: Optimizer, directory: Path, format: Format = "safetensors") -> None:
    """Write weights and Adam state into ``directory`` (made if absent). Collective; complete on return."""
    snapshot = take_snapshot(model, optimizer, directory, format)
    snapshot.write(directory)
    distributed.barrier()
    snapshot.finish(directory)
    distributed.barrier()


def load_model(model: MegatronModel, optimizer: Optimizer, directory: Path) -> None:
    """Restore weights and Adam state from ``directory``. Collective; every rank reads only its slices.

    Raises:
        ValueError: the checkpoint is incomplete, damaged, of another role, or of another model. On every rank.
    """
    manifest = _read_manifest(directory, model)
    _verify(directory, manifest["parts"])
    if manifest["format"] == torch_dist_files.FORMAT:
        torch_dist.load(model, optimizer, directory, manifest)
        return
    files = TensorFiles(directory / name for name in manifest["parts"])
    _check_shapes(files, model, directory)
    for local in local_parameters(model):
        weight = _read(files, "weight", local, model, directory)
        check_shape(local.parameter, weight, local.rule)
        trained = manifest["updates"] and local.parameter.requires_grad
        moments = {name: _read(files, name, local, model, directory) for name in MOMENTS if trained}
        optimizer.restore(local.parameter, weight, moments, manifest["updates"])


def _local_tensors(model: MegatronModel, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    kinds: dict[str, Callable[[LocalParameter], Tensor | None]] = {
        "weight": lambda local: optimizer.main(local.parameter)
    }
    for moment in MOMENTS:
        kinds[moment] = lambda local, moment=moment: optimizer.moment(local.parameter, moment)  # type: ignore[misc]
    for kind, of in kinds.items():
        for name, tensor in local_hf_tensors(model, of):
            yield f"{kind}:{name}", tensor.cpu().clone()


def _check_shapes(files: TensorFiles, model: MegatronModel, directory: Path) -> None:
    """On every rank, before any of them waits for others."""
    stored = ((*info.name.partition(":"), info.shape) for info in files.infos())
    found = ((name, shape) for kind, _, name, shape in stored if kind in ("weight", *MOMENTS))
    if problem := shape_problem(model.hf_config, found):
        raise ValueError(f"{directory} {problem}; it is a checkpoint of another model")


def _read(files: TensorFiles, kind: str, local: LocalParameter, model: MegatronModel, directory: Path) -> Tensor:
    names = [f"{kind}:{name}" for name in local.rule.hf]
    absent = [name for name in names if name not in files.names()]
    if absent:
        raise ValueError(f"{directory} lacks the tensor {absent[0]}; it is a checkpoint of another model")
    parts = [read_part(files, name, local) for name in names]
    return merge(local.rule, parts, model.hf_config)


def _read_manifest(directory: Path, model: MegatronModel) -> dict[str, Any]:
    manifest = read_manifest(directory, FORMAT, torch_dist_files.FORMAT)
    if manifest["role"] != model.role:
        raise ValueError(f"{directory} is a checkpoint of the {manifest['role']}, not of the {model.role}")
    return manifest


def _verify(directory: Path, parts: list[str]) -> None:
    """Compare every part with its checksum; each rank reads some of them, and all of them raise."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mine = range(rank, len(parts), ranks)
    damaged = next((number for number in mine if not is_whole(directory / parts[number])), len(parts))
    first = min(gather_counts(damaged))
    if first < len(parts):
        raise ValueError(damage(directory / parts[first]))
