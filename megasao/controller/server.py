"""The controller's socket loop around ControllerState: receive, decide, make durable, answer.

Invariants:
- one tick: everything received is handled, then journal and ledger are synced once, then the answers leave; an
  acknowledgement is therefore never ahead of the disk;
- a message that is malformed, or that no rule allows, is answered by ``Refused`` and changes nothing;
- the loop never waits for a peer: what cannot be sent stays in the peer's bounded queue, and a peer that does not
  read is given up;
- a controller whose run another launch has taken over (its address is no longer the run's) ends within seconds.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import zmq

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory
from megasao.controller.intake import Intake
from megasao.controller.recovery import Opened
from megasao.controller.servers import ServerBook
from megasao.controller.state import ControllerState
from megasao.environments.base import Environment
from megasao.environments.benchmarks.background import BackgroundBenchmark
from megasao.observability.metrics import MetricsWriter
from megasao.trajectories.ipc import to_ipc
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.endpoints import bind_router
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import (
    SAY_HELLO,
    Ack,
    BatchRequest,
    CheckpointSaved,
    Credit,
    EvaluateRequest,
    EvaluationResult,
    Failure,
    Fetched,
    FetchRequest,
    FinishRequest,
    Forget,
    FromServer,
    FromTrainer,
    FromWorker,
    Heartbeat,
    Hello,
    Leases,
    Manifest,
    Refused,
    RemoveServer,
    ServerUp,
    ServerWanted,
    State,
    StateRequest,
    Status,
    StatusRequest,
    Stop,
    Stored,
    Trajectories,
    Waiting,
    Welcome,
    WorkerLacksPayload,
)

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_TICK = 512
MAX_QUEUED_ANSWERS = 1024
POLL_MS = 20
HOLD_S = 0.25
"""How long a request for an incomplete batch is held before it is answered by ``Waiting``."""
FINISH_GRACE_S = 1.0
METRICS_EVERY_S = 1.0

Incoming = FromWorker | FromTrainer | FromServer


class TakenOver(RuntimeError):
    """Another launch has the run: a node that was given up can have left this controller alive."""


class ControllerServer:
    """Owns the socket. ``opened`` holds what is on disk; ``run`` serves until FinishRequest, or ``stop``."""

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        environment: Environment,
        opened: Opened,
        *,
        address: str,
        keys: CurveKeys | None = None,
        benchmarks: Mapping[str, BackgroundBenchmark] | None = None,
    ) -> None:
        self.state: ControllerState = opened.state(config, environment, now=time.monotonic(), benchmarks=benchmarks)
        self._run = run
        self._address = address
        self._config = config
        self._opened = opened
        self._servers = ServerBook(config.transport.dead_after_s)
        self._intake = Intake(self.state, opened.journal, opened.store)
        self._queues: dict[bytes, deque[list[Any]]] = {}
        self._batch_requests: dict[bytes, tuple[BatchRequest, float]] = {}
        self._finish: FinishRequest | None = None
        self._finish_at = 0.0
        self._stopped = False
        self._metrics = MetricsWriter(run, "controller", tensorboard=False)
        self._metrics_due = 0.0
        self._lifesign = LifeSign(run.heartbeat("controller"))
        self._incarnation = f"{config.run.name}-{self.state.generation}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_router(self._context, address, high_water_mark=config.transport.high_water_mark, keys=keys)

    def run(self) -> None:
        """Serve until the trainer's FinishRequest is answered and the workers are told to stop, or until ``stop``.

        TakenOver where another launch has the run.
        """
        while not self._stopped and not self._is_finished():
            self.tick()

    def stop(self) -> None:
        """Leave ``run`` at the next tick; for signal handlers."""
        self._stopped = True

    @property
    def was_stopped(self) -> bool:
        """Whether ``stop`` ended it, and not the end of the run."""
        return self._stopped

    def close(self) -> None:
        """Close socket and files."""
        self._socket.close()
        self._context.term()
        self._metrics.close()
        self._opened.close()

    def tick(self) -> None:
        """One round; see the module."""
        self._lifesign.beat()
        self._socket.poll(POLL_MS)
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_TICK):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._receive(identity, frames, now)
        self.state.tick(now)
        self._answer_batch_requests(now)
        self._send_leases(now)
        self._make_durable(now)
        self._flush()
        self._log_metrics(now)

    # receive

    def _receive(self, identity: bytes, frames: list[bytes], now: float) -> None:
        try:
            message, payload = decode(frames, Incoming)
        except MalformedMessage as error:
            logger.warning("refused a message of %r: %s", identity, error)
            self.state.count("malformed")
            self._answer(identity, Refused(str(error)))
            return
        self.state.workers.heard(identity, now)
        self.state.count("received_bytes", sum(map(len, frames)))
        if isinstance(message, FromServer):
            self._from_server(identity, message, now)
        elif isinstance(message, FromTrainer):
            self._from_trainer(identity, message, now)
        else:
            self._from_worker(identity, message, payload, now)

    def _from_worker(self, peer: bytes, message: Any, payload: bytes, now: float) -> None:
        if self._finish is not None:
            self._answer(peer, Stop(self._finish.reason))
        match message:
            case Hello():
                unknown = self.state.hello(peer, message.peer, message.active_leases, now, message.payload)
                self._answer(peer, self._welcome(unknown, peer, now))
            case Credit():
                if not self.state.credit(peer, message.free, message.weight_version, now, message.evaluation_free):
                    self._answer(peer, Refused(SAY_HELLO))
            case Heartbeat():
                self.state.workers.reported(peer, message.stats, now)
                self._servers.uses(peer.decode(errors="replace"), message.servers)
                known = self.state.workers.has_greeted(peer)
                lost = self.state.take_back_lost(peer, message.active_leases, now) if known else []
                self._answer(peer, self._welcome(lost, peer, now) if known else Refused(SAY_HELLO))
            case Trajectories():
                refused = self._intake.take(message, payload)
                self._answer(peer, Ack(message.seq, refused))
            case Stored():
                self._answer(peer, self._intake.take_stored(message, peer))
            case WorkerLacksPayload():
                self.state.lacking(peer, message.trajectory_ids)
            case EvaluationResult():
                reason = self.state.evaluated(message)
                self._answer(peer, Ack(message.seq, {message.lease_id: reason} if reason else {}))
            case Failure():
                logger.info("lease %s failed: %s (%s)", message.lease_id, message.reason, message.detail[:500])
                self.state.failed(message.lease_id, message.reason)
                self._answer(peer, Ack(message.seq))

    def _from_server(self, peer: bytes, message: ServerUp | RemoveServer, now: float) -> None:
        match message:
            case ServerUp():
                server = self._servers.up(message.name, message.worker, message.url, now, leaving=message.leaving)
            case RemoveServer():
                try:
                    server = self._servers.remove(message.name, now)
                except ValueError as error:
                    self._answer(peer, Refused(str(error)))
                    return
        self._answer(peer, ServerWanted(not server.leaving, self._servers.is_used(server)))

    def _from_trainer(self, peer: bytes, message: Any, now: float) -> None:
        match message:
            case BatchRequest():
                self._batch_requests[peer] = (message, now + HOLD_S)
                return
            case FetchRequest():
                self._fetch(peer, message.trajectory_ids)
                return
            case StateRequest():
                watermark = {"segments": self._opened.journal.segments(), "trajectories": len(self._opened.store)}
                self._answer(peer, State({**self.state.snapshot(message.step), "journal": watermark}))
                return
            case EvaluateRequest():
                self.state.request_evaluation(message.step, message.version, now)
            case CheckpointSaved():
                self.state.checkpointed(message.step)
                self.state.batches.forget(self._opened.store.forget(self.state.batches.may_forget))
                for worker, names in self.state.take_forgotten().items():
                    self._answer(worker, Forget(names))
            case FinishRequest():
                self._begin_finish(message, now)
            case StatusRequest():
                pass
        self._answer(peer, Status(self.state.metrics(), self.state.evaluations.open))

    def _fetch(self, peer: bytes, trajectory_ids: list[str]) -> None:
        try:
            batch = self._opened.store.fetch(trajectory_ids)
            payload = to_ipc(batch)
            self.state.count("fetched_bytes", len(payload))
            self._answer(peer, Fetched(batch.num_rows), payload)
        except ValueError as error:
            self._answer(peer, Refused(str(error)))

    def _begin_finish(self, request: FinishRequest, now: float) -> None:
        if self._finish is None:
            self._finish, self._finish_at = request, now + FINISH_GRACE_S
            for peer in self.state.workers.peers:
                self._answer(peer, Stop(request.reason))

    # decide

    def _answer_batch_requests(self, now: float) -> None:
        for peer, (request, held_until) in list(self._batch_requests.items()):
            answer: Manifest | Waiting | Refused
            try:
                answer = self.state.request_batch(request.step, request.version, now)
            except ValueError as error:
                answer = Refused(str(error))
            if not isinstance(answer, Waiting) or now >= held_until:
                del self._batch_requests[peer]
                self._answer(peer, answer)

    def _send_leases(self, now: float) -> None:
        for peer, lease_ids in self.state.take_recalled().items():
            self._answer(peer, self._welcome(lease_ids, peer, now))
        if self._finish is None:
            for peer, leases in self.state.grant(now).items():
                self._answer(peer, Leases(leases))

    def _welcome(self, unknown: list[str], peer: bytes, now: float) -> Welcome:
        worker = peer.decode(errors="replace")
        servers, leaving = self._servers.of(worker, now), self._servers.leaving(worker)
        incarnation = f"{self._incarnation}.{self.state.workers.losses(peer)}"
        return Welcome(unknown, incarnation, servers, leaving)

    # make durable, answer

    def _make_durable(self, now: float) -> None:
        """Before anything of this tick leaves: rows first, then what the ledger says about them."""
        self._opened.journal.sync()
        self._opened.ledger.append(self.state.take_records())
        for line in self.state.take_finished_evaluations(now):
            self._opened.evaluations.append(line)

    def _answer(self, peer: bytes, message: Any, payload: bytes | memoryview = b"") -> None:
        queue = self._queues.setdefault(peer, deque())
        queue.append(encode(message, payload))
        if len(queue) > MAX_QUEUED_ANSWERS:
            logger.warning("%r does not read its answers; given up", peer)
            del self._queues[peer]
            self.state.lose(peer)

    def _flush(self) -> None:
        for peer in list(self._queues):
            if self._flush_peer(peer, self._queues[peer]):
                del self._queues[peer]

    def _flush_peer(self, peer: bytes, queue: deque[list[Any]]) -> bool:
        """Send what can be sent; whether nothing is left (or nobody is there to send it to)."""
        while queue:
            try:
                self._socket.send_multipart([peer, *queue[0]], zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return True
            queue.popleft()
        return True

    def _is_finished(self) -> bool:
        return self._finish is not None and time.monotonic() >= self._finish_at

    def _log_metrics(self, now: float) -> None:
        if now >= self._metrics_due:
            self._refuse_to_share()
            self._metrics_due = now + METRICS_EVERY_S
            counters = {**self.state.metrics(), "servers": self._servers.count(now)}
            self._metrics.log(self.state.batches.next_step, counters)

    def _refuse_to_share(self) -> None:
        current = self._run.taken_over_by(self._address)
        if current is not None:
            raise TakenOver(
                f"the controller of {self._run.path} is now at {current}; this one, at {self._address}, ends"
            )
