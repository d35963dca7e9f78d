"""One run on this machine, from the config to the summary."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megasao.config import Config
from megasao.config.rundir import RunDirectory, all_engine_names, server_ports
from megasao.launch.ports import free_ports
from megasao.launch.prepare import prepared_run
from megasao.launch.process import Guardian, Role
from megasao.launch.roles import (
    RoleCommand,
    controller_role,
    engine_role,
    megasao_command,
    rollout_role,
    trainer_roles,
    worlds_of,
)
from megasao.launch.supervisor import Limits, Outcome, StopSignals, Supervisor, Unit

PANEL_INTERVAL_S = 0.5

Stage = Literal["sft", "value", "rl"]


def launch(
    config: Config,
    *,
    resume: bool,
    last: Stage = "rl",
    make_command: Callable[[RunDirectory], RoleCommand] = megasao_command,
) -> tuple[Outcome, RunDirectory]:
    """Fine-tune and pretrain the critic if the config says so and it is not done yet, then train.

    Goes on to the stage ``last``; a run to the end ends with the summary table.
    UserError if the run cannot start; RoleFailed if a role dies too often.
    """
    from megasao.observability.panel import Panel
    from megasao.observability.summary import print_summary

    with prepared_run(config, resume=resume) as run, StopSignals().installed() as signals, Guardian() as guardian:
        panel = Panel(run, config)
        local = LocalRun(run, config, make_command(run), guardian, signals, every(PANEL_INTERVAL_S, panel.update))
        try:
            outcome: Outcome = "finished"
            for perform in local.stages(last):
                outcome = perform()
                if outcome != "finished":
                    break
        finally:
            panel.close()
    if outcome == "finished" and last == "rl":
        print_summary(run, config)
    return outcome, run


class LocalRun:
    """The stages of a run. Where its roles run is up to ``controller``, ``rollout`` and ``world``."""

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        command: RoleCommand,
        guardian: Guardian,
        signals: StopSignals,
        on_tick: Callable[[dict[str, int]], None],
    ) -> None:
        self.run = run
        self.config = config
        self._command = command
        self._guardian = guardian
        self._signals = signals
        self._on_tick = on_tick

    def stages(self, last: Stage) -> list[Callable[[], Outcome]]:
        """What is left to do, in order, up to the stage ``last``."""
        config, run = self.config, self.run
        stages: list[Callable[[], Outcome]] = []
        if config.sft is not None and not (run.sft / "COMPLETE").exists():
            stages.append(self.fine_tune)
        if last != "sft" and config.value_pretraining is not None and not (run.value / "COMPLETE").exists():
            stages.append(self.pretrain_value)
        return [*stages, self.train] if last == "rl" else stages

    def fine_tune(self) -> Outcome:
        """Only trainer ranks; their result is ``run.sft``."""
        return self._supervise(self.world("sft"), [])

    def pretrain_value(self) -> Outcome:
        """Only trainer ranks; their result is ``run.value``."""
        return self._supervise(self.world("value"), [])

    def train(self) -> Outcome:
        """The whole asynchronous loop."""
        services = [self.controller(), *(self.rollout(index) for index in range(self.config.rollout.workers))]
        services += [self.engine(index) for index in range(len(all_engine_names(self.config)))]
        return self._supervise(self.world("trainer"), services)

    def controller(self) -> Unit:
        """The controller of the run."""
        return Unit("controller", lambda: [controller_role(self.run, self.config, self._command)])

    def rollout(self, index: int) -> Unit:
        """Rollout worker ``index``."""
        return Unit(f"rollout-{index}", lambda: [rollout_role(self.run, self.config, self._command, index)])

    def engine(self, index: int) -> Unit:
        """Server ``index`` of all workers' fleets."""
        name = all_engine_names(self.config)[index]
        return Unit(name, lambda: [engine_role(self.run, self.config, self._command, index)], ends_by_itself=False)

    def world(self, stage: str) -> Unit:
        """Every rank of a stage: ``trainer``, ``sft`` or ``value``.

        A critic in a world of its own belongs to the unit of the trainer: if either dies, both go on from the same
        checkpoint.
        """
        worlds = worlds_of(self.config, stage)

        def make_roles() -> list[Role]:
            # New ones each time: the old ones may still be waiting in the kernel.
            ports = free_ports(len(worlds), promised=server_ports(self.config) or ())
            places = zip(worlds, ports, strict=True)
            run, config, command = self.run, self.config, self._command
            return [
                role
                for world, port in places
                for role in trainer_roles(run, config, command, stage=world, host="127.0.0.1", port=port)
            ]

        return Unit(stage, make_roles)

    def _supervise(self, main: Unit, services: list[Unit]) -> Outcome:
        limits = Limits(
            max_restarts=self.config.supervision.max_restarts,
            stop_timeout_s=self.config.supervision.stop_timeout_s,
            straggler_timeout_s=self.config.supervision.start_timeout_s,
            hang_timeout_s=self.config.supervision.hang_timeout_s,
        )
        supervisor = Supervisor(
            main,
            services,
            limits,
            guardian=self._guardian,
            signals=self._signals,
            on_tick=self._on_tick,
            report=lambda text: report(self.run.logs / "launcher.log", text),
        )
        return supervisor.supervise()


def report(log: Path, text: str) -> None:
    """Say something on the terminal, if that is still there, and keep it, if the disk has room."""
    with suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    with suppress(OSError):
        print(f"launcher: {text}", flush=True)


def every(seconds: float, action: Callable[[dict[str, int]], None]) -> Callable[[dict[str, int]], None]:
    """``action``, at most once in ``seconds``."""
    last = float("-inf")

    def limited(restarts: dict[str, int]) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            action(restarts)

    return limited
