"""Collecting a distributed model into Hugging Face tensors, and writing a checkpoint directory."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from torch import Tensor, distributed

from megasao.megatron.bridge.load import TensorFiles, checkpoint_files
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import split
from megasao.megatron.bridge.table import carried_names, optional_names
from megasao.megatron.runtime import compute_device

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel

_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
)


def local_hf_tensors(
    model: "MegatronModel", of: Callable[[LocalParameter], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """Whole HF-named tensors that this rank speaks for, of ``of(parameter)`` (the weight, or an optimizer state).

    Collective over shard groups: every rank of them iterates to the end. ``of`` gives None where there is nothing.
    """
    model.finish_gathering()
    for local in local_parameters(model):
        tensor = of(local)
        if tensor is None:
            continue
        shards = [tensor.detach()]
        if local.shards > 1:
            shards = [torch.empty_like(tensor) for _ in range(local.shards)]
            distributed.all_gather(shards, tensor.detach().contiguous(), group=local.group)
        if not local.speaks:
            continue
        parts = [split(local.rule, shard, model.hf_config) for shard in shards]
        for index, name in enumerate(local.rule.hf):
            pieces = [part[index] for part in parts]
            dimension = local.rule.shard or 0
            whole = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=dimension)
            yield name, whole[: model.hf_config["vocab_size"]] if local.rule.vocabulary else whole


def export_hf(model: "MegatronModel") -> dict[str, Tensor]:
    """Every weight of the model under its Hugging Face name, on rank 0, on CPU; {} on the other ranks.

    Collective: all ranks of the world take part. A critic's head is ``value_head.weight`` and ``value_head.bias``.
    The tensors are copies: later training does not change them.
    """
    return export_tensors(model, lambda local: local.parameter)


def export_tensors(model: "MegatronModel", of: Callable[[LocalParameter], Tensor | None]) -> dict[str, Tensor]:
    """As :func:`export_hf`, for any tensor that goes with a parameter and has its shape, such as its gradient."""
    return _gather_on_rank_0({name: tensor.cpu().clone() for name, tensor in local_hf_tensors(model, of)})


def _gather_on_rank_0(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Union of the ranks' tensors (names are disjoint), sent as safetensors bytes."""
    rank, device = distributed.get_rank(), compute_device()
    if rank != 0:
        payload = torch.frombuffer(bytearray(save_tensors(mine)), dtype=torch.uint8) if mine else torch.empty(0)
        distributed.send(torch.tensor([payload.numel()], dtype=torch.int64, device=device), dst=0)
        if mine:
            distributed.send(payload.to(device), dst=0)
        return {}
    for source in range(1, distributed.get_world_size()):
        size = torch.zeros(1, dtype=torch.int64, device=device)
        distributed.recv(size, src=source)
        if size.item():
            data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
            distributed.recv(data, src=source)
            mine.update(load_tensors(data.cpu().numpy().tobytes()))
    return dict(sorted(mine.items()))


def save_hf(model: "MegatronModel", source_dir: Path, out_dir: Path) -> None:
    """Write the model as a Hugging Face checkpoint directory. Collective; on return it is complete for all ranks.

    config.json, tokenizer, generation settings and layers of multi-token prediction come from ``source_dir``. The
    directory appears at once (written beside its place, then renamed) and ends with an empty file ``COMPLETE``; an
    older one is replaced.
    """
    tensors = export_hf(model)
    if distributed.get_rank() == 0:
        if model.role == "actor":
            tensors.update(carried_tensors(model.hf_config, source_dir))
        temporary = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(tensors, source_dir, temporary)
        replace_directory(temporary, out_dir)
    distributed.barrier()


def carried_tensors(hf_config: dict[str, Any], source_dir: Path) -> dict[str, Tensor]:
    """The layers of multi-token prediction of the checkpoint at ``source_dir``, as they are; {} if it has none."""
    with TensorFiles(checkpoint_files(source_dir)) as files:
        names = (carried_names(hf_config) | optional_names(hf_config)) & files.names()
        return {name: files.read_whole(name) for name in sorted(names)}


def _write(tensors: dict[str, Tensor], source_dir: Path, directory: Path) -> None:
    for pattern in _COPIED:
        for file in source_dir.glob(pattern):
            shutil.copy2(file, directory / file.name)
    config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
    dtype = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    config.update({key: dtype for key in ("dtype", "torch_dtype") if key in config})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for file in directory.iterdir():
        sync(file)
    (directory / "COMPLETE").touch()
    sync(directory)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(temporary: Path, final: Path) -> None:
    """Put ``temporary`` in ``final``'s place; a crash leaves the old one (perhaps as ``.old``) or the new one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
