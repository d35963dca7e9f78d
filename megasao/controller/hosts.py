"""Which rollout host has the payload of which trajectory, and which hosts are there. Pure: no clock, no sockets.

Invariants (tests assert them):
- a host that is not there is waited for ``patience_s``; then its payload is gone for good, also if it comes back;
- what a host that is there says it lacks is gone for good at once;
- what is held is named by one host only, and forgotten once.
"""

from collections.abc import Iterable


class HostBook:
    """Hosts by name. Those that held something before the controller started count as not there until they say so."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._where: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._away_since: dict[str, float | None] = {}
        self._gone: set[str] = set()

    def __len__(self) -> int:
        return len(self._where)

    @property
    def trajectories(self) -> list[str]:
        """All that are held somewhere, or were lost and not forgotten yet."""
        return list(self._where)

    @property
    def away(self) -> list[str]:
        """Hosts that are waited for."""
        return sorted(self._away_since)

    def hold(self, trajectory_ids: Iterable[str], host: str) -> None:
        """``host`` has the payload of these."""
        for name in trajectory_ids:
            self._where[name] = host
        if host not in self._addresses:
            self._away_since.setdefault(host, None)

    def arrive(self, host: str, address: str) -> None:
        """The host is there, and is asked at ``address``."""
        self._addresses[host] = address
        self._away_since.pop(host, None)

    def leave(self, host: str) -> None:
        """The host does not answer any more."""
        if self._addresses.pop(host, None) is not None:
            self._away_since[host] = None

    def give_up(self, now: float) -> list[str]:
        """The trajectories whose host has been away too long: their payload counts as gone from now on."""
        lost: list[str] = []
        for host, since in list(self._away_since.items()):
            if since is None:
                self._away_since[host] = now
            elif now - since > self._patience_s:
                del self._away_since[host]
                lost += [name for name, place in self._where.items() if place == host and name not in self._gone]
        self._gone.update(lost)
        return lost

    def lack(self, trajectory_ids: Iterable[str], host: str) -> list[str]:
        """``host`` is there without these: those that it was to have count as gone from now on."""
        lost = [name for name in trajectory_ids if self.wants(name, host)]
        self._gone.update(lost)
        return lost

    def is_there(self, trajectory_id: str) -> bool:
        """Whether the payload can be had now; what no host has is not this book's."""
        host = self._where.get(trajectory_id)
        return host is None or (host in self._addresses and trajectory_id not in self._gone)

    def is_gone(self, trajectory_id: str) -> bool:
        """Whether the payload is lost for good."""
        return trajectory_id in self._gone

    def wants(self, trajectory_id: str, host: str) -> bool:
        """Whether this host is to keep the payload."""
        return self._where.get(trajectory_id) == host and trajectory_id not in self._gone

    def address(self, trajectory_id: str) -> str:
        """Where the payload is asked for; empty where no host that is there has it."""
        return self._addresses.get(self._where.get(trajectory_id, ""), "")

    def forget(self, trajectory_ids: Iterable[str]) -> dict[str, list[str]]:
        """Nobody will ask for these again: by host that is there, what it is to be told."""
        told: dict[str, list[str]] = {}
        for name in trajectory_ids:
            host = self._where.pop(name, None)
            self._gone.discard(name)
            if host is not None and host in self._addresses:
                told.setdefault(host, []).append(name)
        return told
