"""Learning-rate schedule. It counts actor steps, never optimizer calls: K critic updates share one rate."""

from megasao.config.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of actor step ``step`` (from 0) of ``total_steps``.

    Linear warm-up over ``warmup_steps`` (the first step already moves), then constant, then, if ``decay_start``
    is set, linear to zero from that fraction of the run to its end.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step must be in [0, {total_steps}), got {step}")
    rate = config.lr
    if step < config.warmup_steps:
        return rate * (step + 1) / config.warmup_steps
    if config.decay_start is not None:
        start = config.decay_start * total_steps
        if step >= start:
            rate *= (total_steps - step) / (total_steps - start)
    return rate
