"""Length-adaptive lambda in float64, and advantages and critic targets from the configuration."""

import math

import pytest
import torch
from pydantic import ValidationError

from megasao.algorithms.advantages import action_counts, length_adaptive_lambda, skip_observation_gae
from megasao.config.algorithm import SkipObservationGae
from megasao.ops import gae

ALPHA = 1.5


def test_length_adaptive_lambda_by_definition() -> None:
    lam = length_adaptive_lambda(torch.tensor([1, 10, 342, 1_000_000]), ALPHA)
    assert lam.dtype == torch.float64 and lam.device.type == "cpu"
    assert lam.tolist() == pytest.approx([1 / 3, 1 - 1 / 15, 1 - 1 / 513, 1 - 1 / 1.5e6], abs=1e-15)
    assert (lam < 1).all()


@pytest.mark.parametrize("length", [342, 131_072, 1_000_000])
def test_its_powers_are_right_over_a_whole_trajectory(length: int) -> None:
    exact = math.exp(length * math.log1p(-1 / (ALPHA * length)))
    lam = length_adaptive_lambda(torch.tensor([length]), ALPHA)
    assert float(lam**length) == pytest.approx(exact, rel=1e-9)
    assert float(lam.float() ** length) != pytest.approx(exact, rel=1e-6), "float32 must fail"
    assert float(lam.bfloat16()) == 1.0, "bfloat16 must fail"


def test_no_actions_count_as_one() -> None:
    assert length_adaptive_lambda(torch.tensor([0]), ALPHA).tolist() == pytest.approx([1 / 3])
    assert length_adaptive_lambda(torch.tensor([], dtype=torch.int64), ALPHA).shape == (0,)


@pytest.mark.parametrize("alpha", [0.99, 0.0, math.nan, math.inf])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha: expected a finite number >= 1"):
        length_adaptive_lambda(torch.tensor([3]), alpha)
    with pytest.raises(ValidationError):
        SkipObservationGae(alpha=alpha if alpha < 1 else -1.0)


@pytest.mark.parametrize("counts", [torch.tensor([3.0]), torch.tensor([-1]), torch.tensor([[1]])])
def test_wrong_counts_are_refused(counts: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="action_counts: expected integers"):
        length_adaptive_lambda(counts, ALPHA)


def test_action_counts() -> None:
    mask = torch.tensor([True, False, True, False, True])
    assert action_counts(mask, torch.tensor([0, 3, 4, 4, 5], dtype=torch.int32)).tolist() == [2, 0, 0, 1]


def row() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "rewards": torch.randn(30),
        "values": torch.randn(30),
        "action_mask": torch.rand(30) < 0.6,
        "cu_seqlens": torch.tensor([0, 12, 30], dtype=torch.int32),
    }


def test_policy_and_critic_have_their_own_lambda() -> None:
    inputs = row()
    config = SkipObservationGae(gamma=0.97)
    got = skip_observation_gae(**inputs, config=config)
    counts = [int(inputs["action_mask"][:12].sum()), int(inputs["action_mask"][12:].sum())]
    lam = torch.tensor([1 - 1 / (1.5 * count) for count in counts], dtype=torch.float64)
    torch.testing.assert_close(got.lam, lam)
    assert torch.equal(got.advantages, gae(**inputs, gamma=0.97, lam=lam)[0])
    assert torch.equal(got.returns, gae(**inputs, gamma=0.97, lam=1.0)[1])
    assert not torch.allclose(got.returns, gae(**inputs, gamma=0.97, lam=lam)[1], atol=1e-2)


def test_the_critics_target_is_the_monte_carlo_return_whatever_the_values() -> None:
    inputs = row()
    targets = skip_observation_gae(**inputs, config=SkipObservationGae()).returns
    other = skip_observation_gae(**(inputs | {"values": torch.randn(30) * 10}), config=SkipObservationGae()).returns
    torch.testing.assert_close(targets, other)
    lower = SkipObservationGae(value_lambda=0.9)
    assert not torch.allclose(skip_observation_gae(**inputs, config=lower).returns, targets, atol=1e-2)


def test_fixed_lambda_and_bootstrap_reach_the_estimator() -> None:
    inputs = row()
    bootstrap = torch.tensor([0.5, -2.0])
    config = SkipObservationGae(policy_lambda=0.8, gamma=0.9)
    got = skip_observation_gae(**inputs, config=config, bootstrap=bootstrap)
    assert torch.equal(got.advantages, gae(**inputs, gamma=0.9, lam=0.8, bootstrap=bootstrap)[0])
    assert torch.equal(got.returns, gae(**inputs, gamma=0.9, lam=1.0, bootstrap=bootstrap)[1])


def test_a_fixed_lambda_out_of_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="policy_lambda"):
        SkipObservationGae(policy_lambda=1.5)
