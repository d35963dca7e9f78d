"""Saving and loading one model's weights and Adam state, independent of the parallel layout.

Tensors are stored under their Hugging Face names (``weight:NAME``, ``exp_avg:NAME``, ``exp_avg_sq:NAME``), through the
same table as the weights' import and export, so that a checkpoint of one layout loads under any other.

Invariants (tests assert them):

- save + load gives the same weights and Adam state, bit for bit, also under another layout;
- a checkpoint without its manifest, or with a part missing, is refused: the manifest is written last;
- loading needs every tensor and leaves none over.

The caller makes the directory appear atomically together with everything else that it stores (training/).
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from megasao.megatron.bridge.export import local_hf_tensors, sync
from megasao.megatron.bridge.load import TensorFiles, assign
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import merge
from megasao.megatron.models import MegatronModel
from megasao.megatron.optimizer import MOMENTS, Optimizer
from megasao.megatron.runtime import compute_device

FORMAT = "megasao-model-1"


def save_model(model: MegatronModel, optimizer: Optimizer, directory: Path) -> None:
    """Write weights and Adam state into ``directory`` (made if absent). Collective; complete on return.

    Under bfloat16 the weights are the optimizer's fp32 copies.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_local_tensors(model, optimizer))
    part = directory / _part_name(distributed.get_rank())
    if tensors:
        save_file(tensors, part)
        sync(part)
    writers, updates = _gather(bool(tensors)), max(_gather(optimizer.updates()))
    if distributed.get_rank() == 0:
        parts = [_part_name(rank) for rank, wrote in enumerate(writers) if wrote]
        manifest = {"format": FORMAT, "role": model.role, "updates": updates, "parts": parts}
        target = directory / "manifest.json"
        target.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        sync(target)
        sync(directory)
    distributed.barrier()


def load_model(model: MegatronModel, optimizer: Optimizer, directory: Path) -> None:
    """Restore weights and Adam state from ``directory``. Every rank reads only its slices.

    Raises:
        ValueError: the checkpoint is incomplete, of another role, or of another model.
    """
    manifest = _read_manifest(directory, model)
    with TensorFiles(directory / name for name in manifest["parts"]) as files:
        for local in local_parameters(model):
            weight = _read(files, "weight", local, model, directory)
            assign(optimizer.main(local.parameter), weight, local.rule)
            assign(local.parameter, weight, local.rule)
            if manifest["updates"] and local.parameter.requires_grad:
                moments = {name: _read(files, name, local, model, directory) for name in MOMENTS}
                optimizer.restore(local.parameter, moments, manifest["updates"])


def _local_tensors(model: MegatronModel, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    kinds: dict[str, Callable[[LocalParameter], Tensor | None]] = {
        "weight": lambda local: optimizer.main(local.parameter)
    }
    for moment in MOMENTS:
        kinds[moment] = partial(_moment, optimizer, moment)
    for kind, of in kinds.items():
        for name, tensor in local_hf_tensors(model, of):
            yield f"{kind}:{name}", tensor.cpu().clone()


def _moment(optimizer: Optimizer, name: str, local: LocalParameter) -> Tensor | None:
    return optimizer.moments(local.parameter).get(name)


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


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def _gather(value: int) -> list[int]:
    """Each rank's value, on every rank."""
    mine = torch.tensor([value], dtype=torch.int64, device=compute_device())
    values = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(values, mine)
    return [int(each) for each in values]
