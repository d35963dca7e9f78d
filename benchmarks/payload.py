"""Trajectories with routed experts from rollout hosts to the trainer's ranks, through the controller and past it.

    python benchmarks/payload.py [--trajectories 16] [--tokens 16384] [--bytes-a-token 1024] [--ranks 2]

The same rows twice, each with a real controller process: with ``buffer.payload = controller`` they are sent there,
journaled there, and fetched from there; with ``rollout`` each of two hosts journals its own, says what they are, and is
asked by the ranks. Each rank fetches its share, one rank after the other. ``--json FILE`` also writes the numbers.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import zmq
from controller import config_of, make_trajectory, of_lease, process, receive

from megasao.config import Config
from megasao.config.load import dump_config
from megasao.config.rundir import Endpoints, RunDirectory
from megasao.launch.ports import free_ports
from megasao.rollout.payload import PayloadService
from megasao.training.payload import PayloadReader
from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.schema import Trajectory, to_batch, to_ipc
from megasao.transport.client import ControllerClient
from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import connect_dealer
from megasao.transport.messages import (
    Ack,
    BatchRequest,
    Credit,
    Hello,
    Lease,
    Leases,
    Manifest,
    StatusRequest,
    Stored,
    ToWorker,
    Trajectories,
)

HOSTS = 2
WAIT_S = 300.0
Where = Literal["controller", "rollout"]


class Worker:
    """A rollout worker's socket; with ``journal`` it keeps what it is given."""

    def __init__(self, context: "zmq.Context[Any]", address: str, name: str, journal: Path | None) -> None:
        self.journal = PayloadJournal(journal) if journal is not None else None
        self.service = PayloadService(self.journal, "127.0.0.1") if self.journal is not None else None
        self.socket = connect_dealer(context, address, identity=name.encode(), high_water_mark=1000)
        self.socket.send_multipart(
            encode(Hello(name, payload=self.service.address if self.service is not None else ""))
        )

    def leases(self, count: int) -> list[Lease]:
        """So many; more are not taken."""
        self.socket.send_multipart(encode(Credit(count, 0, 0)))
        found: list[Lease] = []
        while len(found) < count:
            message, _ = decode(receive(self.socket), ToWorker)
            found += message.leases if isinstance(message, Leases) else []
        return found

    def deliver(self, number: int, row: Trajectory) -> None:
        """Until it is acknowledged."""
        if self.journal is None:
            payload = to_ipc(to_batch([row]))
            self.socket.send_multipart(encode(Trajectories(number, [row.trajectory_id]), payload), copy=False)
        else:
            self.socket.send_multipart(encode(Stored(number, self.journal.keep(to_batch([row])))))
        while True:
            message, _ = decode(receive(self.socket), ToWorker)
            if isinstance(message, Ack):
                assert not message.refused, message
                return

    def close(self) -> None:
        """End it."""
        self.socket.close(linger=0)
        if self.service is not None:
            self.service.close()


@contextmanager
def controller_of(directory: Path, where: Where, trajectories: int) -> Iterator[str]:
    """A controller process for one step of so many trajectories; its address."""
    sections = config_of(directory).model_dump()
    sections["loop"] |= {"batch_size": trajectories, "batch_timeout_s": 1000.0}
    sections["buffer"]["payload"] = where
    config, run = Config.model_validate(sections), RunDirectory(directory / "speed")
    run.create()
    run.config.write_text(dump_config(config), encoding="utf-8")
    ports = free_ports(3)
    run.write_endpoints(Endpoints(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", "127.0.0.1", ports[2]))
    with process("-m", "megasao", "controller", "--run", str(run.path)):
        yield run.read_endpoints().controller


def measure(where: Where, rows: list[Trajectory], ranks: int) -> dict[str, float]:
    """Seconds until all are acknowledged, and until all ranks have theirs; bytes in and out of the controller."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(controller_of(directory, where, len(rows)))
        context = stack.enter_context(zmq.Context())
        client = stack.enter_context(ControllerClient(address, resend_s=WAIT_S))
        client.request(BatchRequest(0, 0), timeout_s=WAIT_S)
        journals = [directory / f"disk-{n}" if where == "rollout" else None for n in range(HOSTS)]
        workers = [Worker(context, address, f"rollout-{n}", place) for n, place in enumerate(journals)]
        for worker in workers:
            stack.callback(worker.close)
        leases = [worker.leases(len(rows) // HOSTS) for worker in workers]
        start = time.perf_counter()
        for number, row in enumerate(rows):
            host = number % HOSTS
            workers[host].deliver(number, of_lease(row, leases[host][number // HOSTS]))
        stored = time.perf_counter()
        manifest, _ = client.request(BatchRequest(0, 0), timeout_s=WAIT_S)
        assert isinstance(manifest, Manifest), manifest
        reader = PayloadReader(client, identity="rank", keys=None, timeout_s=WAIT_S)
        found = 0
        for rank in range(ranks):
            for entry in manifest.entries[rank::ranks]:  # one at a time: a message has a limit
                found += sum(len(row.tokens) for row in reader.fetch([entry], WAIT_S))
        fetched = time.perf_counter()
        reader.close()
        assert found == sum(len(row.tokens) for row in rows)
        counters = client.request(StatusRequest(), timeout_s=WAIT_S)[0].counters
    through = counters["received_bytes"] + counters.get("fetched_bytes", 0.0)
    return {"store": stored - start, "fetch": fetched - stored, "through_controller": through}


def main() -> None:
    """A table, one line a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=16, help="an even number")
    parser.add_argument("--tokens", type=int, default=16 * 1024)
    parser.add_argument("--bytes-a-token", type=int, default=1024, help="routed experts")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    experts = os.urandom(options.tokens * options.bytes_a_token)
    one = replace(make_trajectory("t", options.tokens), routed_experts=experts)
    rows = [one] * options.trajectories
    payload = len(to_ipc(to_batch([one]))) * len(rows)
    print(f"{len(rows)} trajectories of {options.tokens} tokens, {payload / 1e6:.0f} MB")
    print(f"{'payload':11} {'store s':>8} {'MB/s':>6} {'fetch s':>8} {'MB/s':>6} {'MB through the controller':>26}")
    report: dict[str, Any] = {"payload_bytes": payload}
    for where in ("controller", "rollout"):
        found = report[where] = measure(where, rows, options.ranks)
        speeds = [payload / 1e6 / found[name] for name in ("store", "fetch")]
        print(
            f"{where:11} {found['store']:8.2f} {speeds[0]:6.0f} {found['fetch']:8.2f} {speeds[1]:6.0f} "
            f"{found['through_controller'] / 1e6:26.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
