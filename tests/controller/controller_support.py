"""A tiny environment, trajectories for leases, and a worker that plays the wire by hand."""

import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace

import zmq

from megasao.config import Config
from megasao.config.rundir import Endpoints, RunDirectory
from megasao.controller.leases import granted_version
from megasao.controller.recovery import Opened
from megasao.controller.server import ControllerServer
from megasao.controller.state import ControllerState
from megasao.environments.base import Environment, Prompt
from megasao.launch.ports import free_ports
from megasao.trajectories.buffer import summarise
from megasao.trajectories.schema import Trajectory, to_batch, to_ipc
from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import connect_dealer
from megasao.transport.messages import (
    Ack,
    Credit,
    EvaluationResult,
    Hello,
    Lease,
    Leases,
    ToWorker,
    Trajectories,
    Welcome,
)

PATIENCE_S = 120.0
"""No wait of a test depends on speed: this is only where a broken one ends."""

A, B = b"a", b"b"
"""Peers: two workers."""
ONE: dict[str, dict[str, int]] = {"rollout": {"concurrency": 1}}
"""One lease at a time."""


class TinyEnvironment(Environment):
    """Prompts with names; nobody plays them."""

    name = "tiny"
    stop_strings = ()

    def prompt(self, split, index):
        return Prompt(f"{split}-prompt-{index}", f"task{index % 2}", "", {})

    def start(self, prompt, seed):
        raise NotImplementedError

    def demonstration(self, index, seed):
        raise NotImplementedError


def make_config(**sections) -> Config:
    defaults = {
        "run": {"name": "test"},
        "model": {"path": "unused"},
        "actor": {"optimizer": {"lr": 1e-4}},
        "critic": {"optimizer": {"lr": 1e-3}},
        "loop": {"steps": 100, "batch_size": 4, "max_lag": 2},
        "rollout": {"concurrency": 16},
        "buffer": {"max_trajectories": 64, "lease_timeout_s": 60.0, "max_attempts": 2},
        "environment": {"episode_timeout_s": 0.5},
        "evaluation": {"problems": 3},
        "transport": {"heartbeat_s": 0.5, "dead_after_s": 10.0},
    }
    merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
    return Config.model_validate(merged)


def make_state(config: Config, **changes) -> ControllerState:
    fields = {"records": [], "journaled": [], "finished_evaluations": set(), "now": 0.0}
    return ControllerState(config, TinyEnvironment(), **{**fields, **changes})


def ready(config=None, *, free: int = 16, peers=(A,), **changes):
    """A state whose trainer has asked for its first batch, and whose workers have room."""
    state = make_state(config or make_config(), **changes)
    for peer in peers:
        state.hello(peer, peer.decode(), [], 0.0)
        state.credit(peer, free, 0, 0.0, free)
    state.request_batch(state.batches.next_step, 0, 0.0)
    return state


def trajectory(lease: Lease, version: int = 0, newest: int | None = None, **changes) -> Trajectory:
    """The trajectory of a lease, begun under ``version`` and ended under ``newest``."""
    spans = [(0, version)] if newest in (None, version) else [(0, version), (2, newest)]
    fields = {
        "trajectory_id": lease.lease_id,
        "prompt_id": lease.prompt_id,
        "group_id": lease.group_id,
        "task": lease.task,
        "tokens": [1, 2, 3],
        "action_mask": [False, True, True],
        "rewards": [0.0, 0.0, 1.0],
        "weight_versions": spans,
        "turn_starts": [1],
        "finish_reason": "done",
        "rollout_logprobs": [0.0, -0.5, -0.25],
    }
    return Trajectory(**{**fields, **changes})


def deliver(state: ControllerState, lease: Lease, version: int = 0, newest: int | None = None) -> str | None:
    """The pure state's way of a trajectory: screened, then accepted. Returns the reason against it."""
    row = trajectory(lease, version, newest)
    row = row if lease.want_versions else replace(row, weight_versions=None)
    [summary] = summarise(to_batch([row]), granted_version)
    reason = state.screen(summary)
    if reason is None:
        state.accept(summary)
    return reason


def granted(state: ControllerState, now: float) -> list[Lease]:
    """New leases of all workers."""
    return [lease for leases in state.grant(now).values() for lease in leases]


def ended_leases(counters: Mapping[str, float]) -> float:
    """How many training leases have ended, by the controller's counters."""
    ends = sum(number for name, number in counters.items() if name.startswith(("accepted/", "failures/", "returned/")))
    return ends - counters.get("late", 0) + counters.get("superseded", 0)


def result_of(lease: Lease, seq: int, reward: float = 1.0, version: int = 0) -> EvaluationResult:
    assert lease.evaluation_id is not None
    return EvaluationResult(
        seq, lease.lease_id, lease.evaluation_id, lease.prompt_id, reward, 2, 3, False, version, version, lease.task
    )


def run_evaluation(state, leases, reward):
    for number, lease in enumerate(leases):
        assert state.evaluated(result_of(lease, number, reward(lease), version=3)) is None


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def make_run(tmp_path, address: str) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.write_endpoints(Endpoints(address, "tcp://127.0.0.1:1", "127.0.0.1", 1))
    return run


@contextmanager
def serving(run: RunDirectory, config: Config, environment=None, keys=None):
    """A controller in a thread; ends with the block."""
    address = run.read_endpoints().controller
    server = ControllerServer(run, config, environment or TinyEnvironment(), Opened(run), address=address, keys=keys)
    failure: list[BaseException] = []

    def serve():
        try:
            server.run()
        except BaseException as error:
            failure.append(error)
            raise

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        server.close()
        assert not failure, failure


class WireWorker:
    """A worker's socket, driven by hand."""

    def __init__(self, address: str, name: str = "rollout-0", *, high_water_mark: int = 64, keys=None) -> None:
        self.context = zmq.Context()
        self.name = name
        self.socket = connect_dealer(
            self.context, address, identity=name.encode(), high_water_mark=high_water_mark, keys=keys
        )
        self.seq = 0
        self.leases: dict[str, Lease] = {}
        self.acks: dict[int, dict[str, str]] = {}
        self.others: list = []

    def send(self, message, payload: bytes = b"") -> None:
        self.socket.send_multipart(encode(message, payload))

    def hello(self, active=(), free: int = 0, version: int = 0) -> list[str]:
        """Say hello and offer credit; the leases to be forgotten."""
        self.send(Hello(self.name, list(active)))
        welcome = self.expect(Welcome)
        self.send(Credit(free, version, free))
        return welcome.unknown_leases

    def submit(self, rows: list[Trajectory], payload: bytes | None = None, lease_ids=None) -> int:
        """Send trajectories; the sequence number."""
        self.seq += 1
        ids = [row.trajectory_id for row in rows] if lease_ids is None else lease_ids
        self.send(Trajectories(self.seq, ids), to_ipc(to_batch(rows)) if payload is None else payload)
        return self.seq

    def submit_acked(self, rows: list[Trajectory], **more) -> dict[str, str]:
        """Send trajectories and wait for the answer: what was refused."""
        seq = self.submit(rows, **more)
        self.until(lambda: seq in self.acks)
        return self.acks[seq]

    def poll(self, timeout_ms: int = 50):
        """Read one message and file it; None if there was none."""
        if not self.socket.poll(timeout_ms):
            return None
        message, _ = decode(self.socket.recv_multipart(), ToWorker)
        match message:
            case Leases(leases=leases):
                self.leases |= {lease.lease_id: lease for lease in leases}
            case Ack():
                assert message.seq not in self.acks, f"seq {message.seq} was acked twice"
                self.acks[message.seq] = message.refused
            case _:
                self.others.append(message)
        return message

    def until(self, condition) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, (self.leases.keys(), self.acks, self.others)
            self.poll()

    def expect(self, kind):
        """Wait for a message of this kind."""
        self.until(lambda: any(isinstance(message, kind) for message in self.others))
        found = next(message for message in self.others if isinstance(message, kind))
        self.others.remove(found)
        return found

    def get_leases(self, count: int) -> list[Lease]:
        """Wait for this many leases; they are taken out."""
        self.until(lambda: len(self.leases) >= count)
        taken = list(self.leases.values())[:count]
        for lease in taken:
            del self.leases[lease.lease_id]
        return taken

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
