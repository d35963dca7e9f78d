"""How far the trainer's log-probabilities are from those that the engine recorded, and when that is worth an alarm.

Two sets of action tokens: all of a step, of which older policies sampled some; and the ``current`` ones, sampled by the
very weights that the step starts from, so that trainer and engine alone differ.

Invariants, asserted by the tests:
- the numbers do not depend on how a step is packed or spread over ranks;
- what is masked counts for nothing, whatever it holds; log-probs that are no number are left out, as ``invalid`` says.
"""

import torch

from megasao.config.rollout import MismatchConfig
from megasao.ops.dis import summarize as summarize_ratios
from megasao.ops.reference import Stats, ratio_stats
from megasao.training.batch import TrainRow

_CURRENT = "current/"


def row_stats(logprobs: torch.Tensor, row: TrainRow, version: int) -> Stats:
    """Sums and maxima of one row; ``logprobs`` float32 [T] are those of the weights of ``version``."""
    log_ratio = torch.where(row.action_mask, logprobs.detach() - row.rollout_logprobs, 0.0)
    current = row.action_mask & sampled_by(row, version)
    sums = ratio_stats(torch.where(current, log_ratio, 0.0), current)
    return {
        "log_ratio_abs_max": _largest(log_ratio),
        f"{_CURRENT}log_ratio_abs_max": _largest(torch.where(current, log_ratio, 0.0)),
        **{_CURRENT + name: value for name, value in sums.items()},
    }


def _largest(log_ratio: torch.Tensor) -> torch.Tensor:
    """The largest size of a number, 0 if there is none."""
    return torch.where(torch.isnan(log_ratio), 0.0, log_ratio.abs()).double().max()


def sampled_by(row: TrainRow, version: int) -> torch.Tensor:
    """bool [T]: tokens of a weight version; none where versions were not recorded."""
    chosen = torch.zeros(len(row.action_mask), dtype=torch.bool)
    start = 0
    for trajectory in row.trajectories:
        spans = trajectory.weight_versions or []
        ends = [begin for begin, _ in spans[1:]] + [len(trajectory.tokens)]
        for (begin, sampled), end in zip(spans, ends, strict=False):
            chosen[start + begin : start + end] = sampled == version
        start += len(trajectory.tokens)
    return chosen.to(row.action_mask.device)


def summarize(totals: Stats) -> dict[str, float | None]:
    """Metrics of a whole step from its combined statistics; None where there is no token to speak of."""
    sums = {name.removeprefix(_CURRENT): value for name, value in totals.items() if name.startswith(_CURRENT)}
    current = summarize_ratios(sums)
    names = ("tokens", "invalid", "log_ratio_abs_mean", "kl_k3", "ess")
    return {
        "log_ratio_abs_max": float(totals["log_ratio_abs_max"]),
        **{f"current_{name}": current[name] for name in names},
        "current_log_ratio_abs_max": float(sums["log_ratio_abs_max"]) if current["tokens"] else None,
    }


def alarms(metrics: dict[str, float | None], limits: MismatchConfig) -> list[str]:
    """What of a step's ``actor/`` metrics is beyond its limit, in words."""
    checks = (
        ("current_log_ratio_abs_mean", limits.current_abs_mean, "above", "observability.mismatch.current_abs_mean"),
        ("current_log_ratio_abs_max", limits.current_abs_max, "above", "observability.mismatch.current_abs_max"),
        ("kl_k3", limits.kl, "above", "observability.mismatch.kl"),
        ("ess", limits.ess, "below", "observability.mismatch.ess"),
    )
    found = []
    for name, limit, side, setting in checks:
        value = metrics.get(f"actor/{name}")
        if limit is not None and value is not None and not (value <= limit if side == "above" else value >= limit):
            found.append(f"actor/{name} = {value:.3g} is {side} {setting} = {limit:g}")
    return found
