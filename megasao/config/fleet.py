"""How the SGLang servers of a run lie on the rollout nodes of a cluster: from the config alone.

Invariants (tests assert them):
- every server has its place and its GPUs, and every node has as many servers;
- a server that spans several nodes has them for itself, with all of their GPUs;
- a worker is on the first node of its first server.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasao.config.errors import Problem

if TYPE_CHECKING:
    from megasao.config.root import Config


@dataclass(frozen=True)
class Place:
    """Where a server is: its ``nodes``, from 0 among the rollout nodes, and which of the servers there it is."""

    nodes: tuple[int, ...]
    slot: int


@dataclass(frozen=True)
class FleetLayout:
    """The servers of a run. They are counted over all workers, as ``all_engine_names`` has them."""

    workers: int
    servers_per_worker: int
    nodes: int
    nodes_per_server: int
    gpus_per_server: int

    @property
    def servers(self) -> int:
        """Servers of the run, those for evaluation among them."""
        return self.workers * self.servers_per_worker

    @property
    def per_node(self) -> int:
        """Servers of a node."""
        return 1 if self.nodes_per_server > 1 else self.servers // self.nodes

    @property
    def ports_on_node(self) -> int:
        """Ports that the servers of a node need: one each, and one where the nodes of a server of several meet."""
        return self.per_node + (1 if self.nodes_per_server > 1 else 0)

    @property
    def gpus_on_node(self) -> int:
        """GPUs of a server on each of its nodes."""
        return self.gpus_per_server // self.nodes_per_server

    def place(self, server: int) -> Place:
        """Where a server is."""
        if self.nodes_per_server > 1:
            first = server * self.nodes_per_server
            return Place(tuple(range(first, first + self.nodes_per_server)), 0)
        return Place((server // self.per_node,), server % self.per_node)

    def node_of_worker(self, worker: int) -> int:
        """The node of a worker, from 0."""
        return self.place(worker * self.servers_per_worker).nodes[0]

    @property
    def most_workers_on_a_node(self) -> int:
        """Workers of the fullest node."""
        return max(Counter(self.node_of_worker(worker) for worker in range(self.workers)).values())


def fleet_layout(config: "Config") -> FleetLayout | None:
    """The fleet of a run on a cluster; None where its rollouts need no servers. For a config without problems."""
    if config.rollout.engine != "sglang" or config.slurm is None:
        return None
    return FleetLayout(
        workers=config.rollout.workers,
        servers_per_worker=config.rollout.sglang.servers + 1,
        nodes=config.slurm.rollout_nodes,
        nodes_per_server=config.slurm.nodes_per_server,
        gpus_per_server=config.rollout.sglang.gpus_of_server(),
    )


def fleet_problems(config: "Config") -> Iterator[Problem]:
    """Why the servers do not lie evenly on their nodes, or lack GPUs there."""
    fleet, options = fleet_layout(config), config.slurm
    if fleet is None or options is None or config.rollout.sglang.wrong_sizes():
        return
    if config.rollout.sglang.first_port is not None:
        reason = "the nodes of a Slurm job say which of their ports are free; leave it null"
        yield Problem("rollout.sglang.first_port", reason)
    yield from _nodes(fleet) if fleet.nodes_per_server == 1 else _spanned_nodes(fleet)
    yield from _gpus(fleet, options.gpus_per_node)
    planned = config.plan
    if planned.rollout_gpus and planned.engine_gpus != fleet.gpus_per_server:
        reason = f"the plan would be of another fleet: rollout.sglang.server_args have {fleet.gpus_per_server} GPUs"
        yield Problem("plan.engine_gpus", f"{reason} in a server, plan.engine_gpus = {planned.engine_gpus}")


def _named(fleet: FleetLayout) -> str:
    return (
        f"{fleet.servers} servers (rollout.workers = {fleet.workers}, each with rollout.sglang.servers = "
        f"{fleet.servers_per_worker - 1} and one for evaluation)"
    )


def _nodes(fleet: FleetLayout) -> Iterator[Problem]:
    if fleet.servers % fleet.nodes:
        reason = f"{_named(fleet)} cannot be spread evenly over {fleet.nodes} nodes; give a number that divides them"
        yield Problem("slurm.rollout_nodes", reason)


def _spanned_nodes(fleet: FleetLayout) -> Iterator[Problem]:
    if fleet.gpus_per_server % fleet.nodes_per_server:
        reason = f"the {fleet.gpus_per_server} GPUs of a server (tp_size times pp_size) are no whole number on each of"
        yield Problem("slurm.nodes_per_server", f"{reason} {fleet.nodes_per_server} nodes")
    if (needed := fleet.servers * fleet.nodes_per_server) != fleet.nodes:
        reason = f"{_named(fleet)} of {fleet.nodes_per_server} nodes each need {needed} nodes, got {fleet.nodes}"
        yield Problem("slurm.rollout_nodes", reason)


def _gpus(fleet: FleetLayout, on_node: int) -> Iterator[Problem]:
    """On nodes without GPUs a server is what its ranks are: processes."""
    if not on_node:
        return
    if fleet.nodes_per_server == 1 and fleet.gpus_per_server > on_node:
        reason = f"a server of {fleet.gpus_per_server} GPUs does not fit a node of slurm.gpus_per_node = {on_node}"
        yield Problem("slurm.nodes_per_server", f"{reason}; use {-(-fleet.gpus_per_server // on_node)}")
    elif fleet.nodes_per_server > 1 and fleet.gpus_per_server != fleet.nodes_per_server * on_node:
        reason = f"{fleet.nodes_per_server} nodes have {fleet.nodes_per_server * on_node} GPUs, and a server has"
        yield Problem("slurm.nodes_per_server", f"{reason} {fleet.gpus_per_server}: it must have all of its nodes")
    elif not fleet.servers % fleet.nodes and fleet.per_node * fleet.gpus_per_server > on_node:
        reason = f"{fleet.per_node} servers of {fleet.gpus_per_server} GPUs on a node of {on_node}"
        yield Problem("slurm.rollout_nodes", f"{reason}; use more nodes")
