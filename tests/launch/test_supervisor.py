"""Real roles (small python scripts) under the supervisor: deaths, restarts, limits, stops."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_support import WAIT_S, alive, wait_for

from megasao.launch import process as process_module
from megasao.launch.process import Guardian, Role, describe_exit, tail
from megasao.launch.supervisor import Limits, Outcome, RoleFailed, StopSignals, Supervisor, Unit

FOREVER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


class Stage:
    """A supervisor over scripts; ``actions`` run inside its ticks, each once its condition holds."""

    def __init__(
        self,
        directory: Path,
        *,
        max_restarts: int = 3,
        stop_timeout_s: float = WAIT_S,
        straggler_timeout_s: float = WAIT_S,
        hang_timeout_s: float = WAIT_S,
    ) -> None:
        self.directory = directory
        self.limits = Limits(max_restarts, stop_timeout_s, straggler_timeout_s, hang_timeout_s)
        self.signals = StopSignals()
        self.reports: list[str] = []
        self.actions: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self.services: list[Unit] = []
        self.supervisor: Supervisor | None = None

    def unit(self, name: str, *scripts: str) -> Unit:
        """A unit with one process per script."""
        return Unit(name, lambda: [self.role(f"{name}-{i}", script) for i, script in enumerate(scripts)])

    def role(self, name: str, script: str, heartbeat: Path | None = None) -> Role:
        command = [sys.executable, "-S", "-c", script]
        return Role(name, command, self.directory / f"{name}.log", heartbeat=heartbeat)

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def run(self, main: Unit, *services: Unit) -> Outcome:
        deadline = time.monotonic() + WAIT_S

        def tick(restarts: dict[str, int]) -> None:
            assert time.monotonic() < deadline, "the supervisor did not end"
            if self.actions and self.actions[0][0]():
                self.actions.pop(0)[1]()

        with Guardian() as guardian, self.signals.installed():
            self.supervisor = Supervisor(
                main,
                list(services),
                self.limits,
                guardian=guardian,
                signals=self.signals,
                on_tick=tick,
                report=self.reports.append,
            )
            return self.supervisor.supervise()


def counting(directory: Path, name: str, then: str) -> str:
    """A script that knows which start of it this is, in ``n`` (from 1)."""
    path = directory / f"{name}.count"
    return (
        f"import os, sys, time\np = {str(path)!r}\nn = 1 + (int(open(p).read()) if os.path.exists(p) else 0)\n"
        f"open(p, 'w').write(str(n))\n{then}"
    )


def test_a_normal_end(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stop = tmp_path / "stop"
    service = stage.unit("service", f"import os, time\nwhile not os.path.exists({str(stop)!r}): time.sleep(0.02)")
    main = stage.unit("main", f"print('done'); open({str(stop)!r}, 'w')", "pass")
    assert stage.run(main, service) == "finished"
    assert "done" in stage.log("main-0")
    assert [p.code for p in service.processes] == [0]
    assert stage.reports == []


def test_a_killed_service_is_restarted_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, stop_timeout_s=0.3)
    service, other = stage.unit("service", FOREVER), stage.unit("other", FOREVER)
    flag = tmp_path / "flag"
    main = stage.unit("main", f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.02)")
    pids: list[int] = []

    def kill() -> None:
        pids.extend([service.processes[0].pid, other.processes[0].pid, main.processes[0].pid])
        os.kill(pids[0], signal.SIGKILL)

    def again() -> None:
        assert service.processes[0].pid != pids[0]
        assert [other.processes[0].pid, main.processes[0].pid] == pids[1:]
        flag.touch()

    stage.actions = [(lambda: True, kill), (lambda: service.restarts == 1 and service.running, again)]
    assert stage.run(main, service, other) == "finished"
    assert stage.log("service-0").count("--- ") == 2
    assert "service-0: killed by SIGKILL" in stage.reports[0]
    assert "restarting service (1 of 3)" in stage.reports[0]


def test_a_restart_is_told_with_the_last_words_of_who_died(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    dies_once = counting(tmp_path, "a", "print('no space left', flush=True)\nsys.exit(0 if n > 1 else 7)")
    assert stage.run(Unit("world", lambda: [stage.role("rank-0", dies_once)])) == "finished"
    (told,) = stage.reports
    assert told.startswith("rank-0: exit code 7; restarting world (1 of 3); the last line of ")
    assert told.endswith("rank-0.log: no space left")


def test_one_dead_rank_restarts_the_whole_world_with_fresh_roles(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    made: list[int] = []
    other = str(tmp_path / "b.count")
    both_run = f"while not (os.path.exists({other!r}) and open({other!r}).read()): time.sleep(0.02)\n"
    dies_once = counting(tmp_path, "a", both_run + "sys.exit(0 if n > 1 else 7)")
    waits_once = counting(tmp_path, "b", "time.sleep(0 if n > 1 else 600)")

    def make_roles() -> list[Role]:
        made.append(len(made))
        return [stage.role("rank-0", dies_once), stage.role("rank-1", waits_once)]

    main = Unit("world", make_roles)
    assert stage.run(main) == "finished"
    assert made == [0, 1]
    assert "rank-0: exit code 7" in stage.reports[0]
    assert stage.log("rank-1").count("--- ") == 2


def test_the_restart_limit_fails_the_run_with_the_log(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=2)
    lines = "\n".join(f"print('line {i}')" for i in range(40))
    service = stage.unit("service", f"{lines}\nraise SystemExit(3)")
    main = stage.unit("main", FOREVER)
    with pytest.raises(RoleFailed) as caught:
        stage.run(main, service)
    message = str(caught.value)
    assert "service-0: exit code 3" in message
    assert "supervision.max_restarts = 2" in message
    assert str(tmp_path / "service-0.log") in message
    assert message.endswith("line 39")
    assert "line 10\n" in message
    assert "line 9\n" not in message  # the last 30 lines only
    assert stage.log("service-0").count("--- ") == 3
    assert not alive(main.processes[0].pid)


def test_no_restart_at_all_when_none_is_allowed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=0)
    with pytest.raises(RoleFailed, match="main-0: exit code 1"):
        stage.run(stage.unit("main", "raise SystemExit(1)"))
    assert stage.log("main-0").count("--- ") == 1


def test_a_unit_may_have_a_limit_of_its_own(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=3)
    main = stage.unit("main", "raise SystemExit(1)")
    main.max_restarts = 0
    with pytest.raises(RoleFailed, match="main is not restarted on its own here"):
        stage.run(main, stage.unit("service", FOREVER))
    assert stage.log("main-0").count("--- ") == 1


def test_a_role_is_asked_before_it_is_killed_where_it_must_be(tmp_path: Path) -> None:
    """A program that ends something elsewhere when it is asked to must get the chance; one that does not is killed."""
    told = tmp_path / "told"
    polite = (
        f"import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (open({str(told)!r}, 'w'), sys.exit()))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    assert was_asked(tmp_path, told, WAIT_S, polite)
    assert not was_asked(tmp_path, told, 0.0, polite)
    assert not was_asked(tmp_path, told, 0.3, STUBBORN)


def was_asked(directory: Path, told: Path, seconds: float, script: str) -> bool:
    """Kill a role that is given so long to end by itself; whether it could say something before."""
    told.unlink(missing_ok=True)
    log = directory / "role.log"
    log.unlink(missing_ok=True)
    role = Role("role", [sys.executable, "-S", "-c", script], log, ask_before_kill_s=seconds)
    with Guardian() as guardian:
        process = process_module.RoleProcess(role, guardian)
        wait_for(lambda: log.read_text().endswith("\nready\n"), "the role")
        process.kill()
    assert not alive(process.pid)
    return told.exists()


def test_roles_that_must_be_asked_are_asked_together(tmp_path: Path) -> None:
    """Hundreds of them, one after the other, would outlast what a cluster waits for."""

    def script(mine: str, other: str) -> str:
        told, wait, both = (str(tmp_path / name) for name in (f"{mine}.told", f"{other}.told", f"{mine}.both"))
        return (
            "import os, signal, sys, time\n"
            f"def end(*_):\n    open({told!r}, 'w')\n    while not os.path.exists({wait!r}): time.sleep(0.01)\n"
            f"    open({both!r}, 'w')\n    sys.exit()\n"
            "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(600)"
        )

    def roles() -> list[Role]:
        pairs = (("a", "b"), ("b", "a"))
        command = [sys.executable, "-S", "-c"]
        return [
            Role(mine, [*command, script(mine, other)], tmp_path / f"{mine}.log", ask_before_kill_s=WAIT_S)
            for mine, other in pairs
        ]

    unit = Unit("unit", roles)
    with Guardian() as guardian:
        unit.start(guardian)
        for name in ("a", "b"):
            wait_for(lambda name=name: (tmp_path / f"{name}.log").read_text().endswith("\nready\n"), name)
        unit.kill()
    assert (tmp_path / "a.both").exists() and (tmp_path / "b.both").exists()


def test_services_that_ended_on_purpose_are_not_restarted_but_come_back_with_a_dead_trainer(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    service = stage.unit("service", "pass")
    flag = tmp_path / "flag"
    wait = f"while not os.path.exists({str(flag)!r}): time.sleep(0.02)\n"
    main = stage.unit("main", counting(tmp_path, "main", wait + "sys.exit(n == 1)"))
    stage.actions = [(lambda: service.finished, flag.touch)]
    assert stage.run(main, service) == "finished"
    assert service.restarts == 0
    assert stage.log("service-0").count("--- ") == 2  # once at first, once with the restarted trainer


def test_a_rank_that_never_ends_is_noticed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=0, straggler_timeout_s=2.0)
    with pytest.raises(RoleFailed, match="main-1: still running 2 s after another process of its world ended"):
        stage.run(stage.unit("main", "pass", FOREVER))


def test_a_silent_service_is_restarted_and_one_that_beats_is_not(tmp_path: Path) -> None:
    """The first life of ``hung`` stops beating; ``busy`` beats on, and the main role waits for the second life."""
    stage = Stage(tmp_path, stop_timeout_s=0.3, hang_timeout_s=5.0)
    beats = "import pathlib\nwhile True:\n    pathlib.Path({path!r}).touch(); time.sleep(0.1)\n    {leave}\n"
    roles = {}
    for name, leave in (("hung", "if n == 1: time.sleep(600)"), ("busy", "pass")):
        path = tmp_path / f"{name}.beat"
        script = counting(tmp_path, name, beats.format(path=str(path), leave=leave))
        roles[name] = stage.role(name, script, path)
    seen = tmp_path / "hung.count"
    second_life = f"os.path.exists({str(seen)!r}) and open({str(seen)!r}).read() == '2'"
    wait = f"import os, time\nwhile not ({second_life}): time.sleep(0.05)"
    services = [Unit(name, lambda role=role: [role]) for name, role in roles.items()]
    assert stage.run(stage.unit("main", wait), *services) == "finished"
    assert stage.supervisor is not None
    assert stage.supervisor.restarts == {"hung": 1, "busy": 0, "main": 0}
    assert any("hung: no sign of life for supervision.hang_timeout_s = 5 s" in report for report in stage.reports)


def test_services_that_do_not_end_are_ended_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasao.launch.supervisor.TERMINATE_GRACE_S", 0.3)
    stage = Stage(tmp_path, stop_timeout_s=0.3)
    polite, stubborn = stage.unit("polite", FOREVER), stage.unit("stubborn", STUBBORN)
    flag = tmp_path / "flag"
    main = stage.unit("main", f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.02)")
    stage.actions = [(lambda: "\nready\n" in stage.log("stubborn-0"), flag.touch)]
    assert stage.run(main, polite, stubborn) == "finished"
    assert polite.processes[0].code == -signal.SIGTERM
    assert stubborn.processes[0].code == -signal.SIGKILL
    assert "polite-0, stubborn-0 did not end by themselves" in stage.reports[0]


def test_a_service_that_nobody_tells_is_ended_once_the_others_are_gone(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    server, main = stage.unit("server", FOREVER), stage.unit("main", "pass")
    server.ends_by_itself = False
    client = stage.unit("client", "import time; time.sleep(0.5)")
    assert stage.run(main, client, server) == "finished"
    assert client.processes[0].code == 0
    assert server.processes[0].code == -signal.SIGTERM
    assert stage.reports == [], "that is how it should be, and no news"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    stage = Stage(tmp_path)
    service, main = stage.unit("service", FOREVER), stage.unit("main", FOREVER, FOREVER)
    stage.actions = [(lambda: True, lambda: os.kill(os.getpid(), number))]
    before = signal.signal(number, own := lambda *_: None)  # also where the tests themselves run with nohup
    try:
        assert stage.run(main, service) == "interrupted"
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
    assert not any(alive(p.pid) for unit in (service, main) for p in unit.processes)
    assert stage.reports == ["stopping every role; once more to kill them at once"]


def test_a_run_that_was_started_with_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    flag = tmp_path / "flag"
    main = stage.unit("main", f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.02)")
    stage.actions = [(lambda: True, lambda: (os.kill(os.getpid(), signal.SIGHUP), flag.touch()))]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stage.run(main) == "finished"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_ends_as_it_should_though_its_guardian_was_killed(tmp_path: Path) -> None:
    with Guardian() as guardian:
        os.kill(guardian._process.pid, signal.SIGKILL)
        guardian._process.wait()
        role = Role("role", [sys.executable, "-S", "-c", "pass"], tmp_path / "role.log")
        process = process_module.RoleProcess(role, guardian)
        wait_for(lambda: process.poll() is not None, "the role")
    assert process.code == 0


TRACE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
print(libc.ptrace(0x4206, int(sys.argv[1]), None, None), flush=True)  # PTRACE_SEIZE
sys.stdin.read()
"""


def test_a_role_in_a_debugger_does_not_hold_up_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process that is traced is there until its tracer looks at it."""
    monkeypatch.setattr(process_module, "KILLED_WITHIN_S", 0.2)
    role = Role("role", [sys.executable, "-S", "-c", "print('ready', flush=True)\n" + FOREVER], tmp_path / "role.log")
    with Guardian() as guardian:
        process = process_module.RoleProcess(role, guardian)
        wait_for(lambda: "\nready\n" in role.log.read_text(), "the role")
        command = [sys.executable, "-S", "-c", TRACE, str(process.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
            assert tracer.stdout is not None
            if tracer.stdout.readline() != b"0\n":
                process.kill()
                pytest.skip("this machine lets no process trace another")
            process.kill()
            assert process.code == process.poll() == -signal.SIGKILL
            assert process._process.returncode is None, "it was not reaped"
        assert process._process.wait(WAIT_S) == -signal.SIGKILL


def test_a_sign_of_life_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    heartbeat = tmp_path / ("beat" * 100)  # too long a name: neither there nor absent
    role = Role("role", [sys.executable, "-S", "-c", FOREVER], tmp_path / "role.log", heartbeat=heartbeat)
    with Guardian() as guardian:
        process = process_module.RoleProcess(role, guardian)
        first = process.silent_s()
        assert 0.0 <= first <= process.silent_s()
        process.kill()


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, stop_timeout_s=600.0)
    main = stage.unit("main", STUBBORN)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    stage.actions = [(lambda: "\nready\n" in stage.log("main-0"), interrupt), (lambda: bool(stage.reports), interrupt)]
    assert stage.run(main) == "interrupted"
    assert main.processes[0].code == -signal.SIGKILL


def test_what_a_dead_role_had_started_is_gone_too(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    child = tmp_path / "child"
    script = (
        "import subprocess, sys, os\n"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', {FOREVER!r}])\n"
        f"open({str(child)!r}, 'w').write(str(p.pid)); os._exit(0)"
    )
    assert stage.run(stage.unit("main", script)) == "finished"
    wait_for(lambda: not alive(int(child.read_text())), "the grandchild to end")


def test_an_error_in_the_panel_leaves_no_process(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    main = stage.unit("main", FOREVER)

    def break_down() -> None:
        raise ZeroDivisionError

    stage.actions = [(lambda: True, break_down)]
    with pytest.raises(ZeroDivisionError):
        stage.run(main)
    assert not alive(main.processes[0].pid)


def test_a_command_that_does_not_exist_fails_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_restarts=0)
    main = Unit("main", lambda: [Role("main-0", ["/no/such/program"], tmp_path / "main-0.log")])
    with pytest.raises(RoleFailed, match="No such file"):
        stage.run(main)


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert "out of memory" in describe_exit(-signal.SIGKILL)


def test_tail_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path, 3) == ""
    path.write_bytes(b"x" * 200_000 + b"\n1\n2\n\xff\n")
    assert tail(path, 3) == "1\n2\n\ufffd"


def test_the_kernel_alone_kills_a_role_whose_launcher_died(tmp_path: Path) -> None:
    child = Path(process_module.__file__).with_name("child.py")
    sleeper = [sys.executable, "-S", "-c", FOREVER]
    script = (
        "import os, subprocess, sys, time\n"
        f"guarded = [sys.executable, '-I', '-S', {str(child)!r}, str(os.getpid()), *{sleeper!r}]\n"
        f"print(*[subprocess.Popen(c, stdout=subprocess.DEVNULL).pid for c in (guarded, {sleeper!r})], flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        role, control = map(int, launcher.stdout.readline().split())
        wait_for(lambda: b"child.py" not in Path(f"/proc/{role}/cmdline").read_bytes(), "the role to start")
        launcher.kill()
    try:
        wait_for(lambda: not alive(role), "the role to end")
        assert alive(control)  # without child.py a process outlives its parent
    finally:
        os.kill(control, signal.SIGKILL)


def test_a_role_does_not_start_under_another_parent_than_its_launcher() -> None:
    child = Path(process_module.__file__).with_name("child.py")
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(child), "1", "echo", "started"], capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 1
    assert "launcher died" in result.stderr
    assert result.stdout == ""


def test_a_signal_at_any_moment_of_a_sleep_is_taken() -> None:
    signals, seen = StopSignals(), []

    def at_every_line(frame, event, argument):
        signals.receive(signal.SIGTERM, None)  # as the handler does, between two lines of whatever sleep runs
        seen.append(event)
        return at_every_line

    def sleep():
        sys.settrace(at_every_line)
        signals.sleep(0.0)
        sys.settrace(None)

    sleeping = threading.Thread(target=sleep, daemon=True)
    sleeping.start()
    sleeping.join(30)
    assert not sleeping.is_alive() and signals.count == len(seen) > 2
