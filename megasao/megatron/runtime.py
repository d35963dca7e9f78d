"""The trainer's process world: joining it, cutting it into a parallel layout, and the few collectives others need.

Invariants (tests assert them):

- every collective is bounded by ``timeout_s``; a world can be re-cut into another layout without restarting;
- :meth:`Topology.all_reduce_data` gives the same result, bit for bit, on every rank of the world.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed

from megasao.config.model import ParallelConfig
from megasao.megatron import cpu


@dataclass(frozen=True)
class Topology:
    """Where this rank sits. Ranks with equal ``data_rank`` are given the same rows.

    ``tensor_rank`` is the rank in the dense tensor-parallel group; ``context_rank`` says which part of each row it has.
    """

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    context_rank: int
    pipeline_rank: int
    is_first_stage: bool
    is_last_stage: bool

    def all_reduce_data(self, tensor: torch.Tensor, *, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Sum, or element-wise maximum, over data-parallel ranks; a new tensor, equal on every rank of the world.

        One rank of each data-parallel index speaks for it: tensor and context rank 0 of the last stage. The others
        enter with the same shape and dtype; their values are ignored.
        """
        device = compute_device()
        neutral = 0.0 if op == "sum" else -torch.inf
        total = tensor.to(device, copy=True) if self._speaks else torch.full_like(tensor, neutral, device=device)
        distributed.all_reduce(total, op=distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX)
        return total.to(tensor.device)

    def barrier(self) -> None:
        """Wait for every rank of the world."""
        distributed.barrier()

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Give every rank the bytes that rank 0 passes; the other ranks pass None."""
        assert (payload is None) == (self.rank != 0), "exactly rank 0 has the payload"
        return broadcast_bytes(payload, source=0)

    @property
    def _speaks(self) -> bool:
        return self.tensor_rank == 0 and self.context_rank == 0 and self.is_last_stage


def compute_device() -> torch.device:
    """Device that models and collectives use: the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def broadcast_bytes(payload: bytes | None, *, source: int, group: distributed.ProcessGroup | None = None) -> bytes:
    """Bytes of world rank ``source`` on every rank of ``group`` (default: the world)."""
    device = compute_device()
    size = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64, device=device)
    distributed.broadcast(size, src=source, group=group)
    count = int(size.item())
    if count == 0:
        return b""
    if payload is not None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    else:
        data = torch.empty(count, dtype=torch.uint8, device=device)
    distributed.broadcast(data, src=source, group=group)
    return data.cpu().numpy().tobytes()


def gather_counts(value: int) -> list[int]:
    """Each rank's number, on every rank of the world."""
    return [number for (number,) in gather_numbers([value])]


def gather_numbers(values: Sequence[int]) -> list[list[int]]:
    """Each rank's numbers, the same number of them on every rank, on every rank of the world."""
    mine = torch.tensor(values, dtype=torch.int64, device=compute_device())
    found = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    world = distributed.group.WORLD
    assert world is not None
    world.allgather([found], [mine]).wait()  # what distributed.all_gather does besides takes as long as gloo
    return [each.tolist() for each in found]


def gather_bytes(payload: bytes) -> list[bytes]:
    """Each rank's bytes, on every rank of the world; for small ones."""
    sizes, device = gather_counts(len(payload)), compute_device()
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
    mine = mine.to(device)
    found = [torch.empty_like(mine) for _ in sizes]
    distributed.all_gather(found, mine)
    return [each[:size].cpu().numpy().tobytes() for each, size in zip(found, sizes, strict=True)]


def initialize_world(timeout_s: float) -> None:
    """Join the world described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    NCCL on this rank's CUDA device where CUDA is present; else gloo, with the CPU shim installed.

    Args:
        timeout_s: bound on the rendezvous and on every collective, seconds.

    Raises:
        ValueError: one of the variables is missing.
        torch.distributed.DistError, RuntimeError: the other ranks did not appear in time.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"the trainer needs the environment variables {', '.join(missing)} (the launcher sets them)")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    else:
        cpu.install()
        backend = "gloo"
    distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def shutdown_world() -> None:
    """Leave the world, together: every rank calls this at its regular end."""
    distributed.barrier()
    clear_layout()
    distributed.destroy_process_group()


def set_layout(parallel: ParallelConfig, seed: int) -> Topology:
    """Cut the world into ``parallel``'s groups, and seed the random states.

    Raises:
        ValueError: the world's size is not ``parallel.ranks``, or Megatron-Core computes this combination wrongly.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    _check(parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=parallel.timeout_s / 60,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Topology(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def clear_layout() -> None:
    """Forget the layout, so that :func:`set_layout` can make another one in the same world.

    Its process groups are destroyed, which Megatron leaves undone: an idle gloo group keeps three threads that poll,
    and the groups of a few dozen layouts would occupy a core.
    """
    from megatron.core import parallel_state

    made = set(parallel_state._global_process_group_list or [])
    parallel_state.destroy_model_parallel()
    for group in made & set(distributed.distributed_c10d._world.pg_map):
        if group is not distributed.group.WORLD:
            distributed.destroy_process_group(group)


def _check(parallel: ParallelConfig) -> None:
    if parallel.ranks != distributed.get_world_size():
        raise ValueError(
            f"parallel.ranks = {parallel.ranks}, but the world has {distributed.get_world_size()} processes; "
            "start as many as the config says"
        )
