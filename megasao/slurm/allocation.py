"""What Slurm gave this job, and whether the run fits into it.

Invariants (tests assert them):
- an allocation that is smaller than the plan anywhere is refused before anything starts, naming component and number;
- the names of the nodes are in the order in which Slurm counts tasks.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megasao.config.errors import UserError
from megasao.slurm.plan import JobPlan

COMMAND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Share:
    """One component of the job as Slurm has it."""

    job: str
    nodes: tuple[str, ...]
    cpus: int
    gpus_per_node: int


@dataclass(frozen=True)
class Allocation:
    """The whole job. ``restarts``: how often Slurm has started it again."""

    job: str
    shares: tuple[Share, ...]
    restarts: int


def slurm_command(*command: str) -> str:
    """Output of one of Slurm's commands. UserError with what it said if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not there: is this a node of a Slurm cluster?") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(command)} did not answer within {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """The job that this process runs in. UserError outside of one."""
    if "SLURM_JOB_ID" not in environment:
        raise UserError("this is not inside a Slurm job (no SLURM_JOB_ID); submit it with sbatch slurm/glm_scale.sh")
    job = environment["SLURM_JOB_ID"]
    components = int(environment.get("SLURM_HET_SIZE", "1"))
    ids = [environment.get(f"SLURM_JOB_ID_HET_GROUP_{index}", job) for index in range(components)]
    return Allocation(
        job=job,
        shares=tuple(_share(each) for each in ids),
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
    )


def _share(job: str) -> Share:
    text = slurm_command("scontrol", "show", "job", "--oneliner", job)
    # A heterogeneous job's first id shows all of its components, a line each.
    line = next((each for each in text.splitlines() if re.match(rf"JobId={job}\b", each)), "")
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    if not fields.get("NodeList"):
        raise UserError(f"scontrol does not say which nodes job {job} has: {text.strip()}")
    nodes = slurm_command("scontrol", "show", "hostnames", fields["NodeList"]).split()
    return Share(job, tuple(nodes), int(fields["NumCPUs"]), gpus_per_node(fields.get("TresPerNode", "")))


def gpus_per_node(tres: str) -> int:
    """GPUs in a text such as ``gres:gpu:h100:8``; 0 where there is none."""
    found = re.search(r"\bgpu(?:[:/][A-Za-z]\w*)?[:=](\d+)", tres)
    return int(found.group(1)) if found else 0


def refuse_what_does_not_fit(plan: JobPlan, allocation: Allocation, *, remedy: str) -> None:
    """UserError listing everything that the allocation lacks, with the ``remedy``."""
    have, want = len(allocation.shares), len(plan.components)
    lacking = [f"{have} components instead of {want}"] if have != want else []
    for component, share in zip(plan.components, allocation.shares, strict=False) if not lacking else ():
        wanted = {
            "nodes": (component.nodes, len(share.nodes)),
            "CPUs": (component.tasks * component.cpus_per_task, share.cpus),
            "GPUs a node": (component.gpus_per_node, share.gpus_per_node),
        }
        lacking += [
            f"{component.name}: {given} {what}, the config needs {need}"
            for what, (need, given) in wanted.items()
            if given < need
        ]
        if len(share.nodes) > component.nodes:
            lacking.append(f"{component.name}: {len(share.nodes)} nodes, the config has use for {component.nodes}")
    if lacking:
        lines = "\n".join(f"  {each}" for each in lacking)
        raise UserError(f"job {allocation.job} does not fit the config:\n{lines}\n{remedy}")
