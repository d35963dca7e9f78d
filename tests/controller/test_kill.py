"""kill -9 of a real controller process under load: nothing that was acknowledged is lost, nothing is trained on twice.

The workers here speak the protocol by hand and keep their own ledger of what was acknowledged to them.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
from controller_support import PATIENCE_S, WireWorker, free_address, make_config, make_run, trajectory

from megasao.config.load import dump_config
from megasao.controller.recovery import Opened
from megasao.trajectories.ledger import Batch
from megasao.trajectories.schema import from_batch, from_ipc
from megasao.transport.client import ControllerClient
from megasao.transport.messages import BatchRequest, Credit, Failure, FetchRequest, Hello, Refused, Waiting, Welcome

BATCH = 8
STEPS = 15
FREE = 6


class Worker(threading.Thread):
    """Plays leases at once; keeps results until they are acknowledged, and says hello again when told to."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(daemon=True)
        self.wire = WireWorker(address, name)
        self.generator = random.Random(name)
        self.version = 0
        self.unacked = {}
        self.acked: list[str] = []
        self.running = []
        self.stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._say_hello()
            while not self.stopping.is_set():
                self._turn()
        except BaseException as error:
            self.failure = error
        finally:
            self.wire.close()

    def _say_hello(self) -> None:
        rows = [row.trajectory_id for rows in self.unacked.values() for row in rows]
        self.wire.send(Hello(self.wire.name, [*rows, *(lease.lease_id for lease in self.running)]))
        self.wire.send(Credit(max(0, FREE - len(self.running)), self.version, max(0, FREE - len(self.running))))
        for seq, rows in list(self.unacked.items()):
            del self.unacked[seq]
            self._submit(rows)

    def _submit(self, rows) -> None:
        self.unacked[self.wire.submit(rows)] = rows

    def _turn(self) -> None:
        if self.wire.poll(200) is None:
            self._say_hello()
        for seq in [seq for seq in self.unacked if seq in self.wire.acks]:
            assert self.wire.acks[seq] == {}
            self.acked += [row.trajectory_id for row in self.unacked.pop(seq)]
        self.running += self.wire.leases.values()
        self.wire.leases.clear()
        for message in self.wire.others:
            if isinstance(message, Welcome):
                self.running = [lease for lease in self.running if lease.lease_id not in message.unknown_leases]
            elif isinstance(message, Refused):
                self._say_hello()
        self.wire.others.clear()
        self._play()

    def _play(self) -> None:
        if not self.running:
            return
        self.generator.shuffle(self.running)
        count = self.generator.randint(1, len(self.running))
        ended, self.running = self.running[:count], self.running[count:]
        if self.generator.random() < 0.1:
            lease = ended.pop()
            self.wire.send(Failure(10**9 + self.generator.randrange(10**9), lease.lease_id, "engine_error"))
        if ended:
            self._submit([trajectory(lease, self.version) for lease in ended])
        self.wire.send(Credit(FREE - len(self.running), self.version, FREE - len(self.running)))


class Controller:
    """The real process, started again each time it is killed."""

    def __init__(self, run) -> None:
        self.command = [sys.executable, "-m", "megasao", "controller", "--run", str(run.path)]
        self.log = (run.logs / "controller.log").open("ab")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 128 + signal.SIGTERM, (
            "the run is not finished: it must be started again"
        )
        self.log.close()


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path, free_address())
    config = make_config(
        loop={"batch_size": BATCH, "max_lag": 3, "steps": 1000},
        transport={"heartbeat_s": 0.5, "dead_after_s": 60.0},
        buffer={"max_attempts": 5},
    )
    run.config.write_text(dump_config(config))
    return run


def get_batch(client, step, version):
    while True:
        answer = client.request(BatchRequest(step, version), timeout_s=PATIENCE_S)[0]
        if not isinstance(answer, Waiting):
            return [entry.trajectory_id for entry in answer.entries]


def test_kill_9_under_load(run):
    controller = Controller(run)
    address = run.read_endpoints().controller
    workers = [Worker(address, f"rollout-{index}") for index in range(2)]
    for worker in workers:
        worker.start()
    batches: dict[int, list[str]] = {}
    killer = random.Random(1)
    with ControllerClient(address, resend_s=1.0) as client:
        for step in range(STEPS):
            if step in (3, 7, 11):
                timer = threading.Timer(killer.random() * 0.05, controller.kill)
                timer.start()
                timer.join()
                controller.start()
            batches[step] = get_batch(client, step, step)
            for worker in workers:
                worker.version = step + 1
        names = batches[STEPS - 1]
        _, payload = client.request(FetchRequest(names), timeout_s=PATIENCE_S)
        assert [row.trajectory_id for row in from_batch(from_ipc(payload))] == names
        # Lost steps are redone with the very same trajectories.
        assert {step: get_batch(client, step, step) for step in range(STEPS)} == batches
    for worker in workers:
        worker.stopping.set()
        worker.join(PATIENCE_S)
        assert worker.failure is None
    controller.stop()
    check_ledger(run, workers, batches)


def check_acknowledged(workers, journaled: set[str]) -> None:
    """Acknowledged means: this trajectory, or another one of the same prompt, is in the journal; and none is twice."""
    prompts = [name.rpartition("-")[0] for name in journaled]
    assert len(set(prompts)) == len(prompts)
    assert {name.rpartition("-")[0] for worker in workers for name in worker.acked} <= set(prompts)


def check_ledger(run, workers, batches) -> None:
    opened = Opened(run)
    trained = Counter(name for names in batches.values() for name in names)
    assert set(trained.values()) == {1}
    recorded = {r.step: r.trajectory_ids for r in opened.ledger.recovered if isinstance(r, Batch)}
    assert recorded == batches
    journaled = set(opened.store.ids)
    check_acknowledged(workers, journaled)
    assert sum(len(worker.acked) for worker in workers) >= BATCH * STEPS
    state = opened.state(make_config(loop={"batch_size": BATCH, "max_lag": 3}), _NoEnvironment(), now=0.0)
    waiting = {name for name in journaled if name in state.batches.buffer}
    dropped = sum(state.batches.dropped.values())
    assert len(journaled) == len(trained) + len(waiting) + dropped
    opened.close()


class _NoEnvironment:
    """Rebuilding the state asks for no prompt."""


def test_negative_control_a_lost_row_is_noticed(run):
    """The check above fails when an acknowledged row is not in the journal."""
    worker = Worker(run.read_endpoints().controller, "rollout-0")
    worker.wire.close()
    worker.acked.append("train-999999-1.1")
    with pytest.raises(AssertionError):
        check_acknowledged([worker], {"train-000001-1.1"})
