"""One episode in virtual time: its lease, its turns on an engine, its weights."""

from collections.abc import Callable

from megasao.simulation.clock import Clock
from megasao.simulation.engine import Request, SimulatedEngine
from megasao.simulation.lengths import Shape
from megasao.trajectories.buffer import Summary
from megasao.transport.messages import Lease


class Playing:
    """An episode from its lease on. ``finished`` is called once, at its end, unless it was forgotten."""

    def __init__(
        self,
        clock: Clock,
        engine: SimulatedEngine,
        peer: bytes,
        lease: Lease,
        shape: Shape,
        *,
        environment: float,
        finished: Callable[["Playing"], None],
    ) -> None:
        """``environment``: seconds between two turns."""
        self.peer, self.lease = peer, lease
        self.seconds = 0.0
        """From the weights being there to the end."""
        self.forgotten = False
        self._clock, self._engine, self._shape = clock, engine, shape
        self._environment, self._finished = environment, finished
        self._turn = self._context = 0
        self._oldest: int | None = None
        self._newest = 0
        self._holds_room = False
        self._request: Request | None = None

    def start(self) -> None:
        """Wait for the weights that the lease asks for, then for room in the cache."""
        self._engine.when_version(self.lease.min_version, self._reserve)

    def forget(self) -> None:
        """The lease is recalled: stop at once."""
        self.forgotten = True
        if self._request is not None:
            self._engine.abort(self._request)
        self._leave()

    def summary(self, nbytes: int) -> Summary:
        """What the controller is told of it, ``nbytes`` large."""
        lease = self.lease
        assert self._oldest is not None
        return Summary(
            trajectory_id=lease.lease_id,
            prompt_id=lease.prompt_id,
            group_id=lease.group_id,
            task=lease.task,
            tokens=self._shape.tokens,
            action_tokens=self._shape.action_tokens,
            oldest_version=self._oldest if lease.want_versions else lease.min_version,
            newest_version=self._newest if lease.want_versions else None,
            reward=0.0,
            truncated=False,
            has_logprobs=lease.want_logprobs,
            has_routed_experts=lease.want_routed_experts,
            nbytes=nbytes,
        )

    def _reserve(self) -> None:
        if not self.forgotten:
            self.seconds = -self._clock.now
            self._engine.reserve(self._shape.tokens, self._admitted)

    def _admitted(self) -> None:
        self._holds_room = True
        if self.forgotten:
            self._leave()
        else:
            self._next_turn()

    def _next_turn(self) -> None:
        if not self.forgotten:
            turn = self._shape.turns[self._turn]
            self._request = self._engine.generate(turn, self._context, self._begun, self._turn_done)

    def _begun(self, version: int) -> None:
        if self._oldest is None:
            self._oldest = version

    def _turn_done(self, version: int) -> None:
        turn, self._request = self._shape.turns[self._turn], None
        self._context += turn.prefill + turn.decode
        self._turn += 1
        if self._turn < len(self._shape.turns):
            self._clock.after(self._environment, self._next_turn)
            return
        self._newest = version
        self.seconds += self._clock.now
        self._leave()
        self._finished(self)

    def _leave(self) -> None:
        if self._holds_room:
            self._holds_room = False
            self._engine.release(self._shape.tokens)
