"""What a simulated run comes to. Start-up is left out: numbers are those from the end of step ``discard`` on."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megasao.config import Config
from megasao.simulation.fleet import History
from megasao.simulation.scale import Mode


@dataclass(frozen=True)
class Outcome:
    """One simulated run.

    Attributes:
        mode, gpus, trainer_gpus, engines, batch_size: what was simulated.
        step_seconds: mean time of a training step.
        trainer_utilisation: share of the time in which the trainer does not wait.
        engine_utilisation: share of the time in which an engine computes, mean over engines.
        running: requests that decode on an engine, mean over time and engines.
        tokens_per_s, trajectories_per_s: trained on, all tokens of a trajectory.
        staleness_mean, staleness_max: weight versions at consumption.
        dropped: share of the trajectories that were finished and not trained on.
        longest_episode_s, longest_wait_s: over the whole run; for the config's time-outs.
        seconds: of the whole run, start-up included.
    """

    mode: Mode
    gpus: int
    trainer_gpus: int
    engines: int
    batch_size: int
    step_seconds: float
    trainer_utilisation: float
    engine_utilisation: float
    running: float
    tokens_per_s: float
    trajectories_per_s: float
    staleness_mean: float
    staleness_max: int
    dropped: float
    longest_episode_s: float
    longest_wait_s: float
    seconds: float


def outcome(history: History, config: Config, *, mode: Mode, gpus: int, trainer_gpus: int, discard: int) -> Outcome:
    """Of a run of ``config`` whose first ``discard`` steps do not count."""
    steps = history.steps[discard:]
    began, busy, running, lost = 0.0, 0.0, 0.0, 0
    if discard:
        last = history.steps[discard - 1]
        began, busy, running, lost = last.ended, last.busy, last.running, sum(last.dropped.values())
    end, engines = history.steps[-1], config.rollout.workers
    seconds = end.ended - began
    trained = sum(step.trajectories for step in steps)
    dropped = sum(end.dropped.values()) - lost
    lags = [lag for step in steps for lag in step.lags]
    return Outcome(
        mode=mode,
        gpus=gpus,
        trainer_gpus=trainer_gpus,
        engines=engines,
        batch_size=config.loop.batch_size,
        step_seconds=seconds / len(steps),
        trainer_utilisation=sum(step.ended - step.began for step in steps) / seconds,
        engine_utilisation=(end.busy - busy) / (seconds * engines),
        running=(end.running - running) / (seconds * engines),
        tokens_per_s=sum(step.tokens for step in steps) / seconds,
        trajectories_per_s=trained / seconds,
        staleness_mean=fmean(lags),
        staleness_max=max(lags),
        dropped=dropped / (trained + dropped),
        longest_episode_s=history.longest_episode,
        longest_wait_s=history.longest_wait,
        seconds=history.seconds,
    )


def warnings(outcomes: Sequence[Outcome], config: Config, replica: int) -> list[str]:
    """What a run of this config would not have got through, and what the numbers cannot mean."""
    found = []
    small = sorted({each.gpus for each in outcomes if each.trainer_gpus < replica})
    if small:
        found.append(
            f"{', '.join(map(str, small))} GPUs: the layout needs {replica} trainer ranks for one replica, so these "
            "rows are of time alone and not of memory"
        )
    limits = {
        "environment.episode_timeout_s": (config.environment.episode_timeout_s, "episode", "longest_episode_s"),
        "buffer.lease_timeout_s": (config.buffer.lease_timeout_s, "episode", "longest_episode_s"),
        "loop.batch_timeout_s": (config.loop.batch_timeout_s, "wait for a batch", "longest_wait_s"),
    }
    for name, (limit, what, field) in limits.items():
        longest = max(getattr(each, field) for each in outcomes)
        if longest > limit:
            found.append(f"the longest {what} took {longest:.0f} s, beyond {name} = {limit:g}, which ends it")
    return found
