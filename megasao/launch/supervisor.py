"""Keeps the roles of a run alive, within limits.

A unit is what is restarted together: the controller alone, each rollout worker alone, all trainer ranks as one world
(with those of a critic in a world of its own).

Invariants:
- a unit is restarted at most ``max_restarts`` times (its own number, or that of all); the next death fails the run with
  the end of that role's log;
- when ``supervise`` returns or raises, no process of any unit is left;
- a process that shows no sign of life for ``hang_timeout_s`` counts as dead;
- every stop is bounded: ask, wait, SIGTERM, wait, SIGKILL.
"""

import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from megasao.launch.process import Guardian, Role, RoleProcess, describe_exit, tail

POLL_S = 0.1
TERMINATE_GRACE_S = 5.0
LOG_LINES = 30
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 5.0

Outcome = Literal["finished", "interrupted"]


class RoleFailed(RuntimeError):
    """A role died too often; the message ends with the last lines of its log."""


@dataclass
class Unit:
    """Processes that live and die together. ``make_roles`` is called at every start: fresh ports, fresh environment."""

    name: str
    make_roles: Callable[[], list[Role]]
    max_restarts: int | None = None
    """None: as ``Limits`` says."""
    ends_by_itself: bool = True
    """Whether its processes are told by others that the run is over; if not, they are ended when those are gone."""
    processes: list[RoleProcess] = field(default_factory=list)
    restarts: int = 0
    restart_at: float | None = None
    first_exit_at: float | None = None

    def start(self, guardian: Guardian) -> None:
        """Start every process of the unit."""
        self.restart_at = self.first_exit_at = None
        self.processes = []
        for role in self.make_roles():
            self.processes.append(RoleProcess(role, guardian, self.restarts + 1))

    def poll(self) -> None:
        """Notice exits."""
        for process in self.processes:
            if process.poll() is not None and self.first_exit_at is None:
                self.first_exit_at = time.monotonic()

    @property
    def failed(self) -> list[RoleProcess]:
        """Processes that ended with an error."""
        return [process for process in self.processes if process.code not in (None, 0)]

    @property
    def running(self) -> list[RoleProcess]:
        """Processes that still run, as of the last ``poll``."""
        return [process for process in self.processes if process.code is None]

    @property
    def finished(self) -> bool:
        """Every process ended on purpose."""
        return self.restart_at is None and all(process.code == 0 for process in self.processes)

    def kill(self) -> None:
        """End every process at once."""
        for process in self.processes:
            process.ask()
        for process in self.processes:
            process.kill()


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as flags: the first asks for a stop, the second for one without grace.

    A SIGHUP that is ignored stays so: that is how ``nohup`` keeps a run going when its terminal is closed.
    """

    def __init__(self) -> None:
        # An Event has a lock: a signal that comes while ``sleep`` holds it would wait for itself for ever.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.count = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.count += 1
        self._wake.put(None)

    def sleep(self, seconds: float) -> None:
        """Sleep, but no longer than until the next signal."""
        with suppress(queue.Empty):
            self._wake.get(timeout=seconds)

    @contextmanager
    def installed(self) -> Iterator["StopSignals"]:
        """Handle the signals inside the block, in the main thread."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = [signal.signal(number, self.receive) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


@dataclass(frozen=True)
class Limits:
    """Bounds of a supervised run, seconds and counts."""

    max_restarts: int
    stop_timeout_s: float
    straggler_timeout_s: float
    """How long other processes of the main unit may run on after the first of them ended."""
    hang_timeout_s: float
    """How long a process may show no sign of life."""


class Supervisor:
    """Runs ``main`` to its end, with ``services`` beside it."""

    def __init__(
        self,
        main: Unit,
        services: list[Unit],
        limits: Limits,
        *,
        guardian: Guardian,
        signals: StopSignals,
        on_tick: Callable[[dict[str, int]], None],
        report: Callable[[str], None],
    ) -> None:
        self.main = main
        self.services = services
        self.limits = limits
        self._guardian = guardian
        self._signals = signals
        self._on_tick = on_tick
        self._report = report

    @property
    def units(self) -> list[Unit]:
        """Services first."""
        return [*self.services, self.main]

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts of each unit so far."""
        return {unit.name: unit.restarts for unit in self.units}

    def supervise(self) -> Outcome:
        """Start everything and stay until the main unit finished, or a signal came; RoleFailed if it cannot go on."""
        try:
            for unit in self.units:
                unit.start(self._guardian)
            while not self.main.finished:
                if self._signals.count:
                    self._stop_services_and_main()
                    return "interrupted"
                self._tick()
                self._signals.sleep(POLL_S)
            self._wind_down()
            return "finished"
        finally:
            for process in [process for unit in self.units for process in unit.processes]:
                process.ask()
            for unit in self.units:
                unit.kill()

    def _tick(self) -> None:
        now = time.monotonic()
        for unit in self.units:
            unit.poll()
            if unit.restart_at is not None:
                if now >= unit.restart_at:
                    self._restart(unit)
            elif unit.failed:
                self._handle_death(unit, unit.failed)
            elif hung := [process for process in unit.running if process.silent_s() > self.limits.hang_timeout_s]:
                self._handle_death(unit, hung)
        first_exit, stragglers = self.main.first_exit_at, self.main.running  # none while a restart is due
        if stragglers and first_exit is not None and now - first_exit > self.limits.straggler_timeout_s:
            self._handle_death(self.main, stragglers)
        self._on_tick(self.restarts)

    def _handle_death(self, unit: Unit, culprits: list[RoleProcess]) -> None:
        """Plan the restart of ``unit``, or fail the run."""
        reason = ", ".join(f"{process.role.name}: {self._exit_reason(process)}" for process in culprits)
        unit.kill()
        allowed = self.limits.max_restarts if unit.max_restarts is None else unit.max_restarts
        if unit.restarts >= allowed:
            log = culprits[0].role.log
            raise RoleFailed(
                f"{reason}. {_restarts(unit, self.limits)}; the run is stopped.\n"
                f"The last lines of {log}:\n{tail(log, LOG_LINES)}"
            )
        delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**unit.restarts)
        unit.restart_at = time.monotonic() + delay
        unit.restarts += 1
        self._report(f"{reason}; restarting {unit.name} ({unit.restarts} of {allowed}){_last_words(culprits[0])}")

    def _exit_reason(self, process: RoleProcess) -> str:
        if process.code is None and process.silent_s() > self.limits.hang_timeout_s:
            return f"no sign of life for supervision.hang_timeout_s = {self.limits.hang_timeout_s:g} s"
        if process.code is None:
            return f"still running {self.limits.straggler_timeout_s:g} s after another process of its world ended"
        return describe_exit(process.code)

    def _restart(self, unit: Unit) -> None:
        unit.start(self._guardian)
        if unit is self.main:  # services may have ended on purpose just before their trainer died
            for service in self.services:
                if service.finished:
                    service.start(self._guardian)

    def _wind_down(self) -> None:
        """The main unit told the services to end; give them time to, then make them."""
        self._await_exit(self.limits.stop_timeout_s, [unit for unit in self.units if unit.ends_by_itself])
        late = [process.role.name for unit in self.units if unit.ends_by_itself for process in unit.running]
        if late:
            self._report(
                f"{', '.join(late)} did not end by themselves in {self.limits.stop_timeout_s:g} s; ending them"
            )
        if any(unit.running for unit in self.units):
            self._terminate(TERMINATE_GRACE_S)

    def _stop_services_and_main(self) -> None:
        self._report("stopping every role; once more to kill them at once")
        self._signals.count = 0
        self._terminate(self.limits.stop_timeout_s)

    def _terminate(self, grace_s: float) -> None:
        for unit in self.units:
            for process in unit.processes:
                process.terminate()
        self._await_exit(grace_s, self.units)

    def _await_exit(self, seconds: float, units: list[Unit]) -> None:
        """Wait until no process of ``units`` runs, a signal comes, or time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals.count:
            for unit in self.units:
                unit.poll()
            if not any(unit.running for unit in units):
                return
            self._on_tick(self.restarts)
            self._signals.sleep(POLL_S)


def _last_words(process: RoleProcess) -> str:
    """What a role that ended by itself had to say; nothing of one that was killed, or wrote only its head line."""
    line = tail(process.role.log, 1).strip() if process.code is not None and process.code > 0 else ""
    return f"; the last line of {process.role.log}: {line}" if line and not line.startswith("--- ") else ""


def _restarts(unit: Unit, limits: Limits) -> str:
    """Why there is no other try."""
    if unit.max_restarts == 0:
        return f"{unit.name} is not restarted on its own here"
    return (
        f"{unit.name} was restarted {unit.restarts} times, which is all that "
        f"supervision.max_restarts = {limits.max_restarts} allows"
    )
