"""`megasao slurm`: what would be asked for and started, without Slurm."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megasao.config import Config
from megasao.config.architecture import planned_file, read_architecture
from megasao.config.errors import ConfigError
from megasao.config.model_check import layout_problems, of_critic, untrainable
from megasao.config.rundir import RunDirectory
from megasao.slurm.plan import ROLLOUT, plan_job
from megasao.slurm.render import describe_job, header, sbatch_arguments
from megasao.slurm.site import KNOWN, Site, read_site
from megasao.slurm.steps import INHERITED, Steps

EXAMPLE = Site(
    python="$MEGASAO_PYTHON",
    step_python="$MEGASAO_STEP_PYTHON",
    partition=None,
    controller_partition=None,
    account=None,
    interface="$MEGASAO_INTERFACE",
    ipv6=False,
    sbatch_args=(),
    srun_args=(),
    step_command=(),
    export=(),
)
"""Where no site.env was read."""


def describe(
    config: Config, shown: Literal["plan", "arguments", "header"], environment: Mapping[str, str] = os.environ
) -> str:
    """The text of `megasao slurm`. UserError without a section slurm, ConfigError for a layout that cannot be."""
    plan = plan_job(config)
    if shown == "header":
        return header(plan)
    # One of them is meant to count, and what is missing beside it is named.
    known = any(name in environment for name in KNOWN if name not in ("MEGASAO_HOME", "MEGASAO_SITE"))
    site = read_site(environment) if known else EXAMPLE
    if shown == "arguments":
        return "\n".join(sbatch_arguments(plan, site))
    run = RunDirectory(Path(config.run.directory) / config.run.name)
    nodes = [f"ROLLOUT_NODE_{index}" for index in range(plan.components[ROLLOUT].nodes)]
    steps = Steps(run, config, plan, site, nodes, environment if known else dict.fromkeys(INHERITED, ""))
    return describe_job(plan, config, site, steps.describe(), _notes(config))


def _notes(config: Config) -> list[str]:
    """Why a job with this config would be refused, as far as config.json says."""
    field = "model.path"
    try:
        field, file = planned_file(Path(config.model.path), config.model.architecture)
        if file is None:
            return [f"model.path: {config.model.path} is not there (yet), so the layout was not checked"]
        shape = read_architecture(file)
    except ValueError as error:
        return [f"{field}: {error}"]
    if problems := [*layout_problems(config, shape), *of_critic(layout_problems, config, shape)]:
        raise ConfigError(str(file), problems)
    return [
        f"{problem.path}: {problem.reason}"
        for problem in [*untrainable(config, shape), *of_critic(untrainable, config, shape)]
    ]
