"""Collecting a distributed model into Hugging Face tensors on one rank."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, distributed

from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import split
from megasao.megatron.runtime import compute_device

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


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
