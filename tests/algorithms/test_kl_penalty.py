"""Estimates of the distance from a reference policy: values, gradients, masks."""

import math

import pytest
import torch

from megasao.algorithms.kl_penalty import kl_penalties

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_value_and_gradient_are_those_of_the_formula(kind: str) -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(50, dtype=torch.float64).requires_grad_(), torch.randn(50, dtype=torch.float64)
    mask = torch.rand(50) < 0.6
    got = kl_penalties(ours, theirs, mask, kind)  # type: ignore[arg-type]
    expected = torch.where(mask, FORMULAS[kind](ours - theirs), 0.0)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(value.sum(), ours)[0] for value in (got, expected)]
    torch.testing.assert_close(*gradients)
    others = [kl_penalties(ours, theirs, mask, other) for other in FORMULAS if other != kind]  # type: ignore[arg-type]
    assert not any(torch.allclose(got, other, rtol=1e-2) for other in others)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_agreement_costs_nothing_and_pulls_nowhere(kind: str) -> None:
    ours = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalties = kl_penalties(ours, ours.detach().clone(), torch.tensor([True, True]), kind)  # type: ignore[arg-type]
    penalties.sum().backward()
    assert not penalties.any() and not ours.grad.any()


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_garbage_is_inert_and_absurd_differences_are_finite(kind: str, garbage: float) -> None:
    ours = torch.tensor([-1.0, garbage, 1e4, -1e4], requires_grad=True)
    theirs = torch.tensor([-2.0, garbage, 0.0, 0.0])
    penalties = kl_penalties(ours, theirs, torch.tensor([True, False, True, True]), kind)  # type: ignore[arg-type]
    penalties.sum().backward()
    assert bool(torch.isfinite(penalties).all()) and bool(torch.isfinite(ours.grad).all())
    assert penalties[1] == 0 and ours.grad[1] == 0
