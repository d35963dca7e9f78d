"""The learning rate counts actor steps: warm-up, plateau, linear decay."""

import pytest

from megasao.config.training import OptimizerConfig
from megasao.training.schedule import learning_rate


def rates(config: OptimizerConfig, total: int) -> list[float]:
    return [learning_rate(config, step, total) for step in range(total)]


def test_warm_up_starts_above_zero_and_reaches_the_peak() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert rates(config, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_decay_is_linear_and_its_last_step_is_not_zero() -> None:
    config = OptimizerConfig(lr=1.0, decay_start=0.5)
    assert rates(config, 8) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_without_decay_the_rate_stays() -> None:
    assert set(rates(OptimizerConfig(lr=0.5), 5)) == {0.5}


@pytest.mark.parametrize("step", [-1, 3])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"step must be in \[0, 3\)"):
        learning_rate(OptimizerConfig(lr=1.0), step, 3)
