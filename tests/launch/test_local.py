"""The whole local launcher with small scripts as roles: stages, orphans, Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launch_support import WAIT_S, alive, wait_for

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"

LAUNCHER = """
import sys
from pathlib import Path
from megasao.config.load import load_config
from megasao.launch.local import launch

directory, resume, behaviour = Path(sys.argv[1]), sys.argv[2] == "resume", sys.argv[3]
overrides = [f"run.directory={directory}", "observability.panel=off", "supervision.stop_timeout_s=3"]
config = load_config(sys.argv[4], overrides)

START = '''
import os, subprocess, sys, time
role, index, run, behaviour = sys.argv[1:]
open(f"{run}/started", "a").write(f"{role} {index} {os.getpid()}\\\\n")
def finish_file(): return os.path.exists(f"{run}/finish")
def ports(): return open(f"{run}/ports").read().count("\\\\n")
'''
ROLES = {
    "controller": "while not finish_file(): time.sleep(0.02)",
    "rollout": (
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\\n"
        "open(f'{run}/started', 'a').write(f'grandchild 0 {child.pid}\\\\n')\\n"
        "while not finish_file(): time.sleep(0.02)"
    ),
    "sft": (
        "if os.environ['RANK'] == '0':\\n"
        "    os.makedirs(f'{run}/sft', exist_ok=True)\\n    open(f'{run}/sft/COMPLETE', 'w')\\n"
    ),
    "trainer": (
        "open(f'{run}/ports', 'a').write(os.environ['MASTER_PORT'] + '\\\\n')\\n"
        "if behaviour == 'finish':\\n    open(f'{run}/finish', 'w')\\n"
        "elif behaviour == 'crash' and ports() <= 2:\\n"
        "    while ports() < 2: time.sleep(0.02)\\n    sys.exit(5)\\n"
        "elif behaviour == 'crash':\\n    open(f'{run}/finish', 'w')\\n"
        "else:\\n    time.sleep(600)"
    ),
}

def make_command(run):
    return lambda role, index: [
        sys.executable, "-S", "-c", START + ROLES[role], role, str(index), str(run.path), behaviour
    ]

outcome, run = launch(config, resume=resume, make_command=make_command)
print("outcome", outcome, flush=True)
"""


def started(run: Path) -> list[tuple[str, str, int]]:
    """(role, index, pid) of every start so far."""
    path = run / "started"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(role, index, int(pid)) for role, index, pid in rows]


@contextmanager
def launcher(directory: Path, behaviour: str, *, resume: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """A launcher process of its own."""
    arguments = [str(directory), "resume" if resume else "fresh", behaviour, str(LAPTOP)]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_fine_tuning_first_then_everything(tmp_path: Path) -> None:
    with launcher(tmp_path, "finish") as process:
        output, _ = process.communicate(timeout=WAIT_S)
    assert "outcome finished" in output, output
    assert process.returncode == 0
    roles = [role for role, _, _ in started(tmp_path / "laptop")]
    assert sorted(roles[:2]) == ["sft", "sft"]
    assert sorted(roles[2:]) == ["controller", "grandchild", "rollout", "trainer", "trainer"]
    assert (tmp_path / "laptop" / "logs" / "trainer-1.log").exists()
    with launcher(tmp_path, "finish", resume=True) as process:
        process.communicate(timeout=WAIT_S)
    again = [role for role, _, _ in started(tmp_path / "laptop")][len(roles) :]
    assert "sft" not in again
    assert again.count("trainer") == 2


def test_a_dead_rank_brings_all_ranks_back_on_a_fresh_port(tmp_path: Path) -> None:
    with launcher(tmp_path, "crash") as process:
        output, _ = process.communicate(timeout=WAIT_S)
    assert "outcome finished" in output, output
    assert "restarting trainer" in output
    ports = (tmp_path / "laptop" / "ports").read_text().split()
    assert len(ports) == 4
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_a_run_whose_output_nobody_reads_any_more_goes_on(tmp_path: Path) -> None:
    with launcher(tmp_path, "crash") as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=WAIT_S)
        log = (tmp_path / "laptop" / "logs" / "launcher.log").read_text()
        assert log.count("restarting trainer") == 1 and (tmp_path / "laptop" / "finish").exists()


def everything_started(run: Path) -> bool:
    roles = [role for role, _, _ in started(run)]
    return roles.count("trainer") == 2 and "controller" in roles and "grandchild" in roles


def test_a_launcher_killed_by_sigkill_leaves_no_orphans(tmp_path: Path) -> None:
    run = tmp_path / "laptop"
    with launcher(tmp_path, "forever") as process:
        wait_for(lambda: everything_started(run), "every role to start")
        pids = [pid for role, _, pid in started(run) if role != "sft"]
        assert all(alive(pid) for pid in pids)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in pids), "every role and its children to end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "laptop"
    with launcher(tmp_path, "forever") as process:
        wait_for(lambda: everything_started(run), "every role to start")
        pids = [pid for _, _, pid in started(run)]
        process.send_signal(number)
        output, _ = process.communicate(timeout=WAIT_S)
        assert "outcome interrupted" in output, output
        wait_for(lambda: not any(alive(pid) for pid in pids), "every role and its children to end")
    with launcher(tmp_path, "finish", resume=True) as process:
        output, _ = process.communicate(timeout=WAIT_S)
    assert "outcome finished" in output, output
