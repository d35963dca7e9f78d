"""Payload of a manifest's trajectories, from wherever the manifest says that it is.

Invariants, asserted by the tests:
- a rank asks for its own rows only, and gets exactly those or an error;
- every question is bounded; a host that does not answer is named.
"""

from collections.abc import Callable, Iterator, Sequence

from megasao.trajectories.schema import Trajectory, from_batch, from_ipc
from megasao.transport.client import ControllerClient, PayloadClient, RequestClient
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import Fetched, FetchRequest, ManifestEntry, Refused

CHUNK_BYTES = 64 * 2**20
"""Payload that is asked for at once."""


class PayloadUnreachable(RuntimeError):
    """A rollout host does not give what the manifest says it has."""


class PayloadReader:
    """This rank's connections. ``timeout_s`` bounds each question to a rollout host."""

    def __init__(
        self, controller: ControllerClient, *, identity: str, keys: CurveKeys | None, timeout_s: float
    ) -> None:
        self._controller, self._identity, self._keys, self._timeout_s = controller, identity, keys, timeout_s
        self._hosts: dict[str, PayloadClient] = {}

    def fetch(self, entries: Sequence[ManifestEntry], controller_s: float) -> list[Trajectory]:
        """The trajectories of ``entries``, in any order.

        PayloadUnreachable names a rollout host; RuntimeError or TimeoutError are of the controller, which is given
        ``controller_s`` seconds.
        """
        found: list[Trajectory] = []
        for address, entries_there in _by(entries, lambda entry: entry.payload):
            for chunk in _chunks(entries_there):
                ids = [entry.trajectory_id for entry in chunk]
                if not address:
                    found += _ask(self._controller, ids, controller_s)
                    continue
                try:
                    found += _ask(self._host(address), ids, self._timeout_s)
                except (TimeoutError, RuntimeError, ValueError) as error:  # ValueError: no valid rows
                    self._let_go(address)
                    raise PayloadUnreachable(f"payload at {address}: {error}") from error
        return found

    def close(self) -> None:
        """Close the connections to rollout hosts."""
        for address in list(self._hosts):
            self._let_go(address)

    def _host(self, address: str) -> PayloadClient:
        if address not in self._hosts:
            self._hosts[address] = PayloadClient(
                address, keys=self._keys, identity=self._identity, resend_s=self._timeout_s
            )
        return self._hosts[address]

    def _let_go(self, address: str) -> None:
        client = self._hosts.pop(address, None)
        if client is not None:
            client.close()


def _ask(client: RequestClient, ids: list[str], timeout_s: float) -> list[Trajectory]:
    reply, payload = client.request(FetchRequest(trajectory_ids=ids), timeout_s=timeout_s)
    if not isinstance(reply, Fetched):
        reason = reply.reason if isinstance(reply, Refused) else f"it sent {type(reply).__name__}"
        raise RuntimeError(f"the payload of {len(ids)} trajectories is not to be had: {reason}")
    rows = from_batch(from_ipc(payload))
    if [row.trajectory_id for row in rows] != ids:
        raise RuntimeError(f"asked for {len(ids)} trajectories, and got {len(rows)} others")
    return rows


def _by(
    entries: Sequence[ManifestEntry], key: Callable[[ManifestEntry], str]
) -> Iterator[tuple[str, list[ManifestEntry]]]:
    for value in sorted({key(entry) for entry in entries}):
        yield value, [entry for entry in entries if key(entry) == value]


def _chunks(entries: Sequence[ManifestEntry]) -> Iterator[list[ManifestEntry]]:
    """Together at most CHUNK_BYTES, or one that is larger."""
    chunk: list[ManifestEntry] = []
    for entry in entries:
        if chunk and sum(each.nbytes for each in chunk) + entry.nbytes > CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(entry)
    if chunk:
        yield chunk
