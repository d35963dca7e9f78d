"""The world of a task that srun started, under the names that torch.distributed reads."""

from collections.abc import Mapping

_FROM_SRUN = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
}


def world_of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE of this task; nothing where they are there, or srun did not start it."""
    if "RANK" in environment or not all(name in environment for name in _FROM_SRUN.values()):
        return {}
    return {ours: environment[theirs] for ours, theirs in _FROM_SRUN.items()}
