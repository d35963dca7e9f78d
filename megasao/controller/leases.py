"""Who is working on which prompt, until when. Pure: no clock, no sockets.

Invariants:
- a key (stream, index) is on lease at most once;
- a lease ends exactly once: released, expired, or with its worker.
"""

import re
from dataclasses import dataclass

TRAIN = "train"
_LEASE_ID = re.compile(
    r"(?P<stream>.+)-(?P<index>\d{6,15})-(?P<generation>\d{1,9})\.(?P<attempt>\d{1,9})(\.v(?P<version>\d{1,18}))?"
)


@dataclass(frozen=True)
class Key:
    """A prompt to be run once: ``stream`` is ``train`` or an evaluation id."""

    stream: str
    index: int

    @property
    def is_training(self) -> bool:
        """Whether its result is a trajectory to train on."""
        return self.stream == TRAIN

    @property
    def mode(self) -> str:
        """What an evaluation measures: greedy, sampled, or a benchmark; ``train`` for training."""
        return self.stream.rpartition("/")[2]


def make_lease_id(key: Key, generation: int, attempt: int, version: int | None = None) -> str:
    """The name of an attempt; ``generation`` counts controller starts, so that no name is ever used twice.

    ``version``: the weights that it is granted for, where the worker is not asked which it used. The name is what comes
    back with the trajectory, however late, and what the journal keeps.
    """
    name = f"{key.stream}-{key.index:06d}-{generation}.{attempt}"
    return name if version is None else f"{name}.v{version}"


def parse_lease_id(text: str) -> Key | None:
    """The key that a lease id names, or None."""
    match = _LEASE_ID.fullmatch(text)
    return Key(match["stream"], int(match["index"])) if match else None


def granted_version(text: str) -> int:
    """The weights that no token of this lease's trajectory is older than; 0 where its name does not say."""
    match = _LEASE_ID.fullmatch(text)
    return int(match["version"] or 0) if match else 0


@dataclass(frozen=True)
class Held:
    """A lease that has not ended. ``prompt_id`` is None where the controller restarted and took it over again."""

    lease_id: str
    key: Key
    peer: bytes
    expires: float
    min_version: int
    prompt_id: str | None = None


class LeaseBook:
    """All leases that have not ended."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._held: dict[str, Held] = {}
        self._by_key: dict[Key, str] = {}
        self._by_peer: dict[bytes, set[str]] = {}
        self._attempts: dict[Key, int] = {}

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._held

    def new_id(self, key: Key, version: int | None = None) -> str:
        """A fresh lease id for ``key``; ``version`` as for ``make_lease_id``."""
        self._attempts[key] = attempt = self._attempts.get(key, 0) + 1
        return make_lease_id(key, self._generation, attempt, version)

    def put(self, held: Held) -> None:
        """Begin a lease; neither its id nor its key may be on lease."""
        assert held.lease_id not in self._held and held.key not in self._by_key, held
        self._held[held.lease_id] = held
        self._by_key[held.key] = held.lease_id
        self._by_peer.setdefault(held.peer, set()).add(held.lease_id)

    def get(self, lease_id: str) -> Held | None:
        """The lease, if it has not ended."""
        return self._held.get(lease_id)

    def of_key(self, key: Key) -> Held | None:
        """The lease on ``key``."""
        lease_id = self._by_key.get(key)
        return self._held[lease_id] if lease_id is not None else None

    def of_peer(self, peer: bytes) -> list[Held]:
        """The leases of a worker."""
        return [self._held[lease_id] for lease_id in sorted(self._by_peer.get(peer, ()))]

    def all(self) -> list[Held]:
        """All leases, oldest first."""
        return list(self._held.values())

    def count(self, peer: bytes, *, training: bool) -> int:
        """How many training or evaluation leases a worker holds."""
        mine = self._by_peer.get(peer, ())
        return sum(self._held[lease_id].key.is_training == training for lease_id in mine)

    @property
    def training(self) -> int:
        """How many training leases there are."""
        return sum(key.is_training for key in self._by_key)

    def __len__(self) -> int:
        return len(self._held)

    def release(self, lease_id: str) -> Held | None:
        """End a lease; None if it had ended."""
        held = self._held.pop(lease_id, None)
        if held is None:
            return None
        del self._by_key[held.key]
        mine = self._by_peer[held.peer]
        mine.discard(lease_id)
        if not mine:
            del self._by_peer[held.peer]
        return held

    def settle(self, key: Key) -> None:
        """``key`` will never be leased again: end its lease, forget its attempts."""
        self._attempts.pop(key, None)
        held = self.of_key(key)
        if held is not None:
            self.release(held.lease_id)

    def expire(self, now: float) -> list[Held]:
        """End and return the leases whose time is over."""
        over = [held for held in self._held.values() if held.expires <= now]
        for held in over:
            self.release(held.lease_id)
        return over
