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
from collections.abc import Iterator
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
from megasao.megatron.optimizer import Optimizer

FORMAT = "megasao-model-1"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_model(model: MegatronModel, optimizer: Optimizer, directory: Path) -> None:
    """Write weights and Adam state into ``directory`` (made if absent). Collective; complete on return."""
    state = optimizer.adam_state()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_local_tensors(model, state))
    part = directory / _part_name(distributed.get_rank())
    if tensors:
        save_file(tensors, part)
        sync(part)
    parts = [name for name in _gather_names(part.name if tensors else "") if name]
    if distributed.get_rank() == 0:
        steps = {str(_step(values)) for values in state.values()}
        assert len(steps) <= 1, f"Adam counts differ between parameters: {steps}"
        manifest = {
            "format": FORMAT,
            "role": model.role,
            "adam_step": int(steps.pop()) if steps else 0,
            "parts": parts,
        }
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
    trained = {id(parameter) for group in optimizer.megatron.param_groups for parameter in group["params"]}
    with TensorFiles(directory / name for name in manifest["parts"]) as files:
        for local in local_parameters(model):
            assign(local.parameter, _read(files, "weight", local, model, directory), local.rule)
            if manifest["adam_step"] and id(local.parameter) in trained:
                moments = {name: _read(files, name, local, model, directory) for name in MOMENTS}
                _restore(optimizer, local.parameter, moments, manifest["adam_step"])


def _local_tensors(
    model: MegatronModel, state: dict[torch.nn.Parameter, dict[str, Any]]
) -> Iterator[tuple[str, Tensor]]:
    kinds: dict[str, Any] = {"weight": lambda local: local.parameter}
    for moment in MOMENTS:
        kinds[moment] = lambda local, moment=moment: state.get(local.parameter, {}).get(moment)
    for kind, of in kinds.items():
        for name, tensor in local_hf_tensors(model, of):
            yield f"{kind}:{name}", tensor.cpu().clone()


def _read(files: TensorFiles, kind: str, local: LocalParameter, model: MegatronModel, directory: Path) -> Tensor:
    names = [f"{kind}:{name}" for name in local.rule.hf]
    absent = [name for name in names if name not in files.names()]
    if absent:
        raise ValueError(f"{directory} lacks the tensor {absent[0]}; it is a checkpoint of another model")
    parts = [files.read(name, local.rule.shard, local.shard, local.shards) for name in names]
    return merge(local.rule, parts, model.hf_config)


def _restore(optimizer: Optimizer, parameter: torch.nn.Parameter, moments: dict[str, Tensor], step: int) -> None:
    for part in optimizer.megatron.chained_optimizers:
        if part.optimizer is not None and any(
            parameter is candidate for group in part.optimizer.param_groups for candidate in group["params"]
        ):
            part.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                **{name: value.to(parameter.device) for name, value in moments.items()},
            }


def _step(values: dict[str, Any]) -> int:
    return int(values["step"])


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
    return f"part-{rank:05d}.safetensors" if rank >= 0 else ""


def _gather_names(name: str) -> list[str]:
    """Each rank's part name ("" for none), on every rank."""
    rank = torch.tensor([distributed.get_rank() if name else -1], dtype=torch.int64)
    ranks = [torch.empty_like(rank) for _ in range(distributed.get_world_size())]
    distributed.all_gather(ranks, rank)
    return [_part_name(int(value)) for value in ranks]
