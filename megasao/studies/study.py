"""What a study is: one config, arms that change it, what is read off a run, and how it is drawn.

Invariant: an arm is config changes alone, such as a user would give to `megasao train`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.load import load_config
from megasao.studies.laboratory import MakeRollouts, Record
from megasao.studies.staleness import BoundedStaleness

CONFIGS = Path("configs")
"""Where a project keeps its configs; studies run in the project's directory."""


LAST = 0.75
"""What is called the end of a run begins at this fraction of its steps: single evaluations are noisy."""

GLOBAL_MEAN = ("algorithm.advantages.scope=global", "algorithm.advantages.window=128")
"""The running mean of all prompts, as in the online simulation of arXiv 2607.07508: prompts never come twice here."""

CHAIN_MODEL = {"hidden": 128, "layers": 2, "experts": 0, "moe_hidden": 0}
"""Wide enough that every seed learns the chains from its demonstrations."""

SHORT_CHAIN = (
    "environment.options.operations=1",
    "sft.steps=60",
    "sft.optimizer.warmup_steps=4",
    "loop.batch_size=32",
    "evaluation.problems=16",
)
"""Changes that make a run on chains a matter of seconds."""


@dataclass(frozen=True)
class Arm:
    """One line of the table. ``changes``: presets by name (``grpo``) and ``key.path=value``, in order."""

    name: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    records: list[Record]
    config: Config


Numbers = dict[str, float | None]
"""What is read off one run, by column."""


@dataclass(frozen=True)
class Study:
    """A grid of arms and seeds. ``quick`` are the changes that make every run a matter of seconds."""

    name: str
    arms: tuple[Arm, ...]
    model: dict[str, int]
    numbers: Callable[[Run], Numbers]
    draw: Callable[[Sequence[Run], Path], None]
    quick: tuple[str, ...]
    make_rollouts: MakeRollouts = BoundedStaleness

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def config(self, changes: Sequence[str], *, seed: int, work: Path, quick: bool) -> Config:
        """The validated config of a run. ``work``: where the study keeps its models."""
        file = CONFIGS / "studies" / f"{self.name}.yaml"
        if not file.is_file():
            raise UserError(f"{file}: no such file; run `megasao study` in the project's directory, beside configs/")
        shortened = self.quick if quick else ()
        model = policy_directory(work, seed) / "model"
        return load_config(file, [*shortened, *map(_overlay, changes), f"run.seed={seed}", f"model.path={model}"])


def policy_directory(work: Path, seed: int) -> Path:
    """Where the model of a seed lies, and its fine-tuned policy in ``sft``: one for all arms."""
    return work / f"seed-{seed}"


def _overlay(change: str) -> str:
    return change if "=" in change else str(CONFIGS / "algorithms" / f"{change}.yaml")


def curve(run: Run, name: str) -> list[tuple[float, float]]:
    """(step, value) wherever the run recorded ``name``."""
    points = [(record["step"], record.get(name)) for record in run.records]
    return [(step, value) for step, value in points if step is not None and value is not None]


def mean_after(run: Run, name: str, fraction: float) -> float | None:
    """Mean of ``name`` over what was recorded after this fraction of the run's steps."""
    start = fraction * len(run.records)
    values = [value for step, value in curve(run, name) if step >= start]
    return sum(values) / len(values) if values else None


def share_masked(run: Run) -> float | None:
    """Mean share of the action tokens outside the band of DIS, or clipped; None where the objective masks nothing."""
    names = ("actor/masked_low", "actor/masked_high", "actor/clipped_low", "actor/clipped_high")
    found = [value for value in (mean_after(run, name, 0) for name in names) if value is not None]
    return sum(found) if found else None


def first_step(run: Run, name: str, level: float) -> float | None:
    """The first step at which ``name`` was recorded at ``level`` or above; None if never."""
    return next((step for step, value in curve(run, name) if value >= level), None)
