"""One rollout engine in virtual time: continuous batching as a flow.

All running requests advance together, a token each in a step of step + per_request * B + per_cached_token * C seconds,
for B requests with C tokens in their caches. Prompts and observations are computed first, one after another, while
decoding stands still. Between two events the flow is integrated exactly.

Invariants:
- an engine is busy exactly while it has something to compute and does not stand still;
- reserved tokens never exceed the KV cache; who finds no room waits, first come first served;
- the weights of a token are those that the engine has when it is sampled.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from megasao.simulation.clock import Action, Clock, Event
from megasao.simulation.lengths import Turn
from megasao.simulation.rates import EngineRates


@dataclass(slots=True, eq=False)
class Request:
    """A turn that an engine is at work on."""

    turn: Turn
    context: int
    """Tokens in its cache once it decodes: those of earlier turns, and what is computed first."""
    begun: Callable[[int], None]
    done: Callable[[int], None]
    left: float = 0.0
    """Seconds of work before it decodes, at pace 1."""


class SimulatedEngine:
    """An engine that serves its first weights, version 0."""

    def __init__(self, clock: Clock, rates: EngineRates) -> None:
        self.version = 0
        self.busy = 0.0
        """Seconds so far."""
        self.running = 0.0
        """Request-seconds of decoding so far."""
        self._clock, self._rates = clock, rates
        self._pace = 1.0
        self._free = rates.kv_tokens
        self._waiting: deque[tuple[int, Action]] = deque()
        self._late: list[tuple[int, Action]] = []
        self._prefills: deque[Request] = deque()
        self._decoding: list[tuple[float, int, Request]] = []
        self._progress = self._cached = 0.0
        self._count = 0
        self._stands_until = self._since = 0.0
        self._planned: Event | None = None

    # episodes

    def when_version(self, version: int, action: Action) -> None:
        """Do ``action`` as soon as the engine has these weights or newer ones."""
        if self.version >= version:
            action()
        else:
            self._late.append((version, action))

    def reserve(self, tokens: int, action: Action) -> None:
        """Do ``action`` when the cache has room for so many tokens, and keep the room until ``release``."""
        self._waiting.append((tokens, action))
        self._admit()

    def release(self, tokens: int) -> None:
        """The episode is over."""
        self._free += tokens
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            tokens, action = self._waiting.popleft()
            self._free -= tokens
            action()

    def generate(self, turn: Turn, context: int, begun: Callable[[int], None], done: Callable[[int], None]) -> Request:
        """Compute a turn on top of ``context`` cached tokens.

        ``begun`` and ``done`` are told the weights of its first and of its last token.
        """
        self._advance()
        seconds = turn.prefill * self._rates.prefill_per_token
        request = Request(turn, context + turn.prefill, begun, done, seconds)
        self._prefills.append(request)
        self._plan()
        return request

    def abort(self, request: Request) -> None:
        """Stop work on a turn; it is neither begun nor done any more."""
        self._advance()
        if request in self._prefills:
            self._prefills.remove(request)
        else:
            [end] = [end for end, _, other in self._decoding if other is request]
            self._decoding = [entry for entry in self._decoding if entry[2] is not request]
            heapq.heapify(self._decoding)
            self._cached -= request.context + request.turn.decode - (end - self._progress)
            self._rest()
        self._plan()

    # weights

    def stand_still(self, seconds: float) -> None:
        """Compute nothing for so long from now."""
        self._advance()
        self._stands_until = max(self._stands_until, self._clock.now + seconds)
        self._plan()

    def take(self, version: int) -> None:
        """These weights are current now."""
        self._advance()
        self.version = version
        ready = [action for wanted, action in self._late if wanted <= version]
        self._late = [(wanted, action) for wanted, action in self._late if wanted > version]
        self._plan()
        for action in ready:
            action()

    # the flow

    def set_pace(self, pace: float) -> None:
        """From now on everything takes ``pace`` times as long as the rates say."""
        self._advance()
        self._pace = pace
        self._plan()

    def account(self) -> None:
        """Bring ``busy`` and ``running`` up to now."""
        self._advance()
        self._plan()

    def _advance(self) -> None:
        """From ``_since`` to now, with nothing in between that changes who runs."""
        now, since = self._clock.now, max(self._since, min(self._stands_until, self._clock.now))
        self._since = now
        seconds = now - since
        if seconds <= 0:
            return
        if self._prefills:
            self._prefills[0].left -= seconds / self._pace
        elif self._decoding:
            steps, running = self._steps_in(seconds / self._pace), len(self._decoding)
            self._progress += steps
            self._cached += steps * running
            self.running += seconds * running
        else:
            return
        self.busy += seconds

    def _plan(self) -> None:
        """Plan the next change of who runs."""
        if self._planned is not None:
            self._planned.cancel()
        wait = max(0.0, self._stands_until - self._clock.now)
        if self._prefills:
            self._planned = self._clock.after(wait + self._pace * max(0.0, self._prefills[0].left), self._prefilled)
        elif self._decoding:
            steps = max(0.0, self._decoding[0][0] - self._progress)
            self._planned = self._clock.after(wait + self._pace * self._seconds_of(steps), self._decoded)
        else:
            self._planned = None

    def _prefilled(self) -> None:
        self._advance()
        request = self._prefills.popleft()
        self._count += 1
        heapq.heappush(self._decoding, (self._progress + request.turn.decode, self._count, request))
        self._cached += request.context
        self._plan()
        request.begun(self.version)

    def _decoded(self) -> None:
        self._advance()
        end, _, request = heapq.heappop(self._decoding)
        self._progress = max(self._progress, end)
        self._cached -= request.context + request.turn.decode
        self._rest()
        self._plan()
        request.done(self.version)

    def _rest(self) -> None:
        """Forget rounding when nobody decodes."""
        if not self._decoding:
            self._progress = self._cached = 0.0

    def _step(self) -> float:
        """Seconds of a step now."""
        rates = self._rates
        return rates.step + rates.step_per_request * len(self._decoding) + rates.step_per_cached_token * self._cached

    def _seconds_of(self, steps: float) -> float:
        """Of so many steps from now on; each leaves a token of each request in the cache."""
        growth = self._rates.step_per_cached_token * len(self._decoding)
        return steps * self._step() + growth * steps**2 / 2

    def _steps_in(self, seconds: float) -> float:
        """The inverse of ``_seconds_of``."""
        first, growth = self._step(), self._rates.step_per_cached_token * len(self._decoding)
        if growth == 0:
            return seconds / first
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))
