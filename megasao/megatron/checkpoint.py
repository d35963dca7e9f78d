"""Saving and loading one model's weights and Adam state, independent of the parallel layout.

Tensors are stored under their Hugging Face names (``weight:NAME``, ``exp_avg:NAME``, ``exp_avg_sq:NAME``), through the
same table as the weights' import and export, so that a checkpoint of one layout loads under any other.

Invariants (tests assert them):

- save + load gives the same weights and Adam state, bit for bit, also under another layout;
- a checkpoint without its manifest, or with a part missing or damaged, is refused: the manifest is written last;
- loading needs every tensor and leaves none over;
- a snapshot is a copy: training may go on while it is written.

The caller makes the directory appear atomically together with everything else that it stores (training/).
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, distributed

from megasao.megatron.bridge.export import local_hf_tensors, sync
from megasao.megatron.bridge.load import TensorFiles, check_shape
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import merge
from megasao.megatron.models import MegatronModel
from megasao.megatron.optimizer import MOMENTS, Optimizer
from megasao.megatron.runtime import gather_counts

FORMAT = "megasao-model-2"
_BLOCK = 1 << 24


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
        part = directory / _part_name(distributed.get_rank())
        save_file(self.tensors, part)
        sync(part)
        _write_json(_sum_file(part), {"bytes": part.stat().st_size, "crc32": _checksum(part)})

    def write_manifest(self, directory: Path) -> None:
        """Make the checkpoint whole: one rank calls this, once every rank has written its part."""
        _write_json(directory / "manifest.json", self.manifest)
        sync(directory)


def take_snapshot(model: MegatronModel, optimizer: Optimizer) -> ModelSnapshot:
    """Copy weights and Adam state to host memory. Collective.

    Under bfloat16 the weights are the optimizer's fp32 copies.
    """
    tensors = dict(_local_tensors(model, optimizer))
    writers, updates = gather_counts(bool(tensors)), max(gather_counts(optimizer.updates()))
    parts = [_part_name(rank) for rank, wrote in enumerate(writers) if wrote]
    return ModelSnapshot(tensors, {"format": FORMAT, "role": model.role, "updates": updates, "parts": parts})


def save_model(model: MegatronModel, optimizer: Optimizer, directory: Path) -> None:
    """Write weights and Adam state into ``directory`` (made if absent). Collective; complete on return."""
    snapshot = take_snapshot(model, optimizer)
    snapshot.write(directory)
    distributed.barrier()
    if distributed.get_rank() == 0:
        snapshot.write_manifest(directory)
    distributed.barrier()


def load_model(model: MegatronModel, optimizer: Optimizer, directory: Path) -> None:
    """Restore weights and Adam state from ``directory``. Collective; every rank reads only its slices.

    Raises:
        ValueError: the checkpoint is incomplete, damaged, of another role, or of another model. On every rank.
    """
    manifest = _read_manifest(directory, model)
    _verify(directory, manifest["parts"])
    with TensorFiles(directory / name for name in manifest["parts"]) as files:
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


def _read(files: TensorFiles, kind: str, local: LocalParameter, model: MegatronModel, directory: Path) -> Tensor:
    names = [f"{kind}:{name}" for name in local.rule.hf]
    absent = [name for name in names if name not in files.names()]
    if absent:
        raise ValueError(f"{directory} lacks the tensor {absent[0]}; it is a checkpoint of another model")
    parts = [files.read(name, local) for name in names]
    return merge(local.rule, parts, model.hf_config)


def _read_manifest(directory: Path, model: MegatronModel) -> dict[str, Any]:
    file = directory / "manifest.json"
    if not file.is_file():
        raise ValueError(f"{directory} is not a complete model checkpoint: it has no manifest.json")
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{file}: format {manifest.get('format')!r} is not supported; expected {FORMAT!r}")
    if manifest["role"] != model.role:
        raise ValueError(f"{directory} is a checkpoint of the {manifest['role']}, not of the {model.role}")
    absent = [name for name in manifest["parts"] if not (directory / name).is_file()]
    if absent:
        raise ValueError(f"{directory} is not a complete model checkpoint: {absent[0]} is missing")
    return manifest


def _verify(directory: Path, parts: list[str]) -> None:
    """Compare every part with its checksum; each rank reads some of them, and all of them raise."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mine = range(rank, len(parts), ranks)
    damaged = next((number for number in mine if not _is_whole(directory / parts[number])), len(parts))
    first = min(gather_counts(damaged))
    if first < len(parts):
        raise ValueError(
            f"{directory / parts[first]} is damaged: its length or checksum is not what "
            f"{_sum_file(Path(parts[first]))} says; restore the file, or go back to an older checkpoint"
        )


def _is_whole(part: Path) -> bool:
    try:
        written = json.loads(_sum_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(written == {"bytes": part.stat().st_size, "crc32": _checksum(part)})


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(file)


def _sum_file(part: Path) -> Path:
    return part.with_suffix(".sum.json")


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"
