"""Length-adaptive lambda in float64, and advantages and critic targets from the configuration."""

import math

import pytest
import torch
from pydantic import ValidationError

from megasao.algorithms.advantages import action_counts, estimate_from_values, first_actions_on, length_adaptive_lambda
from megasao.config.algorithm import Gae, SkipObservationGae
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
    got = estimate_from_values(**inputs, options=config)
    counts = [int(inputs["action_mask"][:12].sum()), int(inputs["action_mask"][12:].sum())]
    lam = torch.tensor([1 - 1 / (1.5 * count) for count in counts], dtype=torch.float64)
    torch.testing.assert_close(got.lam, lam)
    assert torch.equal(got.advantages, gae(**inputs, gamma=0.97, lam=lam)[0])
    assert torch.equal(got.returns, gae(**inputs, gamma=0.97, lam=1.0)[1])
    assert not torch.allclose(got.returns, gae(**inputs, gamma=0.97, lam=lam)[1], atol=1e-2)


def test_the_critics_target_is_the_monte_carlo_return_whatever_the_values() -> None:
    inputs = row()
    targets = estimate_from_values(**inputs, options=SkipObservationGae()).returns
    other = estimate_from_values(**(inputs | {"values": torch.randn(30) * 10}), options=SkipObservationGae()).returns
    torch.testing.assert_close(targets, other)
    lower = SkipObservationGae(value_lambda=0.9)
    assert not torch.allclose(estimate_from_values(**inputs, options=lower).returns, targets, atol=1e-2)


def test_fixed_lambda_and_bootstrap_reach_the_estimator() -> None:
    inputs = row()
    bootstrap = torch.tensor([0.5, -2.0])
    config = SkipObservationGae(policy_lambda=0.8, gamma=0.9)
    got = estimate_from_values(**inputs, options=config, bootstrap=bootstrap)
    assert torch.equal(got.advantages, gae(**inputs, gamma=0.9, lam=0.8, bootstrap=bootstrap)[0])
    assert torch.equal(got.returns, gae(**inputs, gamma=0.9, lam=1.0, bootstrap=bootstrap)[1])


def test_a_fixed_lambda_out_of_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="policy_lambda"):
        SkipObservationGae(policy_lambda=1.5)


# golden numbers of both estimators: two turns with two observation tokens between them, reward 1 at the end
VALUES, MASK = [0.1, 0.2, 0.9, 0.8, 0.3, 0.4], [True, True, False, False, True, True]
SKIPPING = {
    1.0: [0.9, 0.8, 0, 0, 0.7, 0.6],
    0.95: [0.799675, 0.7365, 0, 0, 0.67, 0.6],
    0.5: [0.25, 0.3, 0, 0, 0.4, 0.6],
}


def golden(options: SkipObservationGae | Gae, prompt: int = 0, values: list[float] | None = None) -> list[float]:
    """Advantages of the golden case behind ``prompt`` observation tokens."""
    mask = [False] * prompt + MASK
    got = estimate_from_values(
        torch.tensor([0.0] * (len(mask) - 1) + [1.0], dtype=torch.float64),
        torch.tensor([7.0] * prompt + (values or VALUES), dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor([0, len(mask)], dtype=torch.int32),
        options,
    )
    assert not got.advantages[~torch.tensor(mask)].any() and not got.returns[~torch.tensor(mask)].any()
    return got.advantages[prompt:].tolist()


@pytest.mark.parametrize("lam", SKIPPING)
@pytest.mark.parametrize("prompt", [0, 3])
def test_skipping_golden_numbers(lam: float, prompt: int) -> None:
    assert golden(SkipObservationGae(policy_lambda=lam), prompt) == pytest.approx(SKIPPING[lam], abs=1e-12)


@pytest.mark.parametrize("prompt", [0, 3])
def test_not_skipping_golden_numbers(prompt: int) -> None:
    """The observations' own advantages, .029675 and .1365, are steps of the recurrence and are not trained on."""
    assert golden(Gae(policy_lambda=0.95), prompt) == pytest.approx(
        [0.79178178125, 0.7281913487, 0, 0, 0.67, 0.6], abs=2e-6
    )
    other = [0.1, 0.2, 0.0, 0.0, 0.3, 0.4]
    assert golden(Gae(policy_lambda=0.95), prompt, other) != pytest.approx(golden(Gae(policy_lambda=0.95), prompt))
    skip = SkipObservationGae(policy_lambda=0.95)
    assert golden(skip, prompt, other) == golden(skip, prompt)


def test_with_lambda_one_skipping_changes_nothing() -> None:
    assert golden(Gae(policy_lambda=1.0)) == pytest.approx(golden(SkipObservationGae(policy_lambda=1.0)))


def test_steps_begin_with_the_first_action_of_each_sequence() -> None:
    mask = torch.tensor([False, True, False, False, False, True, False])
    bounds = torch.tensor([0, 3, 4, 4, 7], dtype=torch.int32)
    assert first_actions_on(mask, bounds).tolist() == [False, True, True, False, False, True, True]
