"""How a run does, from its directory alone: on any node that sees it, whether or not anything of it is running.

Invariants (tests assert them):
- nothing is asked of any process, and nothing is written;
- a number that is not known is shown as missing, never as 0.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megasao.config import Config
from megasao.config.rundir import RunDirectory, all_engine_names
from megasao.observability.formats import MISSING, count, duration, number, share
from megasao.observability.history import latest_directory, read_history, step_of
from megasao.observability.jsonl import Row
from megasao.observability.record import RunRecord, column, exclusions, load_record, mean

RECENT = 10
"""Steps that means are taken over."""
ERRORS = 5
_ALIVE_S = 30.0
"""A role writes a sign of life every second or few; one that is older is shown with its age."""
_ENDED = "none, the run has ended"


def describe_status(run: RunDirectory, config: Config, *, now: float | None = None) -> str:
    """Several lines. ``now`` is a time in seconds since the epoch."""
    return "\n".join(_lines(run, config, time.time() if now is None else now))


def _lines(run: RunDirectory, config: Config, now: float) -> Iterator[str]:
    record = load_record(run)
    recent = record.trainer[-RECENT:]
    last = recent[-1] if recent else {}
    done, version = last.get("step", -1) + 1, last.get("weight_version", MISSING)
    yield f"run         {run.path}"
    yield f"job         {_job(run, now)}"
    yield f"steps       {done} of {config.loop.steps}, weight version {version}{_ago(last, now)}"
    yield f"throughput  {_throughput(recent)}"
    yield f"staleness   {_staleness(recent, config)}"
    yield f"rollouts    {_rollouts(record.controller[-1] if record.controller else {}, config, now)}"
    ages = _silent_for(run, now)
    ended = done >= config.loop.steps and run.final_policy.is_dir() and all(age >= _ALIVE_S for age in ages.values())
    yield f"engines     {_ENDED if ended else _engines(run, config, now)}"
    yield f"checkpoint  {_checkpoint(run, now)}"
    yield f"processes   {_ENDED if ended else _processes(ages)}"
    yield f"excluded    {_excluded(record)}"
    errors = _errors(run)
    yield f"errors      {errors[0] if errors else 'none'}"
    yield from (f"            {line}" for line in errors[1:])


def _job(run: RunDirectory, now: float) -> str:
    history = read_history(run)
    if not history:
        return "not a Slurm job"
    last = history[-1]
    starts = sum(event.event == "started" for event in history)
    what = f"{last.job}: {last.event} {duration(now - last.time)} ago, start {starts} of the run"
    return f"{what}, on {len(set(last.nodes))} nodes" if last.event == "started" else what


def _ago(row: Row, now: float) -> str:
    return f", {duration(now - row['time'])} ago" if "time" in row else ""


def _throughput(recent: list[Row]) -> str:
    trainer, rollout = (mean(column(recent, f"throughput/{side}_tokens_per_s")) for side in ("trainer", "rollout"))
    step = mean(column(recent, "time/step"))
    pace = f"{step:.2f} s" if step is not None and step < 10 else duration(step)
    wait = mean(column(recent, "idle/trainer"))
    return (
        f"trainer {count(trainer)} tokens/s, rollout {count(rollout)} tokens/s, {pace} a step, of which the "
        f"trainer waits {share(wait, 0)}"
    )


def _staleness(recent: list[Row], config: Config) -> str:
    lag, most = mean(column(recent, "data/lag_mean")), max(column(recent, "data/lag_max"), default=None)
    return f"mean {number(lag, 2)}, most {count(most)}, bound {config.loop.max_lag} versions"


def _rollouts(row: Row, config: Config, now: float) -> str:
    if not row:
        return f"none of {config.rollout.workers} workers was heard of yet"
    return (
        f"{count(row.get('workers'))} of {config.rollout.workers} workers, {count(row.get('leases'))} episodes under "
        f"way, {count(row.get('buffer'))} trajectories waiting{_ago(row, now)}"
    )


def _engines(run: RunDirectory, config: Config, now: float) -> str:
    """Those of SGLang are processes of their own; the embedded ones are part of the rollout workers."""
    names, kind = all_engine_names(config), "SGLang servers"
    if not names:
        names, kind = [f"rollout-{index}" for index in range(config.rollout.workers)], "embedded in rollout workers"
    restarts = Counter(re.findall(r"restarting (\S+) \(\d+ of \d+\)", _launcher_log(run)))
    again = [f"{name} started again {restarts[name]}x" for name in names if restarts[name]]
    beats = [run.heartbeat(name) for name in names]
    alive = sum(beat.exists() and now - beat.stat().st_mtime < _ALIVE_S for beat in beats)
    return "; ".join([f"{alive} of {len(names)} {kind} show signs of life", *again])


def _checkpoint(run: RunDirectory, now: float) -> str:
    directory = latest_directory(run)
    if directory is None:
        return "none yet"
    if (directory / "COMPLETE").exists():
        return f"step {step_of(directory)}, {duration(now - (run.checkpoints / 'latest').stat().st_mtime)} ago"
    what = "is not complete" if directory.is_dir() else "is not there"
    complete = [step_of(file.parent) for file in run.checkpoints.glob("step_*/COMPLETE")]
    newest = max((step for step in complete if step is not None), default=None)
    instead = "no other is complete" if newest is None else f"the newest that is complete is step {newest}"
    return f"none to go on from: checkpoints/latest names {directory.name}, which {what}; {instead}"


def _silent_for(run: RunDirectory, now: float) -> dict[str, float]:
    """Seconds since the last sign of life of each process, but for those of a stage that is over."""
    over = [stage for stage, result in (("sft", run.sft), ("value", run.value)) if (result / "COMPLETE").exists()]
    files = sorted((run.path / "heartbeats").glob("*"), key=lambda file: _key(file))
    return {file.name: now - file.stat().st_mtime for file in files if _key(file)[0] not in over}


def _processes(ages: dict[str, float]) -> str:
    alive = sum(age < _ALIVE_S for age in ages.values())
    silent = [f"{name} silent for {duration(age)}" for name, age in ages.items() if age >= _ALIVE_S]
    return "; ".join([f"{alive} of {len(ages)} show signs of life", *silent])


def _key(file: Path) -> tuple[str, int]:
    """Rank 10 comes after rank 9."""
    name, _, index = file.name.rpartition("-")
    return (name, int(index)) if index.isdigit() else (file.name, 0)


def _excluded(record: RunRecord) -> str:
    found = sorted(exclusions(record).items())
    return ", ".join(f"{name} {count(value)}" for name, value in found) or "nothing"


def _errors(run: RunDirectory) -> list[str]:
    """What the launcher had to say, and failed jobs, the newest last."""
    said = _launcher_log(run).splitlines()
    failed = [f"job {event.job} failed: {event.detail}" for event in read_history(run) if event.event == "failed"]
    return [*said[-ERRORS:], *failed[-ERRORS:]]


def _launcher_log(run: RunDirectory) -> str:
    log = run.logs / "launcher.log"
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
