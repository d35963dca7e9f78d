"""Critic loss and explained variance: definitions, inert masked positions, split invariance."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megasao.algorithms.stats import combine
from megasao.algorithms.value_loss import summarize, value_loss


def batch(tokens: int = 100) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    returns = 5 + torch.randn(tokens, dtype=torch.float64, generator=generator)
    error = 0.5 * torch.randn(tokens, dtype=torch.float64, generator=generator)
    action_mask = torch.rand(tokens, generator=generator) < 0.6
    # Errors at observations are larger, so that counting them shows.
    return {"values": returns + error * torch.where(action_mask, 1, 3), "returns": returns, "action_mask": action_mask}


def run(inputs: dict[str, Tensor], denominator: float | Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    values = inputs["values"].clone().requires_grad_()
    loss, stats = value_loss(**(inputs | {"values": values}), denominator=denominator)
    loss.backward()
    assert values.grad is not None
    return loss.detach(), values.grad, stats


def test_loss_and_gradient_by_definition() -> None:
    inputs = batch()
    mask, error = inputs["action_mask"], inputs["values"] - inputs["returns"]
    loss, gradient, _ = run(inputs, mask.sum())
    torch.testing.assert_close(loss, error[mask].square().mean())
    torch.testing.assert_close(gradient, torch.where(mask, 2 * error / mask.sum(), 0.0))
    assert not torch.isclose(loss, error.square().mean(), rtol=1e-3), "observations must not count"


def test_no_gradient_into_the_target() -> None:
    inputs = batch()
    values, returns = inputs["values"].requires_grad_(), inputs["returns"].requires_grad_()
    value_loss(values, returns, inputs["action_mask"], denominator=1.0)[0].backward()
    assert values.grad is not None and returns.grad is None


def test_metrics_by_definition() -> None:
    inputs = batch()
    _, _, stats = run(inputs, 1.0)
    values, returns = (inputs[name][inputs["action_mask"]].numpy() for name in ("values", "returns"))
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert 0.5 < explained < 0.9
    assert summarize(stats) == pytest.approx(
        {
            "value_mean": values.mean(),
            "return_mean": returns.mean(),
            "mean_square_error": ((values - returns) ** 2).mean(),
            "explained_variance": explained,
        }
    )
    biased = inputs | {"values": inputs["values"] + 1.0}
    assert summarize(run(biased, 1.0)[2])["explained_variance"] == pytest.approx(explained), "a bias explains as much"
    assert 1 - ((values + 1 - returns) ** 2).mean() / np.var(returns) != pytest.approx(explained, abs=0.1)


def test_a_constant_critic_explains_nothing_and_a_perfect_one_everything() -> None:
    inputs = batch()
    constant = inputs | {"values": torch.full_like(inputs["values"], 3.0)}
    assert summarize(run(constant, 1.0)[2])["explained_variance"] == pytest.approx(0.0)
    perfect = inputs | {"values": inputs["returns"]}
    assert summarize(run(perfect, 1.0)[2])["explained_variance"] == 1.0


def test_explained_variance_of_constant_returns_is_none() -> None:
    inputs = batch()
    inputs["returns"] = 1.0 + 0.005 * inputs["returns"]
    summary = summarize(run(inputs, 1.0)[2])
    assert summary["explained_variance"] is None and summary["value_mean"] is not None


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_at_masked_positions_is_inert(garbage: float) -> None:
    clean = batch()
    dirty = {name: value.clone() for name, value in clean.items()}
    for name in ("values", "returns"):
        dirty[name][~clean["action_mask"]] = garbage
    expected, got = run(clean, 7.0), run(dirty, 7.0)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert all(torch.equal(got[2][name], value) for name, value in expected[2].items())


@pytest.mark.parametrize("cut", [0, 1, 37, 100])
def test_a_split_adds_up(cut: int) -> None:
    inputs = batch()
    denominator = inputs["action_mask"].sum()
    loss, gradient, stats = run(inputs, denominator)
    parts = [
        run({name: value[part] for name, value in inputs.items()}, denominator)
        for part in (slice(cut), slice(cut, None))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), gradient)
    assert summarize(combine([parts[0][2], parts[1][2]])) == pytest.approx(summarize(stats))


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_batch_without_actions_gives_zero(tokens: int) -> None:
    nothing = torch.full((tokens,), math.nan)
    inputs = {"values": nothing, "returns": nothing, "action_mask": torch.zeros(tokens, dtype=torch.bool)}
    loss, gradient, stats = run(inputs, torch.tensor(0))
    assert float(loss) == 0.0 and torch.equal(gradient, torch.zeros(tokens))
    assert set(summarize(stats).values()) == {None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"returns": torch.zeros(3)}, r"returns: expected shape \[4\], got \[3\]"),
        ({"values": torch.zeros(4, dtype=torch.bfloat16)}, "values: expected dtype"),
        ({"action_mask": torch.ones(4)}, "action_mask: expected dtype torch.bool"),
        ({"denominator": -2}, "denominator: expected a finite number >= 0"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    arguments = {
        "values": torch.zeros(4),
        "returns": torch.zeros(4),
        "action_mask": torch.ones(4, dtype=torch.bool),
        "denominator": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        value_loss(**(arguments | change))


def test_value_clipping_by_definition() -> None:
    """A value that has moved further than the limit gains nothing from moving on, and loses from having moved wrong."""
    values, old = torch.tensor([1.0, 1.0, 0.1, 2.0]), torch.tensor([0.0, 0.0, 0.0, 0.0])
    returns, mask = torch.tensor([2.0, 0.5, 2.0, 2.0]), torch.tensor([True, True, True, False])
    leaf = values.clone().requires_grad_()
    loss, stats = value_loss(leaf, returns, mask, denominator=1.0, clip=(old, 0.2))
    loss.backward()
    # moved from 0 to 1 towards 2: clipped to .2; moved past .5: the unclipped error is larger; moved by .1: free
    assert float(loss.detach()) == pytest.approx(1.8**2 + 0.5**2 + 1.9**2)
    torch.testing.assert_close(leaf.grad, torch.tensor([0.0, 2 * 0.5, -2 * 1.9, 0.0]))
    plain = value_loss(values, returns, mask, denominator=1.0)
    assert float(plain[0]) == pytest.approx(1.0 + 0.5**2 + 1.9**2)
    assert all(torch.equal(stats[name], value) for name, value in plain[1].items())


def test_a_wide_clip_changes_nothing() -> None:
    inputs = batch()
    old = torch.where(inputs["action_mask"], inputs["values"] + 0.1, math.nan)
    clipped = value_loss(**inputs, denominator=3.0, clip=(old, 0.2))[0]
    assert torch.equal(clipped, value_loss(**inputs, denominator=3.0)[0])
    with pytest.raises(ValueError, match="clip: expected a finite number > 0"):
        value_loss(**inputs, denominator=3.0, clip=(old, 0.0))
