"""Which leases are given, and to which worker. Pure: ``now`` and what the trainer asks for are given by the caller.

Invariants:
- before the trainer's first batch request no training lease is given;
- sync mode: training leases exist only for a step that the trainer waits for, exactly as many as it still needs;
- a lease reserves room for its whole group, so that a group that was begun can always be completed.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from megasao.config import Config
from megasao.controller.admission import Admission
from megasao.controller.batches import BatchBook
from megasao.controller.evaluations import EvaluationBook
from megasao.controller.groups import GroupBook
from megasao.controller.leases import TRAIN, Held, Key, LeaseBook, parse_lease_id
from megasao.controller.lessor import Lessor
from megasao.controller.prompts import PromptSource
from megasao.controller.workers import Worker, WorkerBook
from megasao.trajectories.ledger import Record
from megasao.transport.messages import Lease

OWN_MODES = {"greedy": 0.0, "sampled": 1.0}
"""Evaluations on the environment's own problems, with their temperatures; the others are benchmarks."""


@dataclass(frozen=True)
class Demand:
    """What the trainer has asked for: ``version`` is that of its weights, None before it said so; ``begun``: a batch,
    some time; ``waits``: for one now that has still to be assembled."""

    version: int | None
    begun: bool
    waits: bool


@dataclass
class TrainingRoom:
    """Leases that may be given: ``lacking`` rollouts of ``begun`` groups, and ``new_groups`` whole ones."""

    begun: set[str]
    lacking: int
    new_groups: int

    def take(self, group: str, size: int) -> None:
        """A rollout of ``group`` is leased."""
        if group in self.begun:
            self.lacking -= 1
        else:
            self.begun.add(group)
            self.new_groups -= 1
            self.lacking += size - 1


class Granting:
    """Chooses from the controller's books, and enters in them what it gives."""

    def __init__(
        self,
        config: Config,
        lessor: Lessor,
        *,
        admission: Admission,
        workers: WorkerBook,
        leases: LeaseBook,
        prompts: PromptSource,
        groups: GroupBook,
        batches: BatchBook,
        evaluations: EvaluationBook,
    ) -> None:
        self._config, self._lessor, self._admission = config, lessor, admission
        self._workers, self._leases, self._prompts = workers, leases, prompts
        self._groups, self._batches, self._evaluations = groups, batches, evaluations

    def grant(self, demand: Demand, now: float, records: list[Record]) -> dict[bytes, list[Lease]]:
        """New leases by worker, spread over the workers with room: evaluations, which take no room of training, then
        training. Adds to ``records`` what must be durable before they leave."""
        granted: dict[bytes, list[Lease]] = {}
        room = self.training_room(demand)
        self._spread(granted, now, training=False, next_lease=lambda peer: self._next_evaluation(demand))
        self._spread(
            granted, now, training=True, next_lease=lambda peer: self._next_training(peer, demand, room, now, records)
        )
        return granted

    def training_room(self, demand: Demand) -> TrainingRoom:
        """How many more training leases may be given now."""
        if not demand.begun:
            return TrainingRoom(set(), 0, 0)
        begun = self._begun_groups()
        lacking = sum(self._groups.expected(group) - number for group, number in begun.items())
        leased = self._leases.training + lacking
        waiting, nbytes = len(self._batches.buffer), self._batches.buffer.nbytes
        room = self._admission.room(waiting=waiting, waiting_bytes=nbytes, leased=leased) // self._groups.size
        return TrainingRoom(set(begun), lacking, max(0, min(room, self._groups_needed(demand) - len(begun))))

    def _begun_groups(self) -> dict[str, int]:
        """How many trajectories of each group wait or are on lease."""
        begun: dict[str, int] = {}
        for summary in self._batches.buffer.waiting():
            begun[summary.group_id] = begun.get(summary.group_id, 0) + 1
        for held in self._leases.all():
            if held.key.is_training:
                group = self._groups.name(held.key.index)
                begun[group] = begun.get(group, 0) + 1
        return begun

    def _groups_needed(self, demand: Demand) -> int:
        """How many groups may be under way: for the step that is waited for, or for all that is left of the run.

        What is begun while the trainer is at work will be stale for its next step: no more of it than may be used.
        """
        loop = self._config.loop
        a_batch = loop.batch_size // self._groups.size
        wanted = a_batch if demand.waits else 0
        if loop.mode == "sync":
            return wanted
        left = (loop.steps - self._batches.next_step + self._batches.dissolved) * a_batch
        if loop.max_stale_share < 1:
            left = min(left, wanted + self._batches.most_stale // self._groups.size)
        return left

    # one after another

    def _spread(
        self,
        granted: dict[bytes, list[Lease]],
        now: float,
        *,
        training: bool,
        next_lease: Callable[[bytes], Lease | None],
    ) -> None:
        """One lease after another, each to the worker with the most room, until there is none or no room."""
        free = [(peer, self._room(peer, training=training)) for peer in self._workers.peers]
        rooms = [(-room, order, peer) for order, (peer, room) in enumerate(free) if room]
        heapq.heapify(rooms)
        while rooms:
            taken, order, peer = heapq.heappop(rooms)
            lease = next_lease(peer)
            if lease is None:
                return
            self._give(lease, peer, now)
            granted.setdefault(peer, []).append(lease)
            if taken + 1 < 0:
                heapq.heappush(rooms, (taken + 1, order, peer))

    def _room(self, peer: bytes, *, training: bool) -> int:
        worker = self._workers.get(peer)
        if worker is None:
            return 0
        free = worker.free if training else worker.evaluation_free
        most = self._config.rollout.concurrency if training else self._config.evaluation.concurrency
        return max(0, min(free, most - self._leases.count(peer, training=training)))

    def _give(self, lease: Lease, peer: bytes, now: float) -> None:
        key = parse_lease_id(lease.lease_id)
        assert key is not None
        expires = now + self._config.buffer.lease_timeout_s
        self._leases.put(Held(lease.lease_id, key, peer, expires, lease.min_version, lease.prompt_id))
        worker = self._workers.get(peer)
        assert isinstance(worker, Worker)
        worker.free -= key.is_training
        worker.evaluation_free -= not key.is_training

    def _next_evaluation(self, demand: Demand) -> Lease | None:
        problem = self._evaluations.take(demand.version)
        if problem is None:
            return None
        evaluation, index = problem
        temperature = OWN_MODES.get(evaluation.asked.mode, self._config.benchmarks.temperature)
        return self._lessor.make(Key(evaluation.asked.evaluation_id, index), temperature, evaluation.asked.version)

    def _next_training(
        self, peer: bytes, demand: Demand, room: TrainingRoom, now: float, records: list[Record]
    ) -> Lease | None:
        rollout = self._next_rollout(room, now, records) if demand.version is not None else None
        if rollout is None or demand.version is None:
            return None
        oldest = self._oldest_to_begin_with(peer, demand.version)
        return self._lessor.make(Key(TRAIN, rollout), self._config.rollout.temperature, oldest)

    def _next_rollout(self, room: TrainingRoom, now: float, records: list[Record]) -> int | None:
        """The next one of a begun group, or the first one of a new group if there is room for all of it."""
        if room.lacking + room.new_groups == 0:
            return None
        index = self._prompts.take(
            now,
            records,
            begun=lambda index: self._groups.name(index) in room.begun,
            may_begin=room.new_groups > 0,
        )
        if index is not None:
            room.take(self._groups.name(index), self._groups.expected(self._groups.name(index)))
        return index

    def _oldest_to_begin_with(self, peer: bytes, version: int) -> int:
        """The weights that a new episode must not be older than, the trainer's being ``version``.

        If the trajectory will not say what it began with, staleness counts from here: the newest that are safe to ask
        for without holding the worker up, those it has reported.
        """
        loop = self._config.loop
        # With a bound on the share of stale ones, a lease given to stale weights would waste room for fresh ones.
        lag = loop.max_lag if loop.mode == "async" and loop.max_stale_share == 1 else 0
        worker = self._workers.get(peer)
        reported = worker.weight_version if worker is not None and not self._config.wants_versions else 0
        return max(0, version - lag, min(reported, version))
