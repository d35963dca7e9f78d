"""Running a study's grid in several processes, resumably.

Invariants:
- a run that is finished is a file, and is not run again unless its config or the study's model has changed;
- a run that fails does not stop the others; at the end the failures are named, and the command fails;
- an interrupted study ends at once, with its processes, and goes on where it was.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasao.config import Config
from megasao.config.load import dump_config
from megasao.config.rundir import write_atomically
from megasao.studies.laboratory import prepare_policy, run_steps
from megasao.studies.pool import processes, run_all
from megasao.studies.registry import study_named
from megasao.studies.study import Run, policy_directory


@dataclass(frozen=True)
class Grid:
    """What is to be run: plain data, so that it can be sent to a process."""

    study: str
    seeds: int
    quick: bool
    work: Path

    def runs(self) -> Iterator[tuple[str, int]]:
        """(arm, seed), seed by seed."""
        for seed in range(self.seeds):
            for arm in study_named(self.study).arms:
                yield arm.name, seed

    def config(self, arm: str, seed: int) -> Config:
        """The config of a run."""
        study = study_named(self.study)
        return study.config(study.arm(arm).changes, seed=seed, work=self.work, quick=self.quick)

    def policy_config(self, seed: int) -> Config:
        """The config under which the policy of a seed is made: the study's own, without any arm."""
        return study_named(self.study).config((), seed=seed, work=self.work, quick=self.quick)

    def made_with(self, config: Config) -> dict[str, Any]:
        """What a finished run or policy is recognised by: all that it was made with."""
        return {"config": dump_config(config), "model": study_named(self.study).model}


def run_grid(grid: Grid, *, jobs: int, say: Callable[[str], None]) -> list[Run]:
    """All runs of the grid, in its order; those that are missing are run in ``jobs`` processes.

    Every config is checked before anything runs. RunsFailed names what failed, with its reason. KeyboardInterrupt
    leaves none of the processes.
    """
    configs = {(arm, seed): grid.config(arm, seed) for arm, seed in grid.runs()}
    grid.work.mkdir(parents=True, exist_ok=True)
    with processes(jobs) as pool:
        run_all(pool, [(_make_policy, (grid, seed), f"policy of seed {seed}") for seed in range(grid.seeds)], say)
        missing = [key for key, config in configs.items() if _read(grid, *key, config) is None]
        say(f"{grid.study}: {len(configs) - len(missing)} of {len(configs)} runs are there, {len(missing)} to go")
        run_all(pool, [(_run_one, (grid, arm, seed), f"{arm}, seed {seed}") for arm, seed in missing], say)
    found = {key: _read(grid, *key, config) for key, config in configs.items()}
    return [Run(*key, records, configs[key]) for key, records in found.items() if records is not None]


def _make_policy(grid: Grid, seed: int) -> None:
    config, directory = grid.policy_config(seed), policy_directory(grid.work, seed)
    made = directory / "policy.json"
    wanted = json.dumps(grid.made_with(config))
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return
    prepare_policy(config, study_named(grid.study).model, directory)
    write_atomically(made, wanted)


def _run_one(grid: Grid, arm: str, seed: int) -> None:
    config = grid.config(arm, seed)
    policy = policy_directory(grid.work, seed) / "sft"
    records = list(run_steps(config, policy, study_named(grid.study).make_rollouts))
    write_atomically(_file(grid, arm, seed), json.dumps(grid.made_with(config) | {"records": records}))


def _file(grid: Grid, arm: str, seed: int) -> Path:
    return grid.work / f"{arm}-{seed}.json"


def _read(grid: Grid, arm: str, seed: int, config: Config) -> list[dict[str, float | None]] | None:
    """The records of a finished run; None if there is none, or if it was made with something else."""
    file = _file(grid, arm, seed)
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    records: list[dict[str, float | None]] = found.pop("records")
    return records if found == grid.made_with(config) else None
