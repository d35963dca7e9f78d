"""The controller without sockets and files: everything it knows, and what it decides. ``now`` is given by the caller.

Invariants:
- what a decision needs to be durable is in ``take_records``, to be written before any answer of it leaves;
- a trajectory is accepted once per rollout, whoever sends it and however late;
- each training lease, counted in ``leased``, ends in one of the counters ``accepted/`` (without ``late`` ones, whose
  lease had ended before), ``failures/``, ``returned/`` and ``superseded`` (by a late one), or is still out.
"""

import time as wall
from collections.abc import Callable, Mapping
from typing import Any

from megasao.config import Config
from megasao.controller.admission import Admission
from megasao.controller.batches import BatchBook
from megasao.controller.evaluations import EvaluationBook, problem_with
from megasao.controller.granting import OWN_MODES, Demand, Granting
from megasao.controller.groups import GroupBook
from megasao.controller.hosts import HostBook
from megasao.controller.leases import TRAIN, Held, Key, LeaseBook, granted_version, parse_lease_id
from megasao.controller.lessor import Lessor
from megasao.controller.prompts import PromptSource
from megasao.controller.workers import WorkerBook
from megasao.environments.base import Environment
from megasao.environments.benchmarks.background import BackgroundBenchmark
from megasao.trajectories.buffer import Summary
from megasao.trajectories.ledger import Batch, Dropped, EvaluationStarted, Failed, GaveUp, HostedAt, Record, Started
from megasao.transport.messages import EvaluationResult, Lease, Manifest, ManifestEntry, Waiting

DUPLICATE = "duplicate"


class ControllerState:
    """See the module. Rebuilt from ``records`` (the ledger) and ``journaled`` (the journal's rows, in order)."""

    def __init__(
        self,
        config: Config,
        environment: Environment,
        *,
        records: list[Record],
        journaled: list[Summary],
        finished_evaluations: set[str],
        now: float,
        wall_clock: Callable[[], float] = wall.time,
        benchmarks: Mapping[str, BackgroundBenchmark] | None = None,
    ) -> None:
        self.config = config
        self._benchmarks = benchmarks or {}
        self.generation = 1 + sum(isinstance(record, Started) for record in records)
        self.version: int | None = None
        """The weights that the trainer has reported last; None before its first request."""
        self.workers = WorkerBook(config.transport.dead_after_s)
        self.leases = LeaseBook(self.generation)
        self.prompts = PromptSource(config.buffer.max_attempts)
        self.groups = GroupBook(config.loop.group_size, config.loop.partial_groups)
        self.hosts = HostBook(config.supervision.start_timeout_s) if config.buffer.payload == "rollout" else None
        """Where payload is, if rollout hosts keep it."""
        self.batches = BatchBook(
            batch_size=config.loop.batch_size,
            max_lag=config.loop.max_lag,
            keep_checkpoints=config.checkpoint.keep,
            max_stale_share=config.loop.max_stale_share,
            groups=self.groups,
            hosts=self.hosts,
        )
        self.evaluations = EvaluationBook(self._episodes_of, config.buffer.max_attempts, finished_evaluations)
        self.admission = Admission.from_config(config)
        self.counters: dict[str, float] = {}
        self._lessor = Lessor(config, environment, self.leases, self.groups, self._benchmarks)
        self._granting = Granting(
            config,
            self._lessor,
            admission=self.admission,
            workers=self.workers,
            leases=self.leases,
            prompts=self.prompts,
            groups=self.groups,
            batches=self.batches,
            evaluations=self.evaluations,
        )
        self._wall_clock = wall_clock
        self._training = False
        self._wanted: int | None = None
        self._records: list[Record] = [Started(self.generation)]
        self._recalled: dict[bytes, list[str]] = {}
        self._restore(records, journaled, now)

    def _restore(self, records: list[Record], journaled: list[Summary], now: float) -> None:
        hosted: list[HostedAt] = []
        for record in records:
            self.prompts.restore(record)
            self.batches.restore(record)
            match record:
                case EvaluationStarted(mode=mode) if mode in OWN_MODES or mode in self._benchmarks:
                    self.evaluations.start(record, now)  # a benchmark that the run no longer has is let go
                case Failed(reason=reason):
                    self.count(f"failures/{reason}")
                    self.count("leased")
                case GaveUp():
                    self.count("given_up")
                case HostedAt():
                    hosted.append(record)
                case Batch(trajectory_ids=names) | Dropped(trajectory_ids=names):
                    for name in names:
                        self._settle(name)
        for summary in [*journaled, *self._recover_hosted(hosted)]:
            self.batches.add(summary)
            self._settle(summary.trajectory_id)
        self.batches.bury_dead(0, self._records)
        self._forget_dead_groups()
        self.prompts.recovered(due=now + self.config.transport.dead_after_s)

    def _recover_hosted(self, records: list[HostedAt]) -> list[Summary]:
        """What rollout hosts still have to keep."""
        if self.hosts is None:
            return []
        wanted: list[Summary] = []
        for record in records:
            own = [summary for summary in record.summaries if not self.batches.may_forget(summary.trajectory_id)]
            self.hosts.hold([summary.trajectory_id for summary in own], record.host)
            wanted += own
        return wanted

    # what the caller must do

    def take_records(self) -> list[Record]:
        """Ledger records that must be durable before any answer leaves."""
        records, self._records = self._records, []
        return records

    def take_recalled(self) -> dict[bytes, list[str]]:
        """Leases that workers must forget."""
        recalled, self._recalled = self._recalled, {}
        return recalled

    def take_finished_evaluations(self, now: float) -> list[dict[str, Any]]:
        """Lines for the evaluations file."""
        return self.evaluations.take_done(now, self._wall_clock())

    # from workers

    def hello(self, peer: bytes, name: str, active: list[str], now: float, payload: str = "") -> list[str]:
        """A worker (re)connected and is at work on ``active``; returns the leases that it must forget.

        Among them those it does not name: it has lost them, or they crossed this message on the wire. ``payload``:
        where it is asked for what it keeps itself.
        """
        if self.hosts is not None:
            self.hosts.arrive(host_name(peer), payload)
        self.workers.add(peer, name, now).greeted = True
        claimed = set(active)
        lost = [held.lease_id for held in self.leases.of_peer(peer) if held.lease_id not in claimed]
        for lease_id in lost:
            self._end(lease_id, "returned/forgotten")
        return [*lost, *(lease_id for lease_id in active if not self._claim(lease_id, peer, now))]

    def credit(self, peer: bytes, free: int, weight_version: int, now: float, evaluation_free: int = 0) -> bool:
        """A worker can take ``free`` more rollouts and ``evaluation_free`` more evaluation episodes; whether the worker
        has said hello."""
        known = self.workers.has_greeted(peer)
        worker = self.workers.get(peer) or self.workers.add(peer, peer.decode(errors="replace"), now)
        worker.last_heard, worker.free, worker.weight_version = now, max(0, free), weight_version
        worker.evaluation_free = max(0, evaluation_free)
        return known

    def take_back_lost(self, peer: bytes, active: list[str] | None, now: float) -> list[str]:
        """A sign of life from a worker that works on ``active``: the leases that were on their way to it when its
        connection was lost come back, and are returned. A lease counts as on its way for ``transport.dead_after_s``."""
        if active is None:
            return []
        on_the_way_s, named = self.config.transport.dead_after_s, set(active)
        newest = now + self.config.buffer.lease_timeout_s - on_the_way_s
        held = self.leases.of_peer(peer)
        lost = [each.lease_id for each in held if each.lease_id not in named and each.expires < newest]
        for lease_id in lost:
            self._end(lease_id, "returned/forgotten")
        return lost

    def lose(self, peer: bytes) -> None:
        """A peer no longer takes part; if it was a worker, its leases come back."""
        if peer in self.workers:
            self.workers.remove(peer)
            self.count("workers_lost")
        if self.hosts is not None:
            self.hosts.leave(host_name(peer))
        for held in self.leases.of_peer(peer):
            self._end(held.lease_id, "returned/lost_worker")

    def failed(self, lease_id: str, reason: str) -> bool:
        """An attempt failed for a reason outside the policy; False, and nothing changes, if there is no such lease."""
        held = self.leases.release(lease_id)
        if held is not None:
            self._fail(held.key, reason)
        return held is not None

    def screen(self, summary: Summary) -> str | None:
        """None if this trajectory is to be stored, DUPLICATE if its prompt already has one, else why it is refused."""
        key = parse_lease_id(summary.trajectory_id)
        if key is None or not key.is_training or not self.prompts.is_known(key.index):
            return "trajectory_id: does not name a training lease"
        if self.prompts.is_settled(key.index):
            self.count("duplicates")
            return DUPLICATE
        if summary.prompt_id != self._prompt_id(summary.trajectory_id, key):
            return f"prompt_id: {summary.prompt_id!r} is not the prompt of the lease"
        if summary.group_id != self.groups.name(key.index):
            return f"group_id: {summary.group_id!r} is not the group of the lease, {self.groups.name(key.index)!r}"
        if self.config.wants_logprobs and not summary.has_logprobs:
            return "rollout_logprobs: null, and the objective needs them"
        if self.config.actor.router_replay and not summary.has_routed_experts:
            return "routed_experts: null, and actor.router_replay needs them"
        if self.config.wants_versions and summary.newest_version is None:
            return "weight_versions: null, and the objective needs them"
        environment = self.config.environment
        if summary.tokens > environment.longest_episode:
            segments = environment.longest_episode // environment.max_tokens
            times = f" in {segments} segments" if segments > 1 else ""
            return f"tokens: {summary.tokens}, above environment.max_tokens = {environment.max_tokens}{times}"
        return None

    def accept(self, summary: Summary) -> None:
        """The trajectory was screened, and is in the journal (durable before it is acknowledged)."""
        self._count_end(summary.trajectory_id)
        self._settle(summary.trajectory_id)
        self.batches.add(summary)
        self.admission.saw(summary.nbytes)
        self.count(f"accepted/{summary.task}")
        self.count("accepted_tokens", summary.tokens)
        self.count("truncated", summary.truncated)

    def hosted(self, peer: bytes, summaries: list[Summary]) -> None:
        """These were accepted, and their payload is with the worker that said so."""
        if self.hosts is not None and summaries:
            host = host_name(peer)
            self.hosts.hold([summary.trajectory_id for summary in summaries], host)
            self._records.append(HostedAt(host, summaries))

    def lacking(self, peer: bytes, trajectory_ids: list[str]) -> None:
        """The worker does not have this payload of its own any more."""
        if self.hosts is not None:
            self._lose_payload(self.hosts.lack(trajectory_ids, host_name(peer)))

    def evaluated(self, result: EvaluationResult) -> str | None:
        """Count an evaluation result; why it is refused, or None."""
        key = parse_lease_id(result.lease_id)
        if key is None or key.stream != result.evaluation_id:
            return "lease_id: does not name a lease of this evaluation"
        problem = problem_with(result)
        if problem is not None:
            self.failed(result.lease_id, "refused")
            return problem
        self.leases.settle(key)
        self.evaluations.record(key, result)
        return None

    # from the trainer

    def request_batch(self, step: int, version: int, now: float) -> Manifest | Waiting:
        """The batch of ``step`` for weights ``version``, or how far it is. ValueError: a step that cannot be had."""
        chosen = self.batches.request(step, version, self._records)
        self._forget_dead_groups()
        self._training = True
        self._reached(version, went_back=self.version is not None and version < self.version)
        if chosen is None:
            self._wanted = step if self.batches.is_open(step) else None
            return Waiting(len(self.batches.buffer), self.batches.batch_size, self._describe())
        self._wanted = None
        return Manifest(step, [self._entry(summary) for summary in chosen], self.metrics())

    def request_evaluation(self, step: int, version: int, now: float) -> None:
        """Start the evaluations of ``step``, unless they were started before."""
        if self.version is None or version > self.version:
            self.version = version
        for mode in ("greedy", *(["sampled"] if self.config.evaluation.sampled else []), *self._benchmarks):
            asked = EvaluationStarted(f"step-{step:06d}/{mode}", step, mode, version)
            if self.evaluations.start(asked, now):
                self._records.append(asked)

    def _episodes_of(self, mode: str) -> int:
        benchmark = self._benchmarks.get(mode)
        return self.config.evaluation.problems if benchmark is None else benchmark.responses

    def checkpointed(self, step: int) -> None:
        """The checkpoint after ``step`` steps is complete."""
        self.batches.checkpointed(step, self._records)

    def take_forgotten(self) -> dict[bytes, list[str]]:
        """Payload that nobody will ask for again, by the worker that is to forget it."""
        if self.hosts is None:
            return {}
        names = [name for name in self.hosts.trajectories if self.batches.may_forget(name)]
        self.batches.forget(names)
        return {host.encode(): own for host, own in self.hosts.forget(names).items()}

    def snapshot(self, step: int) -> dict[str, Any]:
        """Plain data for the checkpoint after ``step`` steps: where journal and ledger stood."""
        return {
            "step": step,
            "generation": self.generation,
            "next_step": self.batches.next_step,
            "prompts_settled": self.prompts.settled,
            "waiting": len(self.batches.buffer),
            "open_evaluations": self.evaluations.open,
            "counters": dict(self.counters),
        }

    # time

    def tick(self, now: float) -> None:
        """Take back the leases of silent workers, and those whose time is over."""
        for peer in self.workers.silent(now):
            self.lose(peer)
        for held in self.leases.expire(now):
            self._fail(held.key, "lease_timeout")
        if self.hosts is not None:
            self._lose_payload(self.hosts.give_up(now))

    def grant(self, now: float) -> dict[bytes, list[Lease]]:
        """New leases by worker; see :class:`Granting`."""
        granted = self._granting.grant(self._demand(), now, self._records)
        for lease in (lease for leases in granted.values() for lease in leases):
            self.count("leased", lease.evaluation_id is None)
        return granted

    def training_room(self) -> int:
        """How many more training leases may be given now: what begun groups still lack, and whole new groups."""
        room = self._granting.training_room(self._demand())
        return room.lacking + room.new_groups * self.groups.size

    def _demand(self) -> Demand:
        return Demand(self.version, begun=self._training, waits=self._wanted is not None)

    # numbers

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + by

    def metrics(self) -> dict[str, float]:
        """Gauges, rates, and totals over the run (``dropped/``, ``failures/``, ...)."""
        dropped = self.batches.dropped
        return {
            **self.workers.rates(),
            **self.workers.engine_totals(),
            "workers": len(self.workers),
            "buffer": len(self.batches.buffer),
            "buffer_bytes": self.batches.buffer.nbytes,
            "leases": len(self.leases),
            "open_evaluations": len(self.evaluations.open),
            **self.counters,
            **{f"dropped/{reason}/{task}": number for (reason, task), number in dropped.items()},
            **{f"accept_rate/{task}": rate for task, rate in self.batches.accept_rates().items()},
        }

    # inside

    def _lose_payload(self, lost: list[str]) -> None:
        if lost:
            self.batches.lose_payload(lost, self.version or 0, self._records)
            self._forget_dead_groups()

    def _entry(self, summary: Summary) -> ManifestEntry:
        return ManifestEntry(
            trajectory_id=summary.trajectory_id,
            tokens=summary.tokens,
            action_tokens=summary.action_tokens,
            oldest_version=summary.oldest_version,
            newest_version=summary.newest_version,
            reward=summary.reward,
            truncated=summary.truncated,
            prompt_id=summary.prompt_id,
            group_id=summary.group_id,
            task=summary.task,
            nbytes=summary.nbytes if self.hosts is not None else 0,
            payload=self.hosts.address(summary.trajectory_id) if self.hosts is not None else "",
        )

    def _describe(self) -> str:
        if self.hosts is not None and self.hosts.away:
            return f"payload is with {', '.join(self.hosts.away)}, which is not there"
        if not len(self.workers):
            return "no rollout worker is connected"
        return (
            f"{len(self.batches.buffer)} waiting, {self.leases.training} on lease to {len(self.workers)} workers, "
            f"{self.training_room()} more may be leased, {len(self.evaluations.open)} evaluations open"
        )

    def _reached(self, version: int, *, went_back: bool) -> None:
        """The trainer's weights are ``version`` now. If it went back, leases that wait for newer ones are recalled."""
        self.version = version
        if not went_back:
            return
        for held in self.leases.all():
            if held.min_version > version:
                self._recalled.setdefault(held.peer, []).append(held.lease_id)
                self._end(held.lease_id, "returned/trainer_went_back")

    def _claim(self, lease_id: str, peer: bytes, now: float) -> bool:
        """A worker says it works on this lease; whether its result is still wanted."""
        held = self.leases.get(lease_id)
        key = parse_lease_id(lease_id)
        if held is not None:
            self.leases.release(lease_id)
            self.leases.put(Held(lease_id, held.key, peer, held.expires, held.min_version, held.prompt_id))
            return True
        if key is None:
            return False
        adopted = self.prompts.adopt(key.index) if key.is_training else self.evaluations.adopt(key)
        if adopted:
            expires = now + self.config.buffer.lease_timeout_s
            self.leases.put(Held(lease_id, key, peer, expires, granted_version(lease_id)))
            self.count("leased", key.is_training)
        return adopted

    def _prompt_id(self, lease_id: str, key: Key) -> str:
        held = self.leases.get(lease_id)
        if held is not None and held.prompt_id is not None:
            return held.prompt_id
        return self._lessor.named(key)[0]

    def _count_end(self, trajectory_id: str) -> None:
        """A trajectory ends its lease; a late one, whose lease has ended, ends that of a new attempt."""
        key = parse_lease_id(trajectory_id)
        held = self.leases.of_key(key) if key is not None else None
        late = held is None or held.lease_id != trajectory_id
        self.count("late", late)
        self.count("superseded", late and held is not None)

    def _settle(self, trajectory_id: str) -> None:
        key = parse_lease_id(trajectory_id)
        assert key is not None, trajectory_id
        self.prompts.settle(key.index)
        self.leases.settle(key)

    def _end(self, lease_id: str, counter: str) -> None:
        """A lease ends without result, through no fault of its prompt."""
        held = self.leases.release(lease_id)
        assert held is not None, lease_id
        self.count(counter)
        if held.key.is_training:
            self.prompts.give_back(held.key.index)
        else:
            self.evaluations.give_back(held.key)

    def _fail(self, key: Key, reason: str) -> None:
        if key.is_training:
            self.count(f"failures/{reason}")
            gave_up = self.prompts.fail(key.index, reason, self._records)
        else:
            self.count(f"evaluation_failures/{reason}")
            gave_up = self.evaluations.fail(key)
        if gave_up:
            self.count("given_up" if key.is_training else "evaluation_given_up")
            self.leases.settle(key)
        if gave_up and key.is_training:
            self.batches.lose(self.groups.name(key.index), self.version or 0, self._records)
            self._forget_dead_groups()

    def _forget_dead_groups(self) -> None:
        """Give up what is left of groups that died: nobody needs to work on it any more."""
        for group in self.batches.take_died():
            for index in self.groups.members(group):
                if self.prompts.is_settled(index):
                    continue
                self.prompts.give_up(index, "incomplete_group", self._records)
                self.count("given_up")
                held = self.leases.of_key(Key(TRAIN, index))
                if held is not None:
                    self._recalled.setdefault(held.peer, []).append(held.lease_id)
                    self.leases.settle(held.key)
                    self.count("returned/incomplete_group")


def host_name(peer: bytes) -> str:
    """A worker's name as a host of payload."""
    return peer.decode(errors="replace")
