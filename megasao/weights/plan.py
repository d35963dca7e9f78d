"""Who sends which bytes of an update to whom, and how long each transport takes at assumed speeds.

The shares are those that the trainer's ranks take when they publish (``megasao/megatron/bridge/outgoing.py``): the same
rule, applied to the whole model on no rank at all. Invariants, asserted by the tests:
- the shares of a stage are what real ranks of such a layout write;
- an estimate is the sum of its phases, each the slowest link of that phase.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megasao.config.model import ParallelConfig
from megasao.config.plan import PlanConfig
from megasao.weights.shares import spread


@dataclass(frozen=True)
class Held:
    """A parameter of one stage: bytes of its numbers, the expert that it belongs to (from 0; None is no expert), and
    bytes of its scales in FP8, by which the work is not shared."""

    nbytes: int
    expert: int | None = None
    scales: int = 0


@dataclass(frozen=True)
class Route:
    """One transport: its phases and their seconds; ``memory`` says what of the weights is held beside the models."""

    transport: str
    phases: dict[str, float]
    memory: str

    @property
    def seconds(self) -> float:
        """Of all phases, one after the other."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class WeightPlan:
    """One update: ``shares[stage][rank]`` are the bytes that each trainer rank writes, stages beside one another."""

    shares: list[list[int]]
    routes: list[Route]

    @property
    def total(self) -> int:
        """Bytes of the policy."""
        return sum(map(sum, self.shares))


def shares(stage: Sequence[Held], parallel: ParallelConfig, experts: int) -> list[int]:
    """Bytes that each rank of a stage writes. Ranks are numbered as Megatron does: tensor, context, data."""
    ranks = parallel.ranks // parallel.pipeline
    loads = [0] * ranks
    dense = [held for held in stage if held.expert is None]
    for held, rank in zip(dense, spread([held.nbytes for held in dense], ranks), strict=True):
        loads[rank] += held.nbytes + held.scales
    cut, split = parallel.expert_tensor, parallel.expert
    each = max(experts // split, 1)
    for place in range(split if experts else 0):
        mine = [held for held in stage if held.expert is not None and held.expert // each == place]
        for held, writer in zip(mine, spread([held.nbytes for held in mine], ranks // split), strict=True):
            replica, shard = divmod(writer, cut)
            loads[(replica * split + place) * cut + shard] += held.nbytes + held.scales
    return loads


def weight_plan(loads: list[list[int]], assumed: PlanConfig, workers: int) -> WeightPlan:
    """The plan of an update to ``assumed.rollout_gpus`` GPUs, whose engines belong to ``workers`` rollout workers."""
    total, fullest = sum(map(sum, loads)), max(map(max, loads))
    engines = assumed.rollout_gpus // assumed.engine_gpus
    nodes = -(-assumed.engine_gpus // assumed.node_gpus)
    link, storage, sums = (
        speed * 1e9 for speed in (assumed.link_gb_per_s, assumed.storage_gb_per_s, assumed.checksum_gb_per_s)
    )
    host, fetch, own = (
        speed * 1e9 for speed in (assumed.host_gb_per_s, assumed.fetch_gb_per_s, assumed.node_storage_gb_per_s)
    )
    to_node = link * min(assumed.engine_gpus, assumed.node_gpus)
    stream = {
        "gather": (total - loads[0][0]) / link,
        "send": workers * total / link,
        "check": total / sums,
        "load": max(total / to_node, engines * nodes * total / storage),
    }
    disk = {
        "write": max(fullest / link, total / storage),
        "check": max(total / sums, workers * total / storage),
        "load": max(total / to_node, engines * nodes * total / storage),
    }
    distributed = {
        "copy": fullest / host,
        "fetch": max(total / fetch, engines * nodes * fullest / link),  # checked as it arrives
        "write": total / own,
        "load": max(total / to_node, total / own),
    }
    return WeightPlan(
        loads,
        [
            Route("stream", stream, "trainer rank 0 and every worker hold all of it"),
            Route("disk", disk, "nobody holds more than a bucket"),
            Route("distributed", distributed, "a rank's host holds its share, a server's node all of it"),
        ],
    )
