"""The objective that the configuration names, its denominators, and statistics that combine."""

import pytest
import torch

from megasao.algorithms.objectives import PolicyInputs, local_denominator, make_objective
from megasao.algorithms.stats import combine, is_maximum
from megasao.config.algorithm import DisObjective
from megasao.ops import dis_loss


def inputs() -> PolicyInputs:
    return PolicyInputs(
        logprobs=torch.tensor([0.0, -0.1, -0.5, 0.0, -3.0]),
        rollout_logprobs=torch.tensor([0.0, -0.1, -0.6, -2.0, -1.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0]),
        action_mask=torch.tensor([False, True, True, True, True]),
    )


@pytest.mark.parametrize("band", [(0.3, 5.0), (0.8, 10.0)])
def test_the_band_comes_from_the_configuration(band: tuple[float, float]) -> None:
    objective = make_objective(DisObjective(eps_low=band[0], eps_high=band[1]))
    row = inputs()
    loss, stats = objective.loss(row, 4.0)
    expected, expected_stats = dis_loss(
        row.logprobs,
        row.rollout_logprobs,
        row.advantages,
        row.action_mask,
        eps_low=band[0],
        eps_high=band[1],
        denominator=4.0,
    )
    assert torch.equal(loss, expected)
    assert objective.summarize(stats) == objective.summarize(expected_stats)
    assert objective.kept(row).tolist() == [False, True, True, band[1] == 10.0, False]


@pytest.mark.parametrize(("kind", "count"), [("action_tokens", 4.0), ("accepted_tokens", 2.0), ("sequences", 7.0)])
def test_local_denominators(kind: str, count: float) -> None:
    objective = make_objective(DisObjective())
    denominator = local_denominator(kind, objective, inputs(), trajectories=7)  # type: ignore[arg-type]
    assert float(denominator) == count and denominator.dtype == torch.float64 and denominator.dim() == 0


def test_combine_adds_sums_and_takes_maxima() -> None:
    parts = [{"a": torch.tensor(1.0), "a_max": torch.tensor(3.0)}, {"a": torch.tensor(2.0), "a_max": torch.tensor(2.0)}]
    assert {name: float(value) for name, value in combine(parts).items()} == {"a": 3.0, "a_max": 3.0}
    assert combine([]) == {}
    assert is_maximum("ratio_max") and not is_maximum("ratio_sum")


def test_combine_refuses_different_keys() -> None:
    with pytest.raises(ValueError, match=r"expected keys \['a'\], got \['b'\]"):
        combine([{"a": torch.tensor(1.0)}, {"b": torch.tensor(1.0)}])
