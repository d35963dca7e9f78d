"""What a step's line in ``metrics/trainer.jsonl`` says beyond the losses: its data, staleness and speed."""

import statistics
from collections.abc import Mapping, Sequence

from megasao.transport.messages import ManifestEntry


def batch_metrics(
    entries: Sequence[ManifestEntry], rollout: Mapping[str, float], version: int
) -> dict[str, float | None]:
    """Of the trajectories that were trained on, and ``rollout/`` from the controller."""
    return {**trajectory_metrics(entries, version), **{f"rollout/{name}": value for name, value in rollout.items()}}


def trajectory_metrics(entries: Sequence[ManifestEntry], version: int) -> dict[str, float | None]:
    """Means over the step's trajectories; lags in weight versions at consumption.

    Where the rollout side records no versions the lags count from the leases, and how many trajectories mix versions is
    not known.
    """
    rewards = [e.reward for e in entries]
    lags = [max(0, version - e.oldest_version) for e in entries]
    mixed = [e.newest_version > e.oldest_version for e in entries if e.newest_version is not None]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        **reward_by_task(entries),
        "data/trajectories": float(len(entries)),
        "data/lag_mean": statistics.fmean(lags),
        "data/lag_max": float(max(lags)),
        **({"data/mixed_versions": statistics.fmean(mixed)} if mixed else {}),
        "data/response_tokens": statistics.fmean(e.action_tokens for e in entries),
        "data/total_tokens": statistics.fmean(e.tokens for e in entries),
        "data/truncated": statistics.fmean(e.truncated for e in entries),
    }


def reward_by_task(entries: Sequence[ManifestEntry]) -> dict[str, float]:
    """Mean reward of each task, where the step has several."""
    found: dict[str, list[float]] = {}
    for entry in entries:
        found.setdefault(entry.task, []).append(entry.reward)
    return {f"reward/mean/{task}": statistics.fmean(found[task]) for task in sorted(found)} if len(found) > 1 else {}


def throughput_metrics(metrics: dict[str, float | None], tokens: int, seconds: float) -> dict[str, float | None]:
    """Speed of the trainer. ``tokens``: all tokens of the step; ``seconds``: its wall time, waiting included."""
    wait = metrics.get("time/wait") or 0.0
    return {
        "time/step": seconds,
        "throughput/trainer_tokens_per_s": tokens / max(seconds - wait, 1e-9),
        "throughput/rollout_tokens_per_s": metrics.get("rollout/tokens_per_s"),
        "idle/trainer": wait / max(seconds, 1e-9),
        "idle/rollout": metrics.get("rollout/idle"),
    }
