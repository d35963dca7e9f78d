"""The rollout workers that are there: when each was last heard, how much it can take, what it has done. Pure.

Invariants:
- a worker that is silent for ``dead_after_s`` is gone, with all its leases;
- a worker never holds more rollouts, or evaluation episodes, than their concurrency, whatever crosses on the wire.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

MAX_STATS = 64
ENGINE_TOTALS = ("generated_tokens", "prefill_tokens", "decode_steps", "busy_seconds")
"""Of the training engines, as in ``Engine.stats``; what an engine's speed is computed from."""


@dataclass
class Worker:
    """One worker. ``stats`` holds its last totals; ``greeted``: it has said what it is at work on."""

    peer: bytes
    name: str
    last_heard: float
    free: int = 0
    evaluation_free: int = 0
    weight_version: int = 0
    greeted: bool = False
    stats: dict[str, float] = field(default_factory=dict)


class WorkerBook:
    """All workers that are alive."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._workers: dict[bytes, Worker] = {}
        self._losses: Counter[bytes] = Counter()
        self._rates = Rates()

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def peers(self) -> list[bytes]:
        """Identities of all workers."""
        return list(self._workers)

    def add(self, peer: bytes, name: str, now: float) -> Worker:
        """Register a worker, or hear of it again; it gets leases once it has said how many it can take."""
        worker = self._workers.setdefault(peer, Worker(peer, name, now))
        worker.name, worker.last_heard, worker.free, worker.evaluation_free = name, now, 0, 0
        return worker

    def get(self, peer: bytes) -> Worker | None:
        """The worker, if it is known."""
        return self._workers.get(peer)

    def has_greeted(self, peer: bytes) -> bool:
        """Whether the worker is known, and not by its credit alone."""
        worker = self._workers.get(peer)
        return worker is not None and worker.greeted

    def heard(self, peer: bytes, now: float) -> bool:
        """A sign of life; whether the worker is known."""
        worker = self._workers.get(peer)
        if worker is not None:
            worker.last_heard = now
        return worker is not None

    def reported(self, peer: bytes, stats: dict[str, float], now: float) -> None:
        """Take in a heartbeat's counters."""
        worker = self._workers.get(peer)
        if worker is not None:
            clean = {name: value for name, value in stats.items() if math.isfinite(value)}
            worker.stats = dict(list(clean.items())[:MAX_STATS])
            self._rates.update(peer, worker.stats, now)

    def silent(self, now: float) -> list[bytes]:
        """Identities of the workers that have been silent too long."""
        return [peer for peer, worker in self._workers.items() if now - worker.last_heard > self._dead_after_s]

    def remove(self, peer: bytes) -> None:
        """Forget a worker."""
        self._losses[peer] += self._workers.pop(peer, None) is not None
        self._rates.forget(peer)

    def losses(self, peer: bytes) -> int:
        """How often a worker was here and was forgotten."""
        return self._losses[peer]

    def engine_totals(self) -> dict[str, float]:
        """``engine/`` totals of the workers that are there, as of their last heartbeats; empty before the first."""
        reported = [worker.stats for worker in self._workers.values() if worker.stats]
        names = [name for name in ENGINE_TOTALS if any(name in stats for stats in reported)]
        return {f"engine/{name}": sum(stats.get(name, 0.0) for stats in reported) for name in names}

    def rates(self) -> dict[str, float]:
        """``tokens_per_s`` and ``idle`` as of the last heartbeats; empty before the first measurement."""
        return self._rates.current()


class Rates:
    """Totals of several workers to rates, over the last two reports of each.

    A total that falls back (a restarted worker) counts from 0.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, tuple[float, dict[str, float]]] = {}
        self._rates: dict[bytes, tuple[float, float]] = {}

    def update(self, peer: bytes, totals: dict[str, float], now: float) -> None:
        """A worker's totals at ``now``."""
        then, before = self._last.get(peer, (now, totals))
        if now > then:
            tokens_per_s = _growth(before, totals, "generated_tokens") / (now - then)
            busy = _growth(before, totals, "busy_seconds") / (now - then)
            self._rates[peer] = (tokens_per_s, min(1.0, busy))
        self._last[peer] = (now, totals)

    def forget(self, peer: bytes) -> None:
        """The worker is gone."""
        self._last.pop(peer, None)
        self._rates.pop(peer, None)

    def current(self) -> dict[str, float]:
        """``tokens_per_s`` of all workers together and their mean ``idle`` share; empty before two reports."""
        if not self._rates:
            return {}
        tokens_per_s, busy = zip(*self._rates.values(), strict=True)
        return {"tokens_per_s": sum(tokens_per_s), "idle": 1.0 - sum(busy) / len(busy)}


def _growth(before: dict[str, float], after: dict[str, float], name: str) -> float:
    old, new = before.get(name, 0.0), after.get(name, 0.0)
    return new - old if new >= old else new
