"""Trajectories into the controller: ``python benchmarks/controller.py [--megabytes 64]``.

For trajectories of 1k, 32k and 128k tokens, each way over the same bytes and in the same run:
- controller: Arrow rows over ZeroMQ to a real controller process, which validates, journals (fsync) and acknowledges;
- pickle: the same objects pickled over the same kind of sockets to a process that unpickles and acknowledges; nothing
  is checked or kept;
- file: a bare write and fsync of the Arrow bytes; memcpy: a bare copy of them.
The sender has at most 16 MiB unacknowledged, at least one message. Both pay for making bytes of Python objects, "make";
``--json FILE`` also writes the numbers.
"""

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import zmq

from megasao.config import Config
from megasao.config.load import dump_config
from megasao.config.rundir import Endpoints, RunDirectory
from megasao.launch.ports import free_ports
from megasao.trajectories.schema import Trajectory, to_batch, to_ipc
from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import bind_router, connect_dealer
from megasao.transport.messages import Ack, BatchRequest, Credit, Hello, Lease, Leases, Refused, ToWorker, Trajectories

LENGTHS = (1024, 32 * 1024, 128 * 1024)
MESSAGE_BYTES = 2 * 2**20
WINDOW_BYTES = 16 * 2**20
BYTES_A_TOKEN = 12
PATIENCE_MS = 60_000
"""A peer that is silent for longer has failed."""

Send = Callable[[int, list[Trajectory]], int]
"""(number, rows) -> bytes sent."""


def make_trajectory(name: str, tokens: int) -> Trajectory:
    """Random tokens, half of them actions."""
    generator = random.Random(name)
    return Trajectory(
        trajectory_id=name,
        prompt_id="p",
        group_id="p",
        task="speed",
        tokens=[generator.randrange(150_000) for _ in range(tokens)],
        action_mask=[index % 64 >= 32 for index in range(tokens)],
        rewards=[0.0] * (tokens - 1) + [1.0],
        weight_versions=[(0, 0)],
        turn_starts=list(range(32, tokens, 64)),
        finish_reason="done",
        rollout_logprobs=[-generator.random() if index % 64 >= 32 else 0.0 for index in range(tokens)],
    )


def own_copy(row: Trajectory) -> Trajectory:
    """With lists of its own: pickle writes an object that it meets again only once."""
    return replace(
        row,
        tokens=list(row.tokens),
        action_mask=list(row.action_mask),
        rewards=list(row.rewards),
        rollout_logprobs=list(row.rollout_logprobs or []),
        turn_starts=list(row.turn_starts),
    )


def of_lease(row: Trajectory, lease: Lease) -> Trajectory:
    """The same tokens under the names of ``lease``."""
    return replace(
        row, trajectory_id=lease.lease_id, prompt_id=lease.prompt_id, group_id=lease.group_id, task=lease.task
    )


def config_of(directory: Path) -> Config:
    """A controller that has room for everything and is never asked for a batch."""
    return Config.model_validate(
        {
            "run": {"name": "speed", "directory": str(directory)},
            "model": {"path": "none"},
            "actor": {"optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-4}},
            "environment": {"name": "calculator", "max_tokens": LENGTHS[-1]},
            "loop": {"steps": 100, "batch_size": 50_000, "max_lag": 1},
            "trainer": {"token_budget": LENGTHS[-1]},
            "rollout": {"concurrency": 100_000},
            "buffer": {"max_trajectories": 100_000, "max_bytes": 2**44, "lease_timeout_s": 600.0},
        }
    )


@contextmanager
def process(*command: str) -> Iterator[None]:
    """A child, ended with the block."""
    child = subprocess.Popen([sys.executable, *command], env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield
    finally:
        child.terminate()
        child.wait(60)


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """One message; SystemExit if none comes."""
    if not socket.poll(PATIENCE_MS):
        raise SystemExit(f"no answer in {PATIENCE_MS / 1000:.0f} s")
    return socket.recv_multipart()


def stream(messages: list[list[Trajectory]], send: Send, acknowledged: Callable[[], int]) -> tuple[float, int]:
    """(seconds, bytes) of all messages, each acknowledged, with a bounded window of bytes under way."""
    open_bytes: dict[int, int] = {}
    total, start = 0, time.perf_counter()
    for number, rows in enumerate(messages, start=1):
        size = send(number, rows)
        open_bytes[number] = size
        total += size
        while len(open_bytes) > 1 and sum(open_bytes.values()) > WINDOW_BYTES:
            open_bytes.pop(acknowledged())
    while open_bytes:
        open_bytes.pop(acknowledged())
    return time.perf_counter() - start, total


def through_controller(directory: Path, messages: list[list[Trajectory]]) -> tuple[float, int]:
    """Into the journal of a real controller. The rows get the names of the leases that it grants."""
    config = config_of(directory)
    run = RunDirectory(directory / "speed")
    run.create()
    run.config.write_text(dump_config(config), encoding="utf-8")
    ports = free_ports(3)
    run.write_endpoints(Endpoints(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", "127.0.0.1", ports[2]))
    with process("-m", "megasao", "controller", "--run", str(run.path)), zmq.Context() as context:
        address = run.read_endpoints().controller
        with (
            connect_dealer(context, address, identity=b"trainer", high_water_mark=10) as trainer,
            connect_dealer(context, address, identity=b"rollout-0", high_water_mark=10_000) as worker,
        ):
            trainer.send_multipart(encode(BatchRequest(0, 0)))
            receive(trainer)
            return lease_and_send(worker, messages)


def lease_and_send(socket: "zmq.Socket[bytes]", messages: list[list[Trajectory]]) -> tuple[float, int]:
    """Take as many leases as there are rows, then stream the rows."""
    socket.send_multipart(encode(Hello("rollout-0")))
    socket.send_multipart(encode(Credit(sum(map(len, messages)), 0, 0)))
    leases: list[Lease] = []
    while len(leases) < sum(map(len, messages)):
        message, _ = decode(receive(socket), ToWorker)
        if isinstance(message, Leases):
            leases += message.leases
    granted = iter(leases)
    for rows in messages:
        rows[:] = [of_lease(row, next(granted)) for row in rows]

    def send(number: int, rows: list[Trajectory]) -> int:
        payload = to_ipc(to_batch(rows))
        socket.send_multipart(encode(Trajectories(number, [row.trajectory_id for row in rows]), payload), copy=False)
        return len(payload)

    def acknowledged() -> int:
        while True:
            message, _ = decode(receive(socket), ToWorker)
            if isinstance(message, Refused) or (isinstance(message, Ack) and message.refused):
                raise SystemExit(f"the controller refused: {str(message)[:500]}")
            if isinstance(message, Ack):
                return message.seq

    return stream(messages, send, acknowledged)


def by_pickle(messages: list[list[Trajectory]]) -> tuple[float, int]:
    """To a process that unpickles and acknowledges."""
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with (
        process(__file__, "--unpickle", address),
        zmq.Context() as context,
        connect_dealer(context, address, identity=b"sender", high_water_mark=10_000) as socket,
    ):
        socket.send_multipart([b"0", pickle.dumps([], protocol=5)])
        receive(socket)

        def send(number: int, rows: list[Trajectory]) -> int:
            data = pickle.dumps([row.__dict__ for row in rows], protocol=5)
            socket.send_multipart([str(number).encode(), data], copy=False)
            return len(data)

        return stream(messages, send, lambda: int(receive(socket)[0]))


def unpickle(address: str) -> None:
    """The other end of :func:`by_pickle`, until it is terminated."""
    with zmq.Context() as context, bind_router(context, address, high_water_mark=10_000) as socket:
        while True:
            peer, number, data = socket.recv_multipart()
            rows = [Trajectory(**row) for row in pickle.loads(data)]
            socket.send_multipart([peer, number, str(len(rows)).encode()])


def bare(directory: Path, payloads: list[bytes]) -> dict[str, float]:
    """Seconds to copy the bytes in memory, and to write them to a file and make them durable."""
    start = time.perf_counter()
    for payload in payloads:
        bytearray(payload)
    copied = time.perf_counter()
    with (directory / "bare").open("wb", buffering=0) as file:
        for payload in payloads:
            file.write(payload)
        os.fsync(file.fileno())
    return {"memcpy": copied - start, "file": time.perf_counter() - copied}


def measure(tokens: int, megabytes: float) -> dict[str, float]:
    """Seconds, counts and bytes for trajectories of ``tokens``."""
    a_message = max(1, MESSAGE_BYTES // (tokens * BYTES_A_TOKEN))
    count = max(2, round(megabytes * 2**20 / (tokens * BYTES_A_TOKEN * a_message)))
    one = make_trajectory("t", tokens)
    messages = [[own_copy(one) for _ in range(a_message)] for _ in range(count)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pickled, pickle_bytes = by_pickle(messages)
        seconds, size = through_controller(directory, messages)
        start = time.perf_counter()
        payloads = [to_ipc(to_batch(rows)) for rows in messages]
        made = time.perf_counter() - start
        found = bare(directory, payloads)
    return {
        "trajectories": count * a_message,
        "bytes": size,
        "controller": seconds,
        "make": made,
        "pickle": pickled,
        "pickle_bytes": pickle_bytes,
        **found,
    }


def main() -> None:
    """A table, one line a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0, help="about so many MiB a length")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--unpickle", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.unpickle:
        unpickle(options.unpickle)
    print(f"{'tokens':>7} {'way':11} {'seconds':>8} {'trajectories/s':>15} {'MB/s':>8}")
    report = {}
    for tokens in LENGTHS:
        found = report[tokens] = measure(tokens, options.megabytes)
        for way in ("controller", "make", "pickle", "file", "memcpy"):
            size = found["pickle_bytes"] if way == "pickle" else found["bytes"]
            rate = f"{found['trajectories'] / found[way]:15.1f} {size / 1e6 / found[way]:8.1f}"
            print(f"{tokens:7} {way:11} {found[way]:8.3f} {rate}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
