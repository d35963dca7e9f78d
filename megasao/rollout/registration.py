"""An SGLang server's place in a run that goes on: it registers with the controller, joins, and leaves.

Invariants, asserted by the tests:
- what is recorded (``endpoints.json``) are the servers that a worker that starts now is to use;
- a server ends only when its worker does not use it any more, or after a bounded time; or when another launch has the
  run: a node that was given up can have left this server alive.
"""

import logging
import time

from msgspec import structs

from megasao.config import Config
from megasao.config.rundir import RunDirectory, training_servers
from megasao.transport.client import RequestClient
from megasao.transport.keys import keys_of
from megasao.transport.messages import Refused, RemoveServer, ServerUp, ServerWanted, ToServer

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0
_REMOVE_S = 30.0


class RegistrationClient(RequestClient):
    """A server's side of the controller protocol."""

    peer = "the controller"
    replies = ToServer


class Registration:
    """Says that the server ``name`` is up, and hears whether it is still wanted."""

    def __init__(self, run: RunDirectory, config: Config, name: str, *, added: bool = False) -> None:
        """``added``: nobody but the controller will say when the run is over."""
        endpoints = run.read_endpoints()
        _, worker, which = name.split("-", 2)
        of = f"rollout-{worker}" if which.isdigit() else f"rollout-{worker}/{which}"
        self._message = ServerUp(name, of, endpoints.engines[name])
        self._every_s, self._leave_s = config.transport.heartbeat_s, config.supervision.stop_timeout_s
        self._client = connect(run, config, name)
        self._run, self._next = run, 0.0
        self._leave_by: float | None = None
        self._silent_after_s = config.supervision.start_timeout_s if added else float("inf")
        self._last_heard = time.monotonic()

    def is_over(self) -> bool:
        """Whether the server may end: it is not wanted, and not used any more, or its
        ``supervision.stop_timeout_s`` for that are over; or no controller answers, and it was added, or the run's is
        another one now. Asks now and then.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._every_s
        try:
            answer, _ = self._client.request(self._message, timeout_s=_ANSWER_S)
        except TimeoutError:
            return now - self._last_heard > self._silent_after_s or self._is_taken_over()
        self._last_heard = now
        if not isinstance(answer, ServerWanted) or answer.wanted:
            return False
        if self._leave_by is None:
            logger.info("%s leaves the run", self._message.name)
            self._leave_by = now + self._leave_s
            self._message = structs.replace(self._message, leaving=True)
            self._run.change_engines(lambda engines: without(engines, self._message.name))
        return not answer.used or now > self._leave_by

    def _is_taken_over(self) -> bool:
        current = self._run.taken_over_by(self._client.address)
        if current is None:
            return False
        logger.warning("the controller of %s is now at %s; %s ends", self._run.path, current, self._message.name)
        return True

    def close(self) -> None:
        """Let go of the controller."""
        self._client.close()


def without(engines: dict[str, str], name: str) -> dict[str, str]:
    """The same servers, but one."""
    return {other: url for other, url in engines.items() if other != name}


def connect(run: RunDirectory, config: Config, identity: str) -> RegistrationClient:
    """A connection to the run's controller."""
    keys = keys_of(run, config)
    return RegistrationClient(run.read_endpoints().controller, identity=identity, keys=keys)


def add(run: RunDirectory, config: Config, worker: int, port: int) -> str:
    """Record one more server of a worker, on this machine at ``port``; its name. ValueError where that cannot work."""
    if config.rollout.engine != "sglang" or config.slurm is not None:
        raise ValueError(
            "a server is added on this machine, to a run with rollout.engine = sglang and no section slurm; "
            f"this one has rollout.engine = {config.rollout.engine}" + (", section slurm" if config.slurm else "")
        )
    _refuse_behind_a_router(config)
    if worker >= config.rollout.workers:
        raise ValueError(f"the run has rollout.workers = {config.rollout.workers}, counted from 0; got {worker}")
    address, made = f"http://127.0.0.1:{port}", ""

    def more(engines: dict[str, str]) -> dict[str, str]:
        nonlocal made
        used = [int(path.name.rsplit("-", 1)[1]) for path in (run.path / "engines").glob(f"engine-{worker}-[0-9]*")]
        used += [int(name.rsplit("-", 1)[1]) for name in training_servers(run.read_endpoints(), worker)]
        made = f"engine-{worker}-{max(used, default=-1) + 1}"
        return {**engines, made: address}

    run.change_engines(more)
    return made


def _refuse_behind_a_router(config: Config) -> None:
    if config.rollout.sglang.router is not None:
        raise ValueError(
            "rollout.sglang.router chooses the servers of this run and was told of them when it started: it would send "
            "nothing to one that is added, and would go on sending to one that is removed, whatever weights that has"
        )


def remove(run: RunDirectory, config: Config, name: str) -> None:
    """Tell the controller to let go of a server. ValueError with its reason if it will not."""
    _refuse_behind_a_router(config)
    client = connect(run, config, "remove")
    try:
        answer, _ = client.request(RemoveServer(name), timeout_s=_REMOVE_S)
    finally:
        client.close()
    if isinstance(answer, Refused):
        raise ValueError(answer.reason)
