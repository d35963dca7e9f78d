"""Containers that last an episode, against what would break out of them, in every runtime that is here."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from megasao.environments.sandbox import runtimes
from megasao.environments.sandbox.bubblewrap import SandboxUnavailable
from megasao.environments.sandbox.container import MAX_SCRIPT, Container, ContainerFailure
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.runtimes import RUNTIMES, Spot, command_line, first_with_images, removal, require
from tests.container_images import containers

MIB = 1 << 20
LIMITS = SandboxLimits(
    time_s=200.0, memory_bytes=256 * MIB, processes=40, file_bytes=4 * MIB, workspace_bytes=16 * MIB, output_bytes=4096
)


SLEEP = str(10**6 + os.getpid())
"""Seconds that only this process's commands sleep."""


def play(place, *scripts, stdin=b"", **limits):
    """What each script says, one after the other in one container. One that is to be stopped: (script, seconds)."""
    runtime, image = place
    container = Container(runtime, image, "/testbed", SandboxLimits(**{**vars(LIMITS), **limits}))

    async def body():
        try:
            await container.start()
            timed = [script if isinstance(script, tuple) else (script, None) for script in scripts]
            return [await container.run(script, stdin=stdin, time_s=seconds) for script, seconds in timed]
        finally:
            await container.close()

    outcomes = asyncio.run(asyncio.wait_for(body(), 250))
    assert left(runtime, container.name) == []
    return outcomes


def left(runtime, name):
    return [one for one in containers(runtime) if one == name] if runtime in ("podman", "docker") else []


FEW = "until [ $(ls /proc | grep -c '^[0-9]') -lt 9 ]; do :; done"
"""What was killed is gone once it was scheduled, and reaped."""
NO_SLEEP = "until [ $(cat /proc/[0-9]*/comm 2>/dev/null | grep -c sleep) = 0 ]; do :; done"


def test_files_stay_from_command_to_command(place):
    first, second, third = play(place, "cat > a; pwd; exit 3", "cat a | wc -c; ls", "cat b", stdin=b"x\0y\n" * 30_000)
    assert (first.exit_code, first.stopped_by) == (3, None)
    assert first.output.strip() == ("/workspace" if place[0] == "bubblewrap" else "/testbed")
    assert second.output.split() == ["120000", "a"] and third.exit_code == 1
    assert play(place, "ls")[0].output == "", "the next container begins anew"


def test_input_that_a_command_leaves_is_not_the_next_command(place):
    outcomes = play(place, "true", "head -c 3", "echo in step", stdin=b"echo no\n" * 20_000)
    assert [outcome.output for outcome in outcomes] == ["", "ech", "in step\n"]


def test_time_is_bounded_and_nothing_runs_on(place):
    slow, after, left_over, gone = play(
        place,
        ("echo begun; trap '' TERM INT HUP; setsid sleep 1234 & sleep 1234", 3.0),
        f"echo alive; {FEW}",
        "setsid sleep 1234 & echo left; exit 2",
        f"{NO_SLEEP}; echo none",
    )
    assert (slow.stopped_by, slow.exit_code) == ("time", None) and slow.output.startswith("begun\n")
    assert (after.output, after.exit_code) == ("alive\n", 0)
    assert (left_over.output, left_over.exit_code) == ("left\n", 2)
    assert gone.output == "none\n"


def test_killing_what_runs_the_commands_is_impossible(place):
    outcomes = play(place, "kill -9 1; kill -STOP 1; kill -9 -1; exit 5", "kill -9 $PPID; echo no", "echo fine")
    assert outcomes[0].exit_code != 0 and outcomes[-1].output == "fine\n"


def test_a_flood_of_output_is_dropped_and_the_exit_status_is_not(place):
    flood, after = play(place, "head -c 20000000 /dev/zero | tr '\\0' x; exit 4", "echo fine")
    assert (flood.exit_code, flood.truncated, len(flood.output)) == (4, True, 4096) and after.output == "fine\n"


def test_there_is_no_network(place):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5); print('connected')"
        refused, names = play(
            place,
            f'python3 -c "{code}"',
            'python3 -c "import socket; print([name for _, name in socket.if_nameindex()])"',
        )
        assert refused.exit_code == 1 and "refused" in refused.output and names.output == "['lo']\n"


def test_files_and_variables_of_the_host_are_not_there(place, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    secret.chmod(0o644)
    monkeypatch.setenv("MEGASAO_TEST_SECRET", "1")
    seen, written = play(
        place,
        f"cat {secret}; env; tr '\\0' ' ' < /proc/1/environ; cat /proc/1/cmdline; ls /home /root",
        f"ln -s {secret} link; echo changed > link; echo changed > /proc/sys/kernel/hostname; cat link",
    )
    assert "hidden" not in seen.output and "MEGASAO" not in seen.output
    assert secret.read_text() == "hidden" and "hidden" not in written.output


def test_it_has_no_capabilities_and_cannot_mount(place):
    mount = "import ctypes; print(ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0))"
    (outcome,) = play(place, f'grep CapEff /proc/self/status; python3 -c "{mount}"')
    assert "CapEff:\t0000000000000000" in outcome.output and outcome.output.endswith("-1\n")


def test_memory_is_bounded_for_one_process_and_for_all(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    family = (
        "import os, time\nfor _ in range(6):\n  if not os.fork():\n    x = bytes([1]) * (100 << 20); time.sleep(600)\n"
    )
    family += "print(sum(os.wait()[1] == 9 for _ in range(3)))"  # there is room for two
    one, several, after = play(place, "python3 -c 'bytes([1]) * 10**9'", f"python3 -c '{family}'", "echo fine")
    assert one.exit_code != 0
    assert several.stopped_by == "memory" or int(several.output.split()[-1]) >= 3, several
    assert after.output == "fine\n" and not list(tmp_path.iterdir()), "the worker's directory is left alone"


FORKS = """import os, time
count = 0
try:
    while count < 200:
        if not os.fork():
            time.sleep(600)
        count += 1
except OSError:
    print(count)
"""


def test_a_fork_bomb_hits_the_limit_and_is_gone(place):
    counted, bomb, after = play(
        place,
        f"python3 -c '{FORKS}'",
        ("bomb() { bomb | bomb & }; bomb; sleep 1000", 2.0),
        f"echo fine; {FEW}",
    )
    assert 0 < int(counted.output) < LIMITS.processes
    assert bomb.exit_code != 0 and (after.output, after.exit_code) == ("fine\n", 0)


def test_a_file_has_a_largest_size(place):
    big, after = play(place, "head -c 20000000 /dev/zero > big; echo $?", "wc -c < big")
    assert int(after.output) <= LIMITS.file_bytes and big.output.strip() != "0"


def test_a_container_that_ends_is_a_failure_and_no_outcome(place):
    runtime, image = place
    container = Container(runtime, image, "/testbed", LIMITS)

    async def body():
        try:
            await container.start()
            running = asyncio.create_task(container.run("sleep 60"))
            await asyncio.sleep(0.5)
            command = removal(runtime, container.name)
            if command is None:
                os.killpg(container._process.pid, signal.SIGKILL)
            else:
                subprocess.run(command, capture_output=True, timeout=60)
            with pytest.raises(ContainerFailure, match="ended by itself"):
                await asyncio.wait_for(running, 100)
        finally:
            await container.close()

    asyncio.run(body())
    assert left(runtime, container.name) == []


def test_a_cancelled_command_leaves_no_container(place):
    """As when an episode's time is over."""
    runtime, image = place
    container = Container(runtime, image, "/testbed", LIMITS)

    async def body():
        try:
            await container.start()
            async with asyncio.timeout(0.5):
                await container.run(f"sleep {SLEEP}")
        finally:
            await container.close()

    with pytest.raises(TimeoutError):
        asyncio.run(body())
    until_nothing_is_left(runtime, container.name)


SLEEPER = """
import asyncio, sys
from megasao.environments.sandbox.container import Container
from megasao.environments.sandbox.limits import SandboxLimits

async def main(runtime, image):
    container = Container(runtime, image, "/testbed", SandboxLimits(time_s=600.0))
    await container.start()
    await container.run("true")
    print(container.name, flush=True)
    await container.run("sleep SECONDS & sleep SECONDS")

asyncio.run(main(*sys.argv[1:]))
""".replace("SECONDS", SLEEP)


def test_a_killed_worker_leaves_no_container(place):
    """SIGKILL in the middle of a command: nothing of the container is left."""
    runtime, image = place
    with subprocess.Popen([sys.executable, "-c", SLEEPER, runtime, image], stdout=subprocess.PIPE, text=True) as worker:
        name = worker.stdout.readline().strip()
        assert name.startswith("megasao-") and (runtime == "bubblewrap" or left(runtime, name) == [name])
        worker.kill()
    until_nothing_is_left(runtime, name)


def until_nothing_is_left(runtime, name):
    """Neither the container nor a command of it; what is killed is gone a little later."""
    deadline = time.monotonic() + 120
    while left(runtime, name) or any(sleepers()):
        assert time.monotonic() < deadline, (left(runtime, name), list(sleepers()))
        time.sleep(0.05)


def sleepers():
    return (p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", SLEEP])


def test_an_image_that_is_not_there_is_a_failure_that_names_it(ready):
    ready("podman")
    container = Container("podman", "localhost/megasao-absent:1", "/testbed", LIMITS)

    async def body():
        try:
            await container.start()
        finally:
            await container.close()

    with pytest.raises(ContainerFailure, match="podman container of localhost/megasao-absent:1 did not start"):
        asyncio.run(body())


@pytest.mark.parametrize("runtime", ["enroot", "docker"])
def test_what_shares_the_hosts_processes_or_network_runs_nothing(monkeypatch, runtime):
    """A runtime that isolates less than its command line asks for, whatever the reason."""
    monkeypatch.setattr("megasao.environments.sandbox.container.require", lambda runtime: None)
    monkeypatch.setitem(runtimes._LINES, runtime, lambda spot, inside: list(inside))
    monkeypatch.setattr("megasao.environments.sandbox.container.removal", lambda runtime, name: None)
    container = Container(runtime, "image", "/", LIMITS)

    async def body():
        try:
            await container.start()
        finally:
            await container.close()

    with pytest.raises(ContainerFailure, match=f"{runtime} shares its pid and net namespace with the host"):
        asyncio.run(body())


def test_what_stands_around_enroot_isolates_by_itself(tmp_path, monkeypatch):
    """With a stand-in that only runs its command: processes and network are those of unshare, the limits prlimit's."""
    if subprocess.run([*runtimes._NAMESPACES, "true"], capture_output=True).returncode != 0:
        pytest.skip("unshare makes no user namespace here")
    (tmp_path / "enroot").write_text('#!/bin/sh\n[ "$1" = version ] && exit\nshift 3\nexec "$@"\n')
    (tmp_path / "enroot").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runtimes._why_not.cache_clear()
    container = Container("enroot", "IMAGE", str(tmp_path), LIMITS)

    async def body():
        try:
            await container.start()
            return [
                await container.run(script, time_s=seconds)
                for script, seconds in (
                    ("cat /proc/net/dev | grep -c :; ls /proc | grep -c '^[0-9]'", None),
                    (f"ulimit -v; setsid sleep {SLEEP} & sleep {SLEEP}", 3.0),
                    (f"{NO_SLEEP}; echo none", None),
                )
            ]
        finally:
            await container.close()

    seen, slow, gone = asyncio.run(body())
    runtimes._why_not.cache_clear()
    interfaces, processes = map(int, seen.output.split())
    assert interfaces == 1 and processes < 9
    assert slow.stopped_by == "time" and slow.output.startswith("262144\n") and gone.output == "none\n"
    until_nothing_is_left("enroot", container.name)


def test_a_runtime_that_hands_its_environment_on_gets_little_of_it(monkeypatch):
    monkeypatch.setenv("MEGASAO_TEST_SECRET", "1")
    monkeypatch.setenv("ENROOT_DATA_PATH", "/data")
    assert runtimes.variables("enroot").keys() <= {
        "PATH",
        "HOME",
        "USER",
        "TMPDIR",
        "ENROOT_DATA_PATH",
        "ENROOT_MOUNT_HOME",
    } | {name for name in os.environ if name.startswith("XDG_")}
    assert runtimes.variables("enroot")["ENROOT_MOUNT_HOME"] == "no"
    assert runtimes.variables("none").keys() == {"PATH"}


def test_none_isolates_nothing_and_must_be_asked_for(monkeypatch):
    monkeypatch.setenv("MEGASAO_TEST_SECRET", "1")
    outcome, slow = play(("none", ""), "echo $$ > a; cat a; ls", ("sleep 900", 1.0))
    assert outcome.output.split()[1] == "a" and slow.stopped_by == "time"
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    runtimes._why_not.cache_clear()
    try:
        for runtime in RUNTIMES:
            if runtime not in ("bubblewrap", "none"):
                with pytest.raises(SandboxUnavailable, match=f"no container runtime {runtime}: .*sandbox: none"):
                    require(runtime)
        with pytest.raises(SandboxUnavailable, match=r"podman is not in PATH; docker: .*pyxis: .* a Slurm job"):
            first_with_images()
    finally:
        runtimes._why_not.cache_clear()


def test_a_command_that_no_kernel_takes_is_refused():
    container = Container("none", "", "", LIMITS)
    for script in ("x" * (MAX_SCRIPT + 1), "a\0b"):
        with pytest.raises(ValueError, match="a command of"):
            asyncio.run(container.capture(script))
    asyncio.run(container.close())


SPOT = Spot("megasao-1", "IMAGE", "/testbed", LIMITS)
KERNEL = "--as=268435456 --fsize=4194304 --core=0 --"
NAMESPACES = "unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc"
DOCKER = (
    "run --rm --interactive --name=megasao-1 --network=none --cap-drop=ALL --security-opt=no-new-privileges "
    "--memory=268435456b --memory-swap=268435456b --pids-limit=40 --ulimit=fsize=4194304:4194304 --ulimit=core=0:0 "
    "--ulimit=nofile=4096:4096 --ulimit=nproc=4096:4096 --log-driver=none --entrypoint= --workdir=/testbed IMAGE "
    "sh loop"
)
GOLDEN = {
    "podman": f"podman {DOCKER}",
    "docker": f"docker {DOCKER}",
    "apptainer": f"PRLIMIT {KERNEL} apptainer --silent exec --containall --cleanenv --no-home --no-privs "
    "--writable-tmpfs --net --network=none --memory=268435456 --memory-swap=268435456 --pids-limit=40 --pwd=/testbed "
    "IMAGE sh loop",
    "enroot": f"{NAMESPACES} PRLIMIT --nproc=40 {KERNEL} enroot start --rw IMAGE sh loop",
    "pyxis": "srun --overlap --nodes=1 --ntasks=1 --unbuffered --export=NONE --nodelist=NODE --job-name=megasao-1 "
    "--container-image=IMAGE --container-writable --no-container-mount-home --no-container-entrypoint "
    f"--container-workdir=/testbed {NAMESPACES} PRLIMIT --nproc=40 {KERNEL} sh loop",
    "none": f"PRLIMIT {KERNEL} sh loop",
}

REMOVALS = {
    "podman": ["podman", "rm", "--force", "--time=0", "--volumes", "megasao-1"],
    "docker": ["docker", "rm", "--force", "--volumes", "megasao-1"],
}


@pytest.mark.parametrize("runtime", GOLDEN)
def test_command_lines_are_these(monkeypatch, runtime):
    monkeypatch.setattr("platform.node", lambda: "NODE")
    monkeypatch.setattr("shutil.which", lambda name: name.upper() if name == "prlimit" else None)
    assert command_line(runtime, SPOT, ["sh", "loop"]) == GOLDEN[runtime].split()
    assert removal(runtime, "megasao-1") == REMOVALS.get(runtime)
