"""Study `online`: the rewarded style switches twice in one run; who follows faster? (arXiv 2607.07508)

Rollouts are those of a simulated asynchronous fleet of 128 slots with long-tailed durations. A problem wants the style
of its number, so a rollout that was begun before the switch is scored by the old target, as it would be.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from megasao.studies.figures import draw_curves, figure
from megasao.studies.fleet import SimulatedFleet
from megasao.studies.study import CHAIN_MODEL, GLOBAL_MEAN, Arm, Numbers, Run, Study, curve

RECOVERED = 0.9
LOST = 0.5
"""Below this part of the level before the first switch, there is nothing to recover at the second."""
WINDOW = 5
"""Steps whose mean counts as the level of the reward."""

ARMS = (
    Arm("sao", ("sao",)),
    Arm("grpo_dis", ("grpo_dis",)),
    Arm("sao_running_mean", ("sao_running_mean", *GLOBAL_MEAN)),
)
NAMES = tuple(arm.name for arm in ARMS)


def numbers(run: Run) -> Numbers:
    """The columns of the table, each switch counted from the first batch that holds a rollout of the new target."""
    found: Numbers = {"reward before": None, "final reward": _level(run, int(run.records[-1]["step"] or 0))}
    switches = switch_steps(run)
    for number, start in enumerate(switches, 1):
        end = switches[number] if number < len(switches) else len(run.records)
        before = _level(run, start - 1)
        if number == 1:
            found["reward before"] = before
        lost = before < LOST * (found["reward before"] or 0.0)
        steps = () if lost else range(start + WINDOW, end)
        recovered = next((s for s in steps if _level(run, s) >= RECOVERED * before), None)
        since = (
            {}
            if recovered is None
            else {
                "steps": float(recovered - start),
                "rollouts": _value(run, recovered, "fleet/begun") - _value(run, start, "fleet/begun"),
                "time": _value(run, recovered, "fleet/time") - _value(run, start, "fleet/time"),
            }
        )
        found |= {f"{unit} to recover {number}": since.get(unit) for unit in ("steps", "rollouts", "time")}
    return {**found, "dropped": _value(run, len(run.records) - 1, "fleet/dropped")}


def switch_steps(run: Run) -> list[int]:
    """The first step of each new target: the first whose batch has one of its problems."""
    options = run.config.environment.options
    newest = [value for _, value in curve(run, "fleet/newest")]
    switches = [options["first_switch"], options["second_switch"]]
    return [next(step for step, index in enumerate(newest) if index >= switch) for switch in switches]


def _level(run: Run, step: int) -> float:
    """Mean reward of the newest ``WINDOW`` steps up to ``step``."""
    return fmean(_value(run, one, "reward/mean") for one in range(max(0, step - WINDOW + 1), step + 1))


def _value(run: Run, step: int, name: str) -> float:
    value = run.records[step][name]
    assert value is not None, name
    return value


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward, the share of the wanted style, and lag."""
    with figure(path, 1, 3) as axes:
        draw_curves(axes[0], runs, "reward/mean", "reward", arms=NAMES, smooth=WINDOW, legend=True)
        draw_curves(axes[1], runs, "episode/style", "share in the wanted style", arms=NAMES, smooth=WINDOW)
        draw_curves(axes[2], runs, "data/lag_mean", "lag, versions", arms=NAMES, smooth=WINDOW)


ONLINE = Study(
    name="online",
    arms=ARMS,
    model=CHAIN_MODEL,
    numbers=numbers,
    draw=draw,
    quick=(
        "sft.steps=24",
        "sft.optimizer.warmup_steps=4",
        "loop.steps=30",
        "loop.batch_size=32",
        "rollout.concurrency=32",
        "environment.options.first_switch=320",
        "environment.options.second_switch=640",
    ),
    make_rollouts=partial(SimulatedFleet, sigma=1.0, training=0.5),
)
