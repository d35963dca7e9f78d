"""A worker's service to the controller: leases in, trajectories out, many episodes at once.

Invariants:
- a finished episode's result is kept until the controller acknowledges it, over any number of reconnections;
- a failure of engine, environment or time is reported as a ``Failure`` with its reason, never as a reward;
- no lease is asked for before the trainer's weights have arrived once, nor while the engine has missed a version;
- an error in any background task, or an engine that only fails, ends the service within one tick; it never goes
  on half alive.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.environments.base import EnvironmentFailure
from megasao.rollout.engines.base import EngineError
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.evaluation import EvaluationGate, WeightsLate, WeightSource, wait_for_weights
from megasao.rollout.link import ControllerLink
from megasao.trajectories.buffer import Summary
from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.ipc import to_ipc
from megasao.trajectories.schema import Trajectory, to_batch
from megasao.transport.messages import (
    SAY_HELLO,
    Ack,
    Credit,
    EvaluationResult,
    Failure,
    Forget,
    Heartbeat,
    Lease,
    Leases,
    Refused,
    Stop,
    Stored,
    Trajectories,
    Welcome,
    WorkerLacksPayload,
)

if TYPE_CHECKING:
    from megasao.rollout.members import FleetMembers

logger = logging.getLogger(__name__)

TICK_S = 0.02
"""Finished episodes within one tick travel in one Arrow batch."""

MOST_SUMMARIES = 1024
"""In one message to the controller."""

MAX_ENGINE_ERRORS = 8
"""Engine errors in a row, with no episode finished between them, after which the engine counts as dead."""


class RolloutService:
    """The protocol with the controller, and the episodes in flight. Engines are started and closed by the caller."""

    def __init__(
        self,
        config: Config,
        link: ControllerLink,
        train: EpisodeRunner,
        evaluation: EpisodeRunner,
        weights: WeightSource,
        lifesign: LifeSign,
        benchmarks: Mapping[str, EpisodeRunner] | None = None,
        members: "FleetMembers | None" = None,
        payload: PayloadJournal | None = None,
    ) -> None:
        """``train`` plays on the engine that ``weights`` keeps up to date, ``evaluation`` and ``benchmarks`` (by name)
        on an engine of their own. ``members``: of the training engine, if that is a fleet whose servers may change.
        ``payload``: where trajectories stay, if they are not sent to the controller."""
        self._members, self._payload = members, payload
        self._lifesign = lifesign
        self._config = config
        self._link = link
        self._train = train
        self._evaluation = evaluation
        self._weights = weights
        self._gate = EvaluationGate(weights, evaluation.engine, timeout_s=config.transport.weights_timeout_s)
        self._benchmarks = benchmarks or {}
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._evaluating: set[str] = set()
        self._finished: list[Trajectory] = []
        self._stopped: str | None = None
        self._engine_errors: list[Exception] = []
        self._started = time.monotonic()
        self._last_heartbeat = -float("inf")
        self._last_credit: Credit | None = None
        self._counts = {"episodes": 0.0, "evaluations": 0.0, "failures": 0.0}

    async def run(self) -> str:
        """Serve until the controller says stop; its reason. ControllerSilent, or EngineError for a dead engine."""
        receiving = asyncio.create_task(self._receive())
        try:
            while self._stopped is None:
                await self._tick()
                await asyncio.wait([receiving], timeout=TICK_S)
                if receiving.done() and self._stopped is None:
                    receiving.result()
        finally:
            await _cancel([receiving, *self._episodes.values()])
        return self._stopped

    # the controller's side

    async def _receive(self) -> None:
        while self._stopped is None:
            self._handle(await self._link.receive())

    def _handle(self, message: Any) -> None:
        match message:
            case Welcome():
                for lease_id in message.unknown_leases:
                    self._forget(lease_id)
                if self._link.welcomed(message.incarnation) and self._payload is not None:
                    self._say_what_is_held(self._payload.summaries)
                if self._members is not None:
                    self._members.told(message.servers, message.leaving)
                self._last_credit = None
            case Leases():
                for lease in message.leases:
                    self._begin(lease)
            case Ack():
                self._link.outbox.settle(message.seq)
                for row, reason in message.refused.items():
                    logger.warning("the controller refused %s: %s", row, reason)
                self._need_not_keep(message.forget)
            case Forget():
                self._need_not_keep(message.trajectory_ids)
            case Refused():
                self._refused(message)
            case Stop():
                self._stopped = message.reason
            case _:
                raise AssertionError(f"unhandled message {message!r}")

    def _refused(self, message: Refused) -> None:
        if message.reason == SAY_HELLO:
            self._link.lost()
            return
        logger.warning("the controller refused a message: %s", message.reason)

    def _begin(self, lease: Lease) -> None:
        if lease.lease_id in self._episodes or lease.lease_id in self._link.outbox.lease_ids():
            return
        play = self._play_evaluation if lease.evaluation_id is not None else self._play_training
        task = asyncio.create_task(self._guard(lease, play), name=lease.lease_id)
        self._episodes[lease.lease_id] = task
        if lease.evaluation_id is not None:
            self._evaluating.add(lease.lease_id)
        task.add_done_callback(lambda _: self._ended(lease.lease_id))

    def _ended(self, lease_id: str) -> None:
        self._episodes.pop(lease_id, None)
        self._evaluating.discard(lease_id)

    def _forget(self, lease_id: str) -> None:
        """The lease is no longer ours: stop working on it. A finished result is still sent."""
        task = self._episodes.get(lease_id)
        if task is not None:
            task.cancel()

    # episodes

    async def _play_training(self, lease: Lease) -> None:
        await wait_for_weights(self._weights, lease.min_version, self._config.transport.weights_timeout_s)
        async with asyncio.timeout(self._config.environment.episode_timeout_s):
            trajectory = await self._train.run(lease)
        self._finished.append(trajectory)
        self._counts["episodes"] += 1

    async def _play_evaluation(self, lease: Lease) -> None:
        assert lease.evaluation_id is not None
        runner = self._benchmarks.get(lease.evaluation_id.rpartition("/")[2], self._evaluation)
        async with self._gate.admit(lease.evaluation_id, lease.min_version):
            async with asyncio.timeout(self._config.environment.episode_timeout_s):
                trajectory = await runner.run(lease)
        result = evaluation_result(self._link.outbox.next_seq(), lease, trajectory)
        self._link.keep(result, [lease.lease_id])
        self._counts["evaluations"] += 1

    async def _guard(self, lease: Lease, play: Callable[[Lease], Awaitable[None]]) -> None:
        """An episode that fails is reported with its reason; the worker goes on."""
        try:
            await play(lease)
            self._engine_errors.clear()
        except Exception as error:
            reason = failure_reason(error)
            if reason == "engine_error":
                self._engine_errors.append(error)
            log = logger.exception if reason == "internal_error" else logger.warning
            log("episode %s of %s failed: %s: %s", lease.lease_id, lease.prompt_id, reason, error)
            self._fail(lease.lease_id, reason, error)

    def _fail(self, lease_id: str, reason: str, error: Exception) -> None:
        failure = Failure(self._link.outbox.next_seq(), lease_id, reason, f"{type(error).__name__}: {error}")
        self._link.keep(failure, [lease_id])
        self._counts["failures"] += 1

    # what is sent, once a tick

    async def _tick(self) -> None:
        self._lifesign.beat()
        if len(self._engine_errors) >= MAX_ENGINE_ERRORS:
            raise EngineError(f"{MAX_ENGINE_ERRORS} engine errors in a row, the last: {self._engine_errors[-1]}")
        await self._link.keep_alive(self._active())
        if self._finished:
            finished = list(self._finished)  # more may be added while these are written
            if self._payload is None:
                self._ship(finished)
            else:
                await self._store(finished, self._payload)
            del self._finished[: len(finished)]
        await self._link.flush()
        if self._link.connected:
            if self._payload is not None and (lacking := self._payload.take_lacking()):
                logger.warning("%d trajectories were asked for that are not here, first %s", len(lacking), lacking[0])
                await self._link.send(WorkerLacksPayload(lacking))
            await self._heartbeat()
            await self._offer()

    def _active(self) -> list[str]:
        """Leases whose result the controller may still expect."""
        return [*self._episodes, *(t.trajectory_id for t in self._finished), *self._link.outbox.lease_ids()]

    def _ship(self, trajectories: list[Trajectory]) -> None:
        names = [trajectory.trajectory_id for trajectory in trajectories]
        try:
            payload = to_ipc(to_batch(trajectories))
            self._link.keep(Trajectories(self._link.outbox.next_seq(), names), names, payload)
        except ValueError as error:
            self._ship_one_by_one(trajectories, error)

    def _ship_one_by_one(self, trajectories: list[Trajectory], error: ValueError) -> None:
        """A row that does not fit the schema, or no message, is reported alone; the others go on."""
        if len(trajectories) == 1:
            self._fail(trajectories[0].trajectory_id, "invalid_trajectory", error)
            return
        for trajectory in trajectories:
            self._ship([trajectory])

    async def _store(self, trajectories: list[Trajectory], payload: PayloadJournal) -> None:
        """Keep them here, durably; the controller is told what it must know of them."""
        try:
            summaries = await asyncio.to_thread(lambda: payload.keep(to_batch(trajectories)))
        except ValueError as error:
            if len(trajectories) == 1:
                self._fail(trajectories[0].trajectory_id, "invalid_trajectory", error)
                return
            for trajectory in trajectories:
                await self._store([trajectory], payload)
            return
        self._say_what_is_held(summaries)

    def _say_what_is_held(self, summaries: Sequence[Summary]) -> None:
        for first in range(0, len(summaries), MOST_SUMMARIES):
            some = list(summaries[first : first + MOST_SUMMARIES])
            message = Stored(self._link.outbox.next_seq(), some)
            self._link.keep(message, [summary.trajectory_id for summary in some])

    def _need_not_keep(self, trajectory_ids: list[str]) -> None:
        if self._payload is not None and trajectory_ids:
            self._payload.forget(trajectory_ids)

    async def _offer(self) -> None:
        """Say how many more episodes fit, when that or the weight version has changed."""
        training = len(self._episodes) - len(self._evaluating)
        credit = Credit(
            self._free(self._config.rollout.concurrency, training),
            self._train.engine.weight_version,
            self._free(self._config.evaluation.concurrency, len(self._evaluating)),
        )
        if credit != self._last_credit and await self._link.send(credit):
            self._last_credit = credit

    def _free(self, concurrency: int, active: int) -> int:
        """None before the first weights are here, and none while the engine has missed a version."""
        if self._weights.version is None or self._weights.quarantined is not None:
            return 0
        return max(0, concurrency - active)

    async def _heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat < self._config.transport.heartbeat_s:
            return
        self._last_heartbeat = now
        self._last_credit = None
        servers = self._members.urls if self._members is not None else []
        await self._link.send(Heartbeat(self.stats(), servers, self._active()))

    def stats(self) -> dict[str, float]:
        """Totals of this process, and the gauges ``active``, ``unacknowledged`` and ``weight_version``."""
        engine = self._train.engine.stats()
        uptime = time.monotonic() - self._started
        busy = engine.get("busy_seconds", 0.0)
        return {
            **engine,
            **{f"evaluation_{name}": value for name, value in self._evaluation.engine.stats().items()},
            **self._counts,
            "idle_seconds": max(0.0, uptime - busy),
            "uptime_seconds": uptime,
            "active": float(len(self._episodes)),
            "unacknowledged": float(len(self._link.outbox)),
            "weight_version": float(self._train.engine.weight_version),
        }


def evaluation_result(seq: int, lease: Lease, trajectory: Trajectory) -> EvaluationResult:
    """What the controller is told of one evaluation episode."""
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    assert lease.evaluation_id is not None and oldest is not None and newest is not None
    return EvaluationResult(
        seq=seq,
        lease_id=lease.lease_id,
        evaluation_id=lease.evaluation_id,
        prompt_id=lease.prompt_id,
        reward=sum(trajectory.rewards),
        action_tokens=sum(trajectory.action_mask),
        total_tokens=len(trajectory.tokens),
        truncated=trajectory.finish_reason != "done",
        oldest_version=oldest,
        newest_version=newest,
        task=lease.task,
    )


def failure_reason(error: Exception) -> str:
    """The reason under which an episode's failure is counted."""
    if isinstance(error, WeightsLate):
        return "weights_late"
    if isinstance(error, EngineError):
        return "engine_error"
    if isinstance(error, EnvironmentFailure):
        return error.reason
    if isinstance(error, TimeoutError):
        return "episode_timeout"
    if isinstance(error, ValueError):
        return "invalid_request"
    return "internal_error"


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
