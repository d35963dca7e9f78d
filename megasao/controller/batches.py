"""Which trajectories make up which step. Pure.

Invariants:
- a trajectory is in at most one step, or dropped, or waiting;
- a step that was assembled keeps its trajectories for good: asking again, also after a restart, gives the same; only if
  payload of it was lost with its rollout host before it was trained, it is dissolved, and assembled again;
- no batch holds a trajectory whose lag at the requested version is above ``max_lag``, nor more stale ones than
  ``max_stale_share`` of it;
- a batch is whole groups; what is left of a group that died is dropped.
"""

import math
from collections import Counter

from megasao.controller.groups import GroupBook
from megasao.controller.hosts import HostBook
from megasao.controller.leases import parse_lease_id
from megasao.trajectories.buffer import Summary, TrajectoryBuffer
from megasao.trajectories.ledger import Batch, Checkpointed, Dropped, GaveUp, Record

LOST_HOST = "lost_host"
"""Why trajectories are dropped whose payload is gone with its rollout host."""


class BatchBook:
    """The buffer, and the steps assembled from it."""

    def __init__(
        self,
        *,
        batch_size: int,
        max_lag: int,
        keep_checkpoints: int,
        max_stale_share: float = 1.0,
        groups: GroupBook | None = None,
        hosts: HostBook | None = None,
    ) -> None:
        self.buffer = TrajectoryBuffer()
        self.groups = groups or GroupBook(1, "drop")
        self._hosts = hosts
        self.batch_size = batch_size
        self.max_lag = max_lag
        self.dropped: dict[tuple[str, str], int] = {}
        """Counts by (reason, task), over the whole run."""
        self.most_stale = math.floor(max_stale_share * batch_size)
        """Most trajectories of a batch that may begin with older weights."""
        self._died: list[str] = []
        self._keep_checkpoints = keep_checkpoints
        self._next_step = 0
        self._batches: dict[int, Batch] = {}
        self._tasks: dict[int, Counter[str]] = {}
        self._used: Counter[str] = Counter()
        self._dissolved: set[int] = set()
        self._summaries: dict[str, Summary] = {}
        self._consumed_at: dict[str, int] = {}
        self._checkpoints: list[int] = []

    @property
    def next_step(self) -> int:
        """The first step that was not assembled yet."""
        return self._next_step

    def is_open(self, step: int) -> bool:
        """Whether trajectories are still to be chosen for this step."""
        return step not in self._batches or step in self._dissolved

    @property
    def dissolved(self) -> int:
        """How many steps have to be assembled again."""
        return len(self._dissolved)

    @property
    def horizon(self) -> int:
        """No checkpoint that is kept needs the batch of an earlier step than this."""
        kept = self._checkpoints[-self._keep_checkpoints :]
        return min(kept) if len(kept) == self._keep_checkpoints else 0

    @property
    def consumed(self) -> dict[str, int]:
        """Trajectories that were handed out, by task, over the whole run."""
        return {task: number for task, number in self._used.items() if number}

    # recovery

    def restore(self, record: Record) -> None:
        """Take in a ledger record (others than this book's own are passed over); call before ``add``."""
        match record:
            case Batch():
                self._take_batch(record)
            case Dropped():
                self._take_dropped(record)
                for name in record.trajectory_ids:
                    self._lose_group_of(name)
            case GaveUp(prompt_index=index):
                self.groups.lose(self.groups.name(index))
            case Checkpointed(step=step):
                # Said again, or after the trainer went back: later ones are no longer there to resume from.
                self._checkpoints = [*(earlier for earlier in self._checkpoints if earlier < step), step]

    # use

    def add(self, summary: Summary) -> None:
        """A journaled trajectory; it waits unless the ledger knows what became of it."""
        name = summary.trajectory_id
        consumed_at = self._consumed_at.get(name)
        if consumed_at is None:
            self.buffer.add(summary)
        elif consumed_at >= 0 and not self._batches[consumed_at].tasks:  # a ledger of before it had them
            self._count(consumed_at, self._tasks[consumed_at] + Counter([summary.task]))
        self._summaries[name] = summary

    def request(self, step: int, version: int, records: list[Record]) -> list[Summary] | None:
        """The trajectories of ``step``, or None while there are too few, or while a rollout host of theirs is away.

        Adds to ``records`` what must be durable before they are handed out. ValueError: a step that cannot be had.
        """
        batch = self._batches.get(step)
        if batch is not None and step not in self._dissolved:
            lost = self._lost_of(batch)
            if not lost:
                return self._replay(batch, version) if self._is_there(batch) else None
            self._dissolve(batch, lost, version, records)
        elif batch is None and step < self.next_step:
            raise self._deleted(step)
        elif batch is None and step != self.next_step:
            raise ValueError(
                f"step {step} was asked for, but the last batch in the ledger is of step {self.next_step - 1}: "
                "the trainer's checkpoint does not belong to this journal"
            )
        stale = self.buffer.take_stale(version=version, max_lag=self.max_lag)
        self._drop(stale, "stale", step, version, records)
        assembly = self.buffer.assemble(
            version=version,
            groups=self.batch_size // self.groups.size,
            most_stale=self.most_stale,
            expected=self.groups.expected,
            is_there=self._hosts.is_there if self._hosts is not None else lambda name: True,
        )
        if assembly.chosen is None:
            # They would keep the room that fresher ones need.
            self.buffer.remove(assembly.passed_over)
            self._drop(assembly.passed_over, "stale_share", step, version, records)
            return None
        tasks = Counter(summary.task for summary in assembly.chosen)
        batch = Batch(step, version, [summary.trajectory_id for summary in assembly.chosen], dict(tasks))
        self._take_batch(batch)
        records.append(batch)
        return assembly.chosen

    def lose_payload(self, trajectory_ids: list[str], version: int, records: list[Record]) -> None:
        """Payload is gone with its host: what waits of it is dropped. Steps are looked at when they are asked for."""
        names = set(trajectory_ids)
        lost = [summary for summary in self.buffer.waiting() if summary.trajectory_id in names]
        self.buffer.remove(lost)
        self._drop(lost, LOST_HOST, self.next_step, version, records)

    def lose(self, group: str, version: int, records: list[Record]) -> None:
        """A rollout of this group will never arrive."""
        if self.groups.lose(group):
            self._bury(group, self.next_step, version, records)

    def bury_dead(self, version: int, records: list[Record]) -> None:
        """After recovery: what still waits of groups that died."""
        for group in self.groups.dead:
            self._bury(group, self.next_step, version, records)

    def take_died(self) -> list[str]:
        """Groups that died since the last call: none of their rollouts is wanted any more."""
        died, self._died = self._died, []
        return died

    def checkpointed(self, step: int, records: list[Record]) -> None:
        """The checkpoint after ``step`` steps is complete."""
        record = Checkpointed(step)
        self.restore(record)
        records.append(record)

    def accept_rates(self) -> dict[str, float]:
        """By task: the share that was trained on, of all that were trained on or dropped."""
        lost: dict[str, int] = {}
        for (_, task), number in self.dropped.items():
            lost[task] = lost.get(task, 0) + number
        used = self.consumed
        tasks = sorted(lost.keys() | used.keys())
        return {task: used.get(task, 0) / (used.get(task, 0) + lost.get(task, 0)) for task in tasks}

    def may_forget(self, trajectory_id: str) -> bool:
        """Whether nobody will ask for this trajectory's payload again."""
        return self._consumed_at.get(trajectory_id, self.horizon) < self.horizon

    def forget(self, trajectory_ids: list[str]) -> None:
        """Their payload is gone, and with it what this book knows of them: it does not grow with the run."""
        for name in trajectory_ids:
            self._summaries.pop(name, None)
            self._consumed_at.pop(name, None)
        for step, batch in list(self._batches.items()):
            if step < self.horizon and not any(name in self._summaries for name in batch.trajectory_ids):
                del self._batches[step]
                del self._tasks[step]

    def _deleted(self, step: int) -> ValueError:
        return ValueError(
            f"the trajectories of step {step} were deleted after the checkpoint of step {self.horizon}; "
            "resume from a newer checkpoint"
        )

    def _lost_of(self, batch: Batch) -> set[str]:
        """What cannot be had any more of a step: of a host that is gone, or dropped for that when the controller died
        before the step was assembled again."""
        deleted = any(name not in self._consumed_at for name in batch.trajectory_ids)
        if self._hosts is None or deleted:
            return set()
        dropped = {name for name in batch.trajectory_ids if self._consumed_at.get(name) != batch.step}
        return dropped | {name for name in batch.trajectory_ids if self._hosts.is_gone(name)}

    def _is_there(self, batch: Batch) -> bool:
        return self._hosts is None or all(map(self._hosts.is_there, batch.trajectory_ids))

    def _dissolve(self, batch: Batch, lost: set[str], version: int, records: list[Record]) -> None:
        """The step has no trajectories any more: those that can be had wait again, the others are dropped."""
        held = [name for name in batch.trajectory_ids if self._consumed_at.get(name) == batch.step]
        if any(name not in self._summaries for name in held):
            self._replay(batch, version)  # an old step, whose trajectories were deleted: it says so
        self._dissolved.add(batch.step)
        self._count(batch.step, Counter())
        for summary in [self._summaries[name] for name in held]:
            del self._consumed_at[summary.trajectory_id]
            self.buffer.add(summary)
        gone = [self._summaries[name] for name in held if name in lost]
        self.buffer.remove(gone)
        self._drop(gone, LOST_HOST, batch.step, version, records)

    def _replay(self, batch: Batch, version: int) -> list[Summary]:
        if any(name not in self._summaries for name in batch.trajectory_ids):
            raise self._deleted(batch.step)
        summaries = [self._summaries[name] for name in batch.trajectory_ids]
        lag = max(summary.lag(version) for summary in summaries)
        if version != batch.version and lag > self.max_lag:
            raise ValueError(
                f"step {batch.step} was assembled for version {batch.version}; at version {version} its lag is {lag}, "
                f"above loop.max_lag = {self.max_lag}: resume with the configuration that the run was started with"
            )
        return summaries

    def _take_batch(self, batch: Batch) -> None:
        self._dissolved.discard(batch.step)
        earlier = self._batches.get(batch.step)
        for name in earlier.trajectory_ids if earlier is not None else []:
            if self._consumed_at.get(name) == batch.step:
                del self._consumed_at[name]
        self._batches[batch.step] = batch
        self._count(batch.step, Counter(batch.tasks))
        self._next_step = max(self._next_step, batch.step + 1)
        for name in batch.trajectory_ids:
            self._consumed_at[name] = batch.step

    def _count(self, step: int, tasks: Counter[str]) -> None:
        """The trajectories of ``step`` are of these tasks, whatever was counted for it before."""
        self._used.subtract(self._tasks.get(step, ()))
        self._used.update(tasks)
        self._tasks[step] = tasks

    def _drop(self, summaries: list[Summary], reason: str, step: int, version: int, records: list[Record]) -> None:
        """These have left the buffer and will not be trained on; groups that die of it follow."""
        for dropped in _by_task(summaries, reason, step, version):
            self._take_dropped(dropped)
            records.append(dropped)
        for summary in summaries:
            if self.groups.lose(summary.group_id):
                self._bury(summary.group_id, step, version, records)

    def _bury(self, group: str, step: int, version: int, records: list[Record]) -> None:
        rest = self.buffer.of_group(group)
        self.buffer.remove(rest)
        self._drop(rest, "incomplete_group", step, version, records)
        self._died.append(group)

    def _lose_group_of(self, trajectory_id: str) -> None:
        key = parse_lease_id(trajectory_id)
        assert key is not None, trajectory_id
        self.groups.lose(self.groups.name(key.index))

    def _take_dropped(self, dropped: Dropped) -> None:
        key = (dropped.reason, dropped.task)
        self.dropped[key] = self.dropped.get(key, 0) + len(dropped.trajectory_ids)
        for name in dropped.trajectory_ids:
            self._consumed_at[name] = -1


def _by_task(summaries: list[Summary], reason: str, step: int, version: int) -> list[Dropped]:
    tasks: dict[str, list[str]] = {}
    for summary in summaries:
        tasks.setdefault(summary.task, []).append(summary.trajectory_id)
    return [Dropped(step, version, task, reason, names) for task, names in tasks.items()]
