"""A run in virtual time: the product's controller state, engines, episodes and a trainer.

The controller is ``ControllerState`` itself: who gets a lease, what is stale, what a batch is made of, is decided by
the code that decides it in a run. Only the time that things take is modelled.

Invariants:
- a version is current on all engines after its transfer, and the next publication waits for that;
- an episode begins with weights that are as new as its lease asks for, and goes on under newer ones;
- leases given = trained on + dropped + waiting + on lease + recalled with their group.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from megasao.config import Config
from megasao.controller.state import ControllerState
from megasao.environments.base import DemonstrationTurn, Environment, Episode, Prompt, Split
from megasao.simulation.clock import Clock
from megasao.simulation.engine import SimulatedEngine
from megasao.simulation.lengths import Lengths
from megasao.simulation.playing import Playing
from megasao.simulation.rates import Rates
from megasao.trajectories.buffer import Summary
from megasao.transport.messages import Lease, Manifest


class _NamedPrompts(Environment):
    """Prompts that only have names."""

    name = "simulated"
    stop_strings = ()

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"{split}-{index}", "simulated", "", {})

    def start(self, prompt: Prompt, seed: int) -> Episode:
        raise NotImplementedError("a simulated episode has no text")

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        raise NotImplementedError("a simulated episode has no text")


@dataclass(frozen=True)
class Step:
    """One training step; times in seconds since the start.

    The trainer asked for its batch, and began when it had waited for it, and for the way of the weights before.
    """

    asked: float
    began: float
    ended: float
    trajectories: int
    tokens: int
    lags: tuple[int, ...]
    busy: float
    """Seconds that all engines have been busy, up to its end."""
    running: float
    """Request-seconds of decoding, up to its end."""
    dropped: dict[str, int]
    """Up to its end, by reason."""


@dataclass
class History:
    """What happened in a simulated run."""

    steps: list[Step] = field(default_factory=list)
    leases: int = 0
    recalled: int = 0
    """Leases of groups that died while they were played."""
    longest_episode: float = 0.0
    """Seconds from the weights being there to the end, of any episode."""
    longest_wait: float = 0.0
    """Seconds that the trainer waited for a batch."""

    @property
    def seconds(self) -> float:
        """From the first request for a batch to the end of the last step."""
        return self.steps[-1].ended


class SimulatedFleet:
    """``config``: loop, buffer and seed of the run; each of ``rollout.workers`` is one engine."""

    def __init__(self, config: Config, rates: Rates, lengths: Lengths) -> None:
        self.history = History()
        self.state = ControllerState(
            config, _NamedPrompts(), records=[], journaled=[], finished_evaluations=set(), now=0.0
        )
        self._config, self._rates, self._lengths = config, rates, lengths
        self._clock = Clock()
        self._engines = {
            f"engine-{number}".encode(): SimulatedEngine(self._clock, rates.engine)
            for number in range(config.rollout.workers)
        }
        self._episodes: dict[str, Playing] = {}
        self._step = self._version = 0
        self._last = config.loop.steps
        self._asked: float | None = None
        """Since when the trainer has waited for its batch; None while it has one."""
        self._transfers_until = 0.0
        self._set_pace()

    def run(self, steps: int | None = None) -> History:
        """The first ``steps`` steps, or all of ``loop.steps``. RuntimeError: the trainer waits, and nothing happens."""
        self._last = min(steps or self._config.loop.steps, self._config.loop.steps)
        for peer in self._engines:
            self.state.hello(peer, peer.decode(), [], 0.0)
            self._offer(peer)
        self._ask()
        while self._step < self._last:
            if not self._clock.step():
                waiting = len(self.state.batches.buffer)
                raise RuntimeError(
                    f"the simulated run stands still before step {self._step}: {waiting} trajectories wait, "
                    f"{len(self.state.leases)} on lease, {self._config.loop.batch_size} needed"
                )
        return self.history

    # trainer

    def _ask(self) -> None:
        self._asked = self._clock.now
        self._try_batch()

    def _try_batch(self) -> None:
        assert self._asked is not None
        answer = self.state.request_batch(self._step, self._version, self._clock.now)
        if isinstance(answer, Manifest):
            self._train(answer)
        self._grant()

    def _train(self, batch: Manifest) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        now = self._clock.now
        self.history.longest_wait = max(self.history.longest_wait, now - asked)
        self._clock.after(self._training_seconds(batch), partial(self._trained, batch, asked, now))

    def _training_seconds(self, batch: Manifest) -> float:
        tokens, training = sum(entry.tokens for entry in batch.entries), self._rates.training
        seconds = training.overhead
        if self._config.critic is not None:
            updates = self._config.critic.updates_per_actor_update
            seconds += training.values.seconds(tokens) + updates * training.critic.seconds(tokens)
        if self._moves_actor:
            seconds += training.actor.seconds(tokens)
        return seconds * self._rates.pace.of_training(self._step / self._last)

    def _set_pace(self) -> None:
        for engine in self._engines.values():
            engine.set_pace(self._rates.pace.of_engine(self._step / self._last))

    @property
    def _moves_actor(self) -> bool:
        return self._step >= self._config.warmup_steps

    def _trained(self, batch: Manifest, asked: float, began: float) -> None:
        """The updates are done; publish once the last version has arrived everywhere."""
        ended = partial(self._end_step, batch, asked, began)
        if not self._moves_actor:
            ended(0.0)
            return
        waited = max(0.0, self._transfers_until - self._clock.now)
        self._clock.after(waited + self._rates.training.publish, partial(self._published, partial(ended, waited)))

    def _published(self, ended: partial[None]) -> None:
        self._version += 1
        self._transfers_until = self._clock.now + self._rates.transfer
        if self._rates.engine.stands_still:
            for engine in self._engines.values():
                engine.stand_still(self._rates.transfer)
        self._clock.after(self._rates.transfer, partial(self._arrived, self._version))
        ended()

    def _arrived(self, version: int) -> None:
        for peer, engine in self._engines.items():
            engine.stand_still(self._rates.engine.commit)
            engine.take(version)
            self._offer(peer)

    def _end_step(self, batch: Manifest, asked: float, began: float, waited: float) -> None:
        for engine in self._engines.values():
            engine.account()
        version = self._version - self._moves_actor
        dropped: Counter[str] = Counter()
        for (reason, _), number in self.state.batches.dropped.items():
            dropped[reason] += number
        self.history.steps.append(
            Step(
                asked=asked,
                began=began + waited,
                ended=self._clock.now,
                trajectories=len(batch.entries),
                tokens=sum(entry.tokens for entry in batch.entries),
                lags=tuple(max(0, version - entry.oldest_version) for entry in batch.entries),
                busy=sum(engine.busy for engine in self._engines.values()),
                running=sum(engine.running for engine in self._engines.values()),
                dropped=dict(dropped),
            )
        )
        self._step += 1
        self._set_pace()
        if self._step < self._last:
            self._ask()

    # controller and episodes

    def _offer(self, peer: bytes) -> None:
        """What a worker tells the controller: room for episodes, and its weights."""
        free = self._config.rollout.concurrency - self.state.leases.count(peer, training=True)
        self.state.credit(peer, free, self._engines[peer].version, self._clock.now)

    def _grant(self) -> None:
        """Whatever the controller has decided: leases that workers must forget, and new ones."""
        self.state.take_records()
        for lease_ids in self.state.take_recalled().values():
            self._recall(lease_ids)
        if self._is_full():
            return
        for peer, leases in self.state.grant(self._clock.now).items():
            for lease in leases:
                self._begin(peer, lease)

    def _recall(self, lease_ids: list[str]) -> None:
        for lease_id in lease_ids:
            episode = self._episodes.pop(lease_id)
            episode.forget()
            self.history.recalled += 1
            self._offer(episode.peer)

    def _begin(self, peer: bytes, lease: Lease) -> None:
        self._episodes[lease.lease_id] = episode = Playing(
            self._clock,
            self._engines[peer],
            peer,
            lease,
            self._lengths(lease.seed),
            environment=self._rates.environment,
            finished=self._finished,
        )
        self.history.leases += 1
        episode.start()

    def _is_full(self) -> bool:
        """Whether ``grant`` would surely give nothing: it looks at every lease, which takes real time."""
        if self._config.loop.group_size > 1:
            return False
        taken = len(self.state.batches.buffer) + len(self.state.leases)
        if self._config.loop.mode == "sync":
            return taken >= (0 if self._asked is None else self._config.loop.batch_size)
        return taken >= self.state.admission.limit

    def _finished(self, episode: Playing) -> None:
        self.history.longest_episode = max(self.history.longest_episode, episode.seconds)
        self._clock.after(self._rates.delivery, partial(self._deliver, episode))

    def _deliver(self, episode: Playing) -> None:
        if episode.forgotten:
            return
        summary = episode.summary(self.state.admission.worst_bytes)
        refused = self.state.screen(summary)
        assert refused is None, refused
        self.state.accept(summary)
        del self._episodes[episode.lease.lease_id]
        self._offer(episode.peer)
        if self._asked is not None and self._may_decide(summary):
            self._try_batch()
        else:
            self._grant()

    def _may_decide(self, summary: Summary) -> bool:
        """Whether asking for the batch again could give it, or drop this one; a run asks all the time."""
        loop = self._config.loop
        is_stale = summary.lag(self._version) > loop.max_lag
        return is_stale or loop.max_stale_share < 1 or len(self.state.batches.buffer) >= loop.batch_size
