"""A real Slurm on this machine: one controller, several virtual nodes with fake GPUs, munge; all in one directory.

Debian builds Slurm so that one machine can carry many ``slurmd``, each a node. Nothing is left when ``close`` returns:
jobs are cancelled, and every process whose session began here is ended.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged")
START_S, STOP_S = 120.0, 60.0
GPUS = 2

_CONF = """\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={root}/task_prolog
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/jobs.txt
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,requeue_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=3
MinJobAge=600
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=20
DefMemPerCPU=100
MailProg=/bin/true
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=16 \\
 RealMemory=16000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""

# What a test writes into faults/NODE becomes part of the environment of every task on that node.
_PROLOG = """\
#!/bin/sh
[ ! -f {root}/faults/$SLURMD_NODENAME ] || cat {root}/faults/$SLURMD_NODENAME
"""


def why_not() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    missing = [name for name in COMMANDS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed; `make slurm` installs Slurm as root on Debian"
    return None if os.geteuid() == 0 else "virtual Slurm nodes need root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Cluster:
    """A running Slurm."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root = root
        self.nodes = [f"n{index + 1}" for index in range(nodes)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool", "faults"):
            (root / name).mkdir()
        for name in self.nodes:
            (root / "spool" / name).mkdir()
        ports = _free_ports(1 + nodes)
        conf = _CONF.format(
            root=root,
            host=socket.gethostname().split(".")[0],
            port=ports[0],
            first=ports[1],
            last=ports[1] + nodes - 1,
            nodes=nodes,
            gpus=GPUS,
        )
        (root / "slurm.conf").write_text(conf, encoding="utf-8")
        gpus = [self._fake_gpu(index) for index in range(GPUS)]
        lines = "".join(f"NodeName=n[1-{nodes}] Name=gpu File={gpu}\n" for gpu in gpus)
        (root / "gres.conf").write_text(lines, encoding="utf-8")
        prolog = root / "task_prolog"
        prolog.write_text(_PROLOG.format(root=root), encoding="utf-8")
        prolog.chmod(0o755)

    def _fake_gpu(self, index: int) -> Path:
        """A character device: with plain files Slurm leaves CUDA_VISIBLE_DEVICES empty."""
        path = self.root / f"gpu{index}"
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3 + 2 * index))
        return path

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": _path()}

    def start(self) -> None:
        """Start everything, and wait until every node is idle."""
        self._start_munge()
        self._start("slurmctld", ["slurmctld", "-D", "-i", "-f", str(self.root / "slurm.conf")])
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: self.idle() == len(self.nodes), START_S, lambda: self.call("sinfo", "-N"))

    def start_node(self, node: str) -> None:
        """(Re)start a node's slurmd; what watched the steps of a killed one would wait for it for ever."""
        self._end_watchers(node)
        self._start(node, ["slurmd", "-D", "-f", str(self.root / "slurm.conf"), "-N", node])

    def kill_node(self, node: str) -> None:
        """SIGKILL of the node's slurmd; its tasks go on, as they would on a node that is cut off."""
        self._processes[node].kill()
        self._processes[node].wait(STOP_S)

    def idle(self) -> int:
        """Idle nodes."""
        return self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).count("\n")

    def call(self, *command: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Output of a command of Slurm's."""
        environment = {**self.environment, **(env or {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state, such as RUNNING; of a heterogeneous one that of its first component."""
        for part in self.call("scontrol", "show", "job", job).split():
            if part.startswith("JobState="):
                return part.removeprefix("JobState=")
        raise AssertionError(f"job {job} has no state")

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started through this Slurm, its own daemons not among them."""
        daemons = {process.pid for process in self._processes.values()}
        conf = str(self.root / "slurm.conf")
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SLURM_CONF") == conf or str(self.root) in " ".join(process.cmdline())
            except psutil.Error:
                continue
            if ours and process.pid not in daemons and process.pid != os.getpid():
                found.append(process)
        return found

    def close(self) -> None:
        """Cancel every job, stop the daemons, and end whatever is left."""
        self.call("scancel", "--user=root", check=False)
        deadline = time.monotonic() + STOP_S
        while self.call("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in self.processes():
            left.kill()
        for node in self.nodes:
            self._end_watchers(node)

    def _end_watchers(self, node: str) -> None:
        """SIGKILL of every slurmstepd of a node, which its open log names: it hides its environment."""
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "slurmstepd" and self.root / f"{node}.log" in _open_files(process.pid):
                with suppress(psutil.Error):
                    process.kill()

    def _start_munge(self) -> None:
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        places = {
            "key-file": key,
            "socket": self.root / "munge.socket",
            "pid-file": self.root / "munged.pid",
            "log-file": self.root / "munged.log",
            "seed-file": self.root / "munged.seed",
        }
        options = [f"--{name}={path}" for name, path in places.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        wait_until(places["socket"].exists, START_S, lambda: "munged made no socket")

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )


def wait_until(condition: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    """Poll, bounded; the failure says what ``explain`` says."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


def _open_files(pid: int) -> set[Path]:
    with suppress(OSError):
        return {descriptor.readlink() for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    return set()


def _free_ports(count: int) -> list[int]:
    """Neighbouring ports below the range of outgoing connections."""
    for first in range(20_000 + os.getpid() % 1000 * 10, 32_000, count):
        ports = list(range(first, first + count))
        if all(_free(port) for port in ports):
            return ports
    raise AssertionError("no free ports")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
