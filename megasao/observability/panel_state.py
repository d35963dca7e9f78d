"""What the panel knows, fed by rows as they appear; no drawing here.

Invariants:
- feeding a row of step s forgets the rows of steps >= s that were fed before (a resume from an older step);
- the remaining time is the median of the last steps' wall time times the steps left; None until two steps are known.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from megasao.config import Config
from megasao.observability.formats import finite
from megasao.observability.jsonl import Row

RECENT = 20
"""Steps that the pace is measured over."""
GAUGES = 200
"""Rows of the controller that are kept, one a second."""
_FAILED = ("failures", "refused", "given_up")
"""Counters of what should not happen; trajectories that grew too old are no failure."""


@dataclass
class PanelState:
    """Rows by role, and what follows from them."""

    config: Config
    trainer: list[Row] = field(default_factory=list)
    sft: list[Row] = field(default_factory=list)
    value: list[Row] = field(default_factory=list)
    """Of value pretraining."""
    controller: deque[Row] = field(default_factory=lambda: deque(maxlen=GAUGES))
    evaluations: dict[str, Row] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    closed: bool = False

    def feed_trainer(self, row: Row) -> bool:
        """Take a row of trainer.jsonl; False if it has no step."""
        return _append_step(self.trainer, row)

    def feed_sft(self, row: Row) -> bool:
        """Take a row of sft.jsonl; False if it has no step."""
        return _append_step(self.sft, row)

    def feed_value(self, row: Row) -> bool:
        """Take a row of value.jsonl; False if it has no step."""
        return _append_step(self.value, row)

    def feed_evaluation(self, row: Row) -> None:
        """Take a row of evaluations.jsonl; a repeated id replaces the earlier result."""
        self.evaluations[str(row.get("evaluation_id", len(self.evaluations)))] = row

    @property
    def last(self) -> Row:
        """The newest training step's metrics."""
        return self.trainer[-1] if self.trainer else {}

    @property
    def fine_tuning(self) -> bool:
        """Fine-tuning is what is going on."""
        return bool(self.sft) and not self.value and not self.trainer and not self.controller

    @property
    def pretraining_value(self) -> bool:
        """Value pretraining is what is going on."""
        return bool(self.value) and not self.trainer and not self.controller

    @property
    def rows(self) -> list[Row]:
        """Of the current stage."""
        return self.sft if self.fine_tuning else self.value if self.pretraining_value else self.trainer

    @property
    def stage(self) -> str:
        """What the run is doing, in words."""
        if self.closed:
            return "ended"
        if self.fine_tuning:
            return "fine-tuning" if self.finished < self.total else "starting SAO"
        if self.pretraining_value:
            return "value pretraining" if self.finished < self.total else "starting SAO"
        if not self.trainer:
            return "starting SAO" if self.controller else "starting"
        if self.finished >= self.total:
            return "last evaluation"
        return "SAO, critic warm-up" if self.finished < self.config.warmup_steps else "SAO"

    @property
    def total(self) -> int:
        """Steps of the current stage."""
        if self.fine_tuning and self.config.sft is not None:
            return self.config.sft.steps
        if self.pretraining_value and self.config.value_pretraining is not None:
            return self.config.value_pretraining.steps
        return self.config.loop.steps

    @property
    def finished(self) -> int:
        """Finished steps of the current stage (rows count from step 0)."""
        return int(self.rows[-1]["step"]) + 1 if self.rows else 0

    @property
    def step_seconds(self) -> float | None:
        """Median wall time between recent rows, per step, seconds."""
        pairs = itertools.pairwise(self.rows[-RECENT - 1 :])
        paces = [
            (new["time"] - old["time"]) / (new["step"] - old["step"])
            for old, new in pairs
            if "time" in old and "time" in new
        ]
        return median(paces) if paces else None

    @property
    def remaining_seconds(self) -> float | None:
        """Time to the end of this stage at the recent pace."""
        pace = self.step_seconds
        return None if pace is None else pace * max(0, self.total - self.finished)

    @property
    def elapsed_seconds(self) -> float | None:
        """Wall time between the first and the newest row."""
        ends = [row for rows in (self.sft, self.value, self.trainer) for row in (*rows[:1], *rows[-1:])]
        times = [row["time"] for row in ends if "time" in row]
        return max(times) - min(times) if times else None

    def evaluated(self, mode: str) -> list[Row]:
        """Evaluations of one mode by step."""
        rows = [row for row in self.evaluations.values() if row.get("mode") == mode and row.get("success") is not None]
        return sorted(rows, key=lambda row: int(row["step"]))

    @property
    def failures(self) -> dict[str, float]:
        """Failed attempts and what was refused or given up since the controller's start, by counter, but for zeros."""
        last = self.controller[-1] if self.controller else {}
        counts = {name: finite(value) or 0.0 for name, value in last.items() if name.split("/")[0] in _FAILED}
        return {name: value for name, value in counts.items() if value}

    def series(self, name: str) -> list[float]:
        """One training metric over the steps, without nulls."""
        return [row[name] for row in self.trainer if isinstance(row.get(name), int | float)]

    def recent(self, name: str) -> float | None:
        """Mean of one training metric over the last ten steps that have it."""
        values = self.series(name)[-10:]
        return sum(values) / len(values) if values else None


def _append_step(rows: list[Row], row: Row) -> bool:
    if not isinstance(row.get("step"), int):
        return False
    while rows and rows[-1]["step"] >= row["step"]:
        rows.pop()
    rows.append(row)
    return True
