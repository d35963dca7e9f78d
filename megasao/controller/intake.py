"""Trajectories as they arrive: validated row by row, journaled, refused by name; or, where rollout hosts keep the
payload, what is said of them.

Invariants:
- a bad row never costs the good rows beside it, and gives its lease back;
- every lease that a message names ends with it: accepted, duplicate or refused.
"""

import logging
from dataclasses import replace

import pyarrow as pa

from megasao.controller.leases import granted_version
from megasao.controller.state import DUPLICATE, ControllerState, host_name
from megasao.trajectories.buffer import Summary, summarise
from megasao.trajectories.columns import conform
from megasao.trajectories.ipc import from_ipc
from megasao.trajectories.journal import Journal
from megasao.trajectories.store import JournalStore
from megasao.trajectories.validation import select_rows, validate_rows
from megasao.transport.messages import Ack, Stored, Trajectories

logger = logging.getLogger(__name__)


PAYLOAD_HERE = "buffer.payload = controller: send the trajectories themselves"
PAYLOAD_THERE = "buffer.payload = rollout: keep the payload and say what it is"


class Intake:
    """From a message to the journal."""

    def __init__(self, state: ControllerState, journal: Journal, store: JournalStore) -> None:
        self._state = state
        self._journal = journal
        self._store = store

    def take(self, message: Trajectories, payload: bytes) -> dict[str, str]:
        """Store what is good; the reasons by trajectory for what is not. Durable after the journal's ``sync``."""
        if self._state.hosts is not None:
            return self._refuse(dict.fromkeys(message.lease_ids, PAYLOAD_THERE))
        try:
            batch = conform(from_ipc(payload))
            bad = validate_rows(batch)
        except ValueError as error:
            return self._refuse({lease_id: str(error) for lease_id in message.lease_ids} or {"": str(error)})
        refused = self._store_rows(batch, bad, set(message.lease_ids))
        answered = set(batch.column("trajectory_id").to_pylist())
        refused |= {lease: "no row with this trajectory_id" for lease in message.lease_ids if lease not in answered}
        return self._refuse(refused)

    def take_stored(self, message: Stored, peer: bytes) -> Ack:
        """Trajectories whose payload stays with the worker: what is refused of them, and what it need not keep."""
        hosts = self._state.hosts
        if hosts is None:
            return Ack(message.seq, self._refuse({s.trajectory_id: PAYLOAD_HERE for s in message.summaries}))
        host, refused, accepted = host_name(peer), {}, []
        for said in message.summaries:
            if hosts.wants(said.trajectory_id, host):
                continue  # said again
            summary = said if said.newest_version is not None else _dated(said)
            reason = self._state.screen(summary)
            if reason is None:
                self._state.accept(summary)
                accepted.append(summary)
            elif reason != DUPLICATE:
                refused[said.trajectory_id] = reason
        self._state.hosted(peer, accepted)
        unwanted = [s.trajectory_id for s in message.summaries if not hosts.wants(s.trajectory_id, host)]
        return Ack(message.seq, self._refuse(refused), unwanted)

    def _store_rows(self, batch: pa.RecordBatch, bad: dict[int, str], leases: set[str]) -> dict[str, str]:
        names = batch.column("trajectory_id").to_pylist()
        refused = {names[row] or f"row {row}": reason for row, reason in bad.items()}
        good = [row for row in range(batch.num_rows) if row not in bad]
        keep: list[int] = []
        for row, summary in zip(good, summarise(select_rows(batch, good), granted_version), strict=True):
            reason = self._verdict(summary, leases)
            if reason is None:
                keep.append(row)
                self._state.accept(summary)
            elif reason != DUPLICATE:
                refused[names[row]] = reason
        if keep:
            rows = select_rows(batch, keep)
            self._store.add(rows, self._journal.append(rows))
        return refused

    def _verdict(self, summary: Summary, leases: set[str]) -> str | None:
        if summary.trajectory_id not in leases:
            return "trajectory_id: not among the lease_ids of its message"
        return self._state.screen(summary)

    def _refuse(self, refused: dict[str, str]) -> dict[str, str]:
        for lease_id, reason in refused.items():
            logger.warning("refused trajectory %.200s: %.500s", lease_id, reason)
            if not self._state.failed(lease_id, "refused"):
                self._state.count("refused/no_lease")
        return refused


def _dated(summary: Summary) -> Summary:
    """Of a trajectory that does not say its versions: no token is older than its lease."""
    return replace(summary, oldest_version=granted_version(summary.trajectory_id))
