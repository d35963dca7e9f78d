"""The sandbox against what would break out of it. Each attempt runs for real; skipped with the reason where none is."""

import asyncio
import gzip
import os
import socket
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from megasao.environments.base import EnvironmentFailure
from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.bubblewrap import SandboxUnavailable
from megasao.environments.sandbox.run import Sandbox, SandboxLimits
from megasao.environments.sandbox.workspace import in_the_way, pack, unpack, with_files

MIB = 1 << 20
LIMITS = SandboxLimits(
    time_s=200.0, memory_bytes=256 * MIB, processes=20, file_bytes=MIB, workspace_bytes=8 * MIB, output_bytes=4096
)


def unavailable():
    try:
        bubblewrap.require()
    except SandboxUnavailable as error:
        return str(error)
    return None


REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PYTHON = Path("/usr/bin/python3")
needs_python = pytest.mark.skipif(not PYTHON.exists(), reason="the system has no /usr/bin/python3")


def run(command, workspace=None, *, kind="bubblewrap", **limits):
    sandbox = Sandbox(kind, SandboxLimits(**{**vars(LIMITS), **limits}))
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    return asyncio.run(asyncio.wait_for(sandbox.run(words, workspace), 250))


def python(code, **limits):
    return run([str(PYTHON), "-c", code], **limits)


def test_a_command_gets_a_workspace_and_gives_one_back():
    outcome = run("cat in.txt; mkdir d; echo two > d/out.txt; echo error >&2; exit 3", pack({"in.txt": b"one\n"}))
    assert (outcome.exit_code, outcome.stopped_by, outcome.output) == (3, None, "one\nerror\n")
    assert unpack(outcome.workspace) == {"in.txt": b"one\n", "d/out.txt": b"two\n"}
    again = run("cat d/out.txt; rm in.txt", outcome.workspace)
    assert again.output == "two\n" and unpack(again.workspace) == {"d/out.txt": b"two\n"}


@needs_python
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5); print('connected')"
        outcome = python(code)
        assert outcome.exit_code == 1 and "connected" not in outcome.output
        listening = threading.Thread(target=server.accept, daemon=True)
        listening.start()
        control = python(code, kind="none")  # the same code reaches the server where nothing isolates it
        assert control.output == "connected\n"
    names = python("import socket; print([n for _, n in socket.if_nameindex()])").output
    assert names == "['lo']\n"


def test_files_of_the_host_are_not_there(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    secret.chmod(0o644)
    outcome = run(f"cat {secret}; cat /etc/passwd; cat /proc/1/environ; ls /; ls /home; env")
    assert "hidden" not in outcome.output and "root:" not in outcome.output
    os.environ["MEGASAO_TEST_SECRET"] = "1"
    try:
        assert "MEGASAO" not in run("env; cat /proc/*/environ", output_bytes=MIB).output
        assert "MEGASAO" in run("env", kind="none").output
    finally:
        del os.environ["MEGASAO_TEST_SECRET"]


@pytest.mark.parametrize("path", ["/x", "/usr/x", "/usr/bin/x", "/dev/x", "/proc/x", "/proc/sys/kernel/hostname"])
def test_the_system_is_read_only(path):
    outcome = run(f"echo changed > {path}; mkdir -p {path}.d")
    assert outcome.exit_code != 0 and not Path(path).is_dir()
    assert not path.startswith("/usr") or not Path(path).exists()


def test_tmp_is_private():
    run("echo left > /tmp/megasao-sandbox-test")
    assert not Path("/tmp/megasao-sandbox-test").exists()
    assert "left" not in run("cat /tmp/megasao-sandbox-test").output


def test_a_fork_bomb_hits_the_limit_and_is_gone():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    run("bomb() { bomb | bomb & }; bomb; sleep 1000", time_s=1.5)
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    counted = run("for i in $(seq 200); do sleep 250 & done; echo all")
    assert "all" not in counted.output.splitlines() and "fork" in counted.output.lower()


def test_the_disk_cannot_be_filled():
    fill = "i=0; while head -c 900000 /dev/zero > {}/f$i; do i=$((i+1)); done 2>/dev/null; echo $i"
    for place in (".", "/tmp", "/dev/shm"):
        assert 5 <= int(run(fill.format(place)).output) <= 10, place
    big = run("head -c 2000000 /dev/zero > big; ls -l big")
    assert big.exit_code == 0 and " 1048576 " in big.output


@needs_python
def test_memory_is_bounded_for_one_process_and_for_all():
    assert "MemoryError" in python("x = bytearray(10**9)").output
    family = "import os, time\nfor _ in range(6):\n  if not os.fork():\n    x = b'1' * (100 << 20); time.sleep(60)\n"
    outcome = python(family + "time.sleep(60)")
    assert outcome.stopped_by == "memory" and outcome.exit_code is None


def test_time_is_bounded_and_nothing_runs_on():
    sleep = f"sleep {10**6 + os.getpid()}"  # nobody else's
    for command in ("while :; do :; done", f"trap '' TERM INT HUP; {sleep}", f"setsid {sleep}; {sleep}"):
        outcome = run(command, pack({"a": b"1"}), time_s=1.0)
        assert outcome.stopped_by == "time" and outcome.exit_code is None
        assert unpack(outcome.workspace) == {"a": b"1"}
    assert run(f"setsid {sleep} & echo left").exit_code == 0
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == sleep.split()]
    assert not sleeping


def test_a_flood_of_output_is_dropped():
    outcome = run("head -c 100000000 /dev/zero | tr '\\0' x; exit 4")
    assert outcome.exit_code == 4 and outcome.truncated and len(outcome.output) == 4096


@pytest.mark.parametrize("command", ["kill -9 $PPID", "kill -9 -1", "kill -9 1", "kill -STOP $PPID"])
def test_killing_the_parent_hurts_nobody_else(command):
    outcome = run(f"echo changed > a; {command}; sleep 0.2", pack({"a": b"1"}), time_s=3.0)
    assert unpack(outcome.workspace) in ({"a": b"1"}, {"a": b"changed\n"})
    assert run("echo fine").output == "fine\n"


def test_killing_processes_of_the_host_is_impossible():
    with subprocess.Popen(["sleep", "60"]) as victim:
        run(f"kill -9 {victim.pid}; kill -9 {os.getpid()}; ls /proc")
        assert victim.poll() is None
        shown = run("ls /proc").output.split()
        assert str(victim.pid) not in shown or len([p for p in shown if p.isdigit()]) < 10
        victim.kill()


def test_links_lead_nowhere(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    made = run(f"ln -s {secret} link; ln -s /etc/passwd passwd; ln -s ../../.. up; mkfifo pipe; echo x > plain")
    assert unpack(made.workspace) == {"plain": b"x\n"}
    later = run("cat link passwd; ls up; echo changed > link", made.workspace)
    assert "hidden" not in later.output and secret.read_text() == "hidden"


def test_it_has_no_capabilities_and_cannot_mount():
    outcome = run("grep CapEff /proc/self/status; mount -t tmpfs none /tmp && echo mounted; unshare -Urm true")
    assert "CapEff:\t0000000000000000" in outcome.output and "mounted" not in outcome.output


@pytest.mark.parametrize("command", ["exit 125", "echo 'bwrap: no' >&2; exit 1", "echo begun; exit 127"])
def test_nothing_that_a_command_does_is_taken_for_a_sandbox_that_did_not_start(command):
    outcome = run(command, pack({"a": b"1"}))
    assert outcome.exit_code == int(command.split()[-1]) and unpack(outcome.workspace) == {"a": b"1"}


@pytest.mark.parametrize(
    "command",
    [
        "truncate -s 1M a b c d; truncate -s 900k e",  # swells beyond the tmpfs when it is unpacked
        f"for i in $(seq 25); do mkdir {'d' * 200}; cd -P {'d' * 200}; done; echo deep > deep",  # too long a path
    ],
)
def test_a_workspace_that_cannot_be_unpacked_whole_is_the_commands_own_doing(command):
    kept = {"file_bytes": MIB, "workspace_bytes": 4 * MIB}
    made = run(f"{command}; echo x > /workspace/plain", **kept)
    assert unpack(made.workspace)["plain"] == b"x\n"
    later = run("echo it runs", pack(with_files(unpack(made.workspace), {"own": b"1"})), **kept)
    assert later.exit_code == 0 and "it runs" in later.output
    assert "it runs" in run("echo it runs", made.workspace, **kept).output


@pytest.mark.parametrize("said", ["echo no archive", "tar -czf - ."])
def test_what_a_command_writes_in_the_place_of_the_archive_leaves_the_workspace_as_it_was(said):
    """Else the next call would find no archive, and the episode count for nothing."""
    before = pack({"a": b"1"})
    everywhere = f"for n in 1 10 11 12; do (({said}) > /proc/$PPID/fd/$n) 2>/dev/null; done; rm a"  # a shell keeps it
    outcome = asyncio.run(Sandbox("none").run(["/bin/sh", "-c", everywhere], before))
    assert outcome.exit_code == 0 and outcome.workspace == before
    with pytest.raises(EnvironmentFailure, match="the workspace is no archive"):  # control
        run("true", gzip.compress(before))


def test_a_workspace_that_was_cut_off_has_what_came_before():
    whole = pack({"a": b"1", "b": b"2" * 2000})
    assert unpack(whole[:1100]) == {"a": b"1"} and unpack(whole[:600]) == {"a": b"1"}
    assert run("cat a", whole[:1100]).output.splitlines()[-1].endswith("1")


def test_files_that_are_put_in_are_there_whatever_was_there_before():
    model = {"t.py/x": b"", "d": b"", "own": b"old", "d2/y": b"", "other": b"3"}
    files = with_files(model, {"t.py": b"1", "d/z": b"2", "own": b"new"})
    assert files == {"t.py": b"1", "d/z": b"2", "own": b"new", "d2/y": b"", "other": b"3"}
    assert list(files)[:3] == ["t.py", "d/z", "own"]  # first, in case the rest does not fit
    assert run("cat t.py d/z own", pack(files)).output == "12new"
    assert not in_the_way("a/b", {"a/c", "ab", "a/b.py"})


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a\0b", "x" * 256, "x/" * 2100 + "x"])
def test_a_workspace_stays_inside(name):
    with pytest.raises(ValueError, match="inside the workspace"):
        pack({name: b""})


def test_what_is_no_workspace_is_refused():
    with pytest.raises(ValueError, match="not an archive"):
        unpack(b"x" * 2000)
    with pytest.raises(EnvironmentFailure, match="did not start"):
        run("true", b"x" * 2000)


def test_without_bubblewrap_it_is_refused_unless_none_is_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    bubblewrap._why_not.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match=r"bubblewrap is not installed.*set sandbox: none"):
            Sandbox()
        Sandbox("none")
        with pytest.raises(ValueError, match="expected bubblewrap or none"):
            Sandbox("docker")
    finally:
        bubblewrap._why_not.cache_clear()


@pytest.mark.parametrize("name", list(vars(LIMITS)))
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=name):
        SandboxLimits(**{name: 0})
