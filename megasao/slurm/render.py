"""The plan of a job as text, and as arguments of sbatch."""

import shlex
from collections.abc import Iterator

from megasao.config import Config
from megasao.slurm.plan import LEAVE_SIGNAL, Component, JobPlan
from megasao.slurm.site import Site

SCRIPT = "slurm/job.sh"


def component_arguments(plan: JobPlan, component: Component) -> list[str]:
    """What sbatch is asked for one component, whatever the cluster."""
    arguments = [
        f"--job-name={plan.run_name}",
        f"--nodes={component.nodes}",
        f"--ntasks-per-node={component.tasks_per_node}",
        f"--cpus-per-task={component.cpus_per_task}",
        f"--mem={component.memory}",
        f"--time={plan.time_limit_minutes}",
    ]
    return [*arguments, f"--gres=gpu:{component.gpus_per_node}"] if component.gpus_per_node else arguments


def job_arguments(plan: JobPlan) -> list[str]:
    """What sbatch is asked for the job as a whole: with its first component."""
    return [
        f"--signal=B:{LEAVE_SIGNAL}@{plan.leave_before_limit_s}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
    ]


def site_arguments(site: Site, component: Component) -> list[str]:
    """Partition, account and what else the cluster asks for."""
    partition = site.controller_partition if component.name == "controller" else site.partition
    named = {"partition": partition, "account": site.account}
    return [*(f"--{name}={value}" for name, value in named.items() if value), *site.sbatch_args]


def sbatch_arguments(plan: JobPlan, site: Site | None) -> list[str]:
    """All arguments, the components apart by ``:``."""
    words: list[str] = []
    for index, component in enumerate(plan.components):
        words += [":"] if index else job_arguments(plan)
        words += component_arguments(plan, component)
        words += site_arguments(site, component) if site is not None else []
    return words


def header(plan: JobPlan) -> str:
    """The ``#SBATCH`` lines of a script that is submitted without arguments."""
    lines = [f"#SBATCH {argument}" for argument in job_arguments(plan)]
    for index, component in enumerate(plan.components):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {' '.join(component_arguments(plan, component))}"]
    return "\n".join(lines)


def describe_job(plan: JobPlan, config: Config, site: Site | None, commands: list[str], notes: list[str]) -> str:
    """Everything that would be asked for and started; ``commands`` are the steps, in order."""
    return "\n".join(_describe(plan, config, site, commands, notes))


def _describe(plan: JobPlan, config: Config, site: Site | None, commands: list[str], notes: list[str]) -> Iterator[str]:
    yield f"run {config.run.name} in {config.run.directory}/{config.run.name}"
    yield from (f"cannot be trained as it is: {note}" for note in notes)
    yield ""
    yield "component   nodes  tasks/node  CPUs/task  GPUs/node  GPUs"
    for each in plan.components:
        numbers = (each.tasks_per_node, each.cpus_per_task, each.gpus_per_node, each.nodes * each.gpus_per_node)
        cells = "  ".join(str(value).rjust(width) for value, width in zip(numbers, (10, 9, 9, 4), strict=True))
        yield f"{each.name:<10}  {each.nodes:>5}  {cells}"
    nodes = sum(each.nodes for each in plan.components)
    gpus = sum(each.nodes * each.gpus_per_node for each in plan.components)
    limit = f"at most {plan.time_limit_minutes} min, {LEAVE_SIGNAL} {plan.leave_before_limit_s} s before"
    yield f"together {nodes} nodes and {gpus} GPUs for {limit}"
    yield ""
    yield "sbatch \\"
    for argument in sbatch_arguments(plan, site):
        yield f"    {shlex.quote(argument)} \\"
    yield f"    {SCRIPT} CONFIG"
    yield ""
    yield "steps:"
    yield from commands
