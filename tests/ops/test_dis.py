"""DIS: band edges, extreme ratios, inert masked positions, gradients against float64 autograd, split invariance."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasao.algorithms.stats import combine
from megasao.ops import accepted_tokens, count_accepted, dis_loss
from megasao.ops.dis import summarize

BANDS = [(0.3, 5.0), (0.8, 3.0), (0.2, 0.28)]


def batch(tokens: int = 200, *, seed: int = 0, spread: float = 1.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(tokens, dtype=torch.float64, generator=generator)
    return {
        "logprobs": rollout + spread * torch.randn(tokens, dtype=torch.float64, generator=generator),
        "rollout_logprobs": rollout,
        "advantages": torch.randn(tokens, dtype=torch.float64, generator=generator),
        "action_mask": torch.rand(tokens, generator=generator) < 0.6,
    }


def loss_and_gradient(inputs: dict[str, Tensor], **options: float | Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss, stats = dis_loss(**(inputs | {"logprobs": logprobs}), **{"eps_low": 0.3, "eps_high": 5.0} | options)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad, stats


def surrogate_gradient(
    inputs: dict[str, Tensor], eps_low: float, eps_high: float, *, one_sided: bool = False
) -> Tensor:
    """Gradient of -sum f(r) A with r differentiable: another route to the same gradient.

    ``one_sided`` is the wrong variant: it masks only the side that the sign of A points to, as PPO's clip does.
    """
    logprobs = inputs["logprobs"].clone().requires_grad_()
    ratio = torch.exp(logprobs - inputs["rollout_logprobs"])
    inside_low, inside_high = ratio > 1 - eps_low, ratio < 1 + eps_high
    if one_sided:
        keep = torch.where(inputs["advantages"] > 0, inside_high, inside_low)
    else:
        keep = inside_low & inside_high
    surrogate = torch.where(keep & inputs["action_mask"], ratio * inputs["advantages"], 0.0)
    (gradient,) = torch.autograd.grad(-surrogate.sum(), logprobs)
    return gradient


@pytest.mark.parametrize(("eps_low", "eps_high"), BANDS)
def test_gradient_is_that_of_the_ratio_times_advantage(eps_low: float, eps_high: float) -> None:
    inputs = batch()
    loss, gradient, _ = loss_and_gradient(inputs, eps_low=eps_low, eps_high=eps_high, denominator=1)
    torch.testing.assert_close(gradient, surrogate_gradient(inputs, eps_low, eps_high), atol=1e-12, rtol=1e-12)
    kept = accepted_tokens(
        inputs["logprobs"], inputs["rollout_logprobs"], inputs["action_mask"], eps_low=eps_low, eps_high=eps_high
    )
    assert 0 < int(kept.sum()) < int(inputs["action_mask"].sum())
    assert torch.equal(gradient[~kept], torch.zeros(int((~kept).sum())).double())
    ratio = torch.exp(inputs["logprobs"] - inputs["rollout_logprobs"])
    by_definition = -(ratio * inputs["advantages"] * inputs["logprobs"])[kept].sum()
    torch.testing.assert_close(loss, by_definition)
    assert not torch.isclose(loss, -(ratio * inputs["advantages"])[kept].sum(), rtol=1e-2), "the values differ"


def test_gradient_test_rejects_a_one_sided_band_and_a_differentiated_ratio() -> None:
    inputs = batch()
    _, gradient, _ = loss_and_gradient(inputs, denominator=1)
    assert not torch.allclose(gradient, surrogate_gradient(inputs, 0.3, 5.0, one_sided=True), atol=1e-3)
    logprobs = inputs["logprobs"].clone().requires_grad_()
    ratio = torch.exp(logprobs - inputs["rollout_logprobs"])
    keep = inputs["action_mask"] & (ratio > 0.7) & (ratio < 6.0)
    (wrong,) = torch.autograd.grad(-torch.where(keep, ratio * inputs["advantages"] * logprobs, 0.0).sum(), logprobs)
    assert not torch.allclose(gradient, wrong, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("eps_low", "eps_high"), BANDS)
def test_edges_are_outside_and_their_inner_neighbours_inside(
    eps_low: float, eps_high: float, advantage: float, dtype: torch.dtype
) -> None:
    edges = torch.tensor([math.log(1 - eps_low), math.log(1 + eps_high)], dtype=dtype)
    inner = torch.nextafter(edges, torch.zeros_like(edges))
    outer = torch.nextafter(edges, edges * 10)
    ratios = torch.cat([edges, outer, inner])
    inputs = {
        "logprobs": ratios,
        "rollout_logprobs": torch.zeros_like(ratios),
        "advantages": torch.full_like(ratios, advantage),
        "action_mask": torch.ones(6, dtype=torch.bool),
    }
    _, gradient, stats = loss_and_gradient(inputs, eps_low=eps_low, eps_high=eps_high, denominator=1)
    assert torch.equal(gradient[:4], torch.zeros(4, dtype=dtype))
    torch.testing.assert_close(gradient[4:], -advantage * inner.exp())
    assert (float(stats["masked_low"]), float(stats["masked_high"])) == (2.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_are_finite(dtype: torch.dtype) -> None:
    inputs = {
        "logprobs": torch.tensor([1e4, -1e4, -math.inf, 0.0, -1.0], dtype=dtype),
        "rollout_logprobs": torch.tensor([0.0, 0.0, -1.0, -math.inf, -1.0], dtype=dtype),
        "advantages": torch.ones(5, dtype=dtype),
        "action_mask": torch.ones(5, dtype=torch.bool),
    }
    loss, gradient, stats = loss_and_gradient(inputs, denominator=5)
    torch.testing.assert_close(loss, torch.tensor(0.2, dtype=dtype))
    torch.testing.assert_close(gradient, torch.tensor([0, 0, 0, 0, -0.2], dtype=dtype))
    assert all(bool(torch.isfinite(value)) for value in stats.values())
    summary = summarize(stats)
    assert (summary["masked_low"], summary["masked_high"], summary["invalid"]) == (0.4, 0.4, 0.0)
    assert summary["ratio_max"] == pytest.approx(math.exp(20))
    assert summary["log_ratio_abs_mean"] == pytest.approx(16.0)


def test_mask_after_exp_would_not_be_finite() -> None:
    logprobs = torch.tensor([1e4, -1.0], requires_grad=True)
    ratio = torch.exp(logprobs - torch.tensor([0.0, -1.0]))
    inside = (ratio > 0.7) & (ratio < 6.0)
    (gradient,) = torch.autograd.grad(-(ratio * inside * logprobs).sum(), logprobs)
    assert torch.isnan(gradient[0]), "the variant that multiplies by the mask is rejected by the test above"


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_at_masked_positions_is_inert(garbage: float) -> None:
    clean = batch()
    masked = ~clean["action_mask"]
    dirty = {name: value.clone() for name, value in clean.items()}
    for name in ("logprobs", "rollout_logprobs", "advantages"):
        dirty[name][masked] = garbage
    expected, got = (loss_and_gradient(inputs, denominator=10) for inputs in (clean, dirty))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert all(torch.equal(got[2][name], value) for name, value in expected[2].items())
    assert torch.isnan(dirty["logprobs"] * dirty["action_mask"]).any(), "multiplying by the mask would leak"


def test_a_nan_ratio_at_an_action_is_counted_and_trains_nothing() -> None:
    inputs = batch()
    action = int(inputs["action_mask"].nonzero()[0])
    inputs["rollout_logprobs"][action] = math.nan
    loss, gradient, stats = loss_and_gradient(inputs, denominator=10)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and gradient[action] == 0
    assert float(stats["invalid"]) == 1.0
    assert all(bool(torch.isfinite(value)) for value in stats.values())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 60), max_size=6), st.sampled_from([torch.float32, torch.float64]))
def test_any_split_into_micro_batches_adds_up(seed: int, cuts: list[int], dtype: torch.dtype) -> None:
    inputs = {
        name: value if value.dtype == torch.bool else value.to(dtype) for name, value in batch(60, seed=seed).items()
    }
    denominator = inputs["action_mask"].sum()
    whole_loss, whole_gradient, whole_stats = loss_and_gradient(inputs, denominator=denominator)
    edges = [0, *sorted(cuts), 60]
    parts = [
        loss_and_gradient({name: value[start:end] for name, value in inputs.items()}, denominator=denominator)
        for start, end in pairwise(edges)
    ]
    torch.testing.assert_close(torch.stack([part[0] for part in parts]).sum(), whole_loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole_gradient)
    total = combine(part[2] for part in parts)
    for name, value in whole_stats.items():
        torch.testing.assert_close(total[name], value)


def test_split_test_rejects_a_local_denominator() -> None:
    inputs = batch(60)
    whole, _, _ = loss_and_gradient(inputs, denominator=inputs["action_mask"].sum())
    halves = [{name: value[part] for name, value in inputs.items()} for part in (slice(0, 7), slice(7, 60))]
    means = [loss_and_gradient(half, denominator=half["action_mask"].sum())[0] for half in halves]
    assert not torch.isclose(torch.stack(means).mean(), whole, rtol=1e-3)


@pytest.mark.parametrize("denominator", [0, 0.0, torch.tensor(0), torch.tensor(0.0, dtype=torch.float64)])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_batch_without_actions_gives_zero(tokens: int, denominator: float | Tensor) -> None:
    inputs = {name: torch.full((tokens,), math.nan) for name in ("logprobs", "rollout_logprobs", "advantages")}
    loss, gradient, stats = loss_and_gradient(
        inputs | {"action_mask": torch.zeros(tokens, dtype=torch.bool)}, denominator=denominator
    )
    assert float(loss) == 0.0 and torch.equal(gradient, torch.zeros(tokens))
    summary = summarize(stats)
    assert summary.pop("tokens") == 0.0
    assert set(summary.values()) == {None}


def test_statistics_by_definition() -> None:
    inputs = batch(spread=0.5)
    _, _, stats = loss_and_gradient(inputs, denominator=1)
    log_ratio = (inputs["logprobs"] - inputs["rollout_logprobs"])[inputs["action_mask"]]
    ratio = log_ratio.exp()
    expected = {
        "tokens": len(ratio),
        "masked_low": (ratio <= 0.7).double().mean(),
        "masked_high": (ratio >= 6.0).double().mean(),
        "invalid": 0.0,
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "log_ratio_abs_mean": log_ratio.abs().mean(),
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "ess": ratio.sum() ** 2 / ratio.square().sum() / len(ratio),
    }
    assert summarize(stats) == pytest.approx({name: float(value) for name, value in expected.items()})
    unmasked = (inputs["logprobs"] - inputs["rollout_logprobs"]).abs().mean()
    assert float(unmasked) != pytest.approx(float(log_ratio.abs().mean()), rel=1e-3), "observations must not count"
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in stats.values())


def test_equal_policies_have_ratio_one() -> None:
    inputs = batch()
    inputs["logprobs"] = inputs["rollout_logprobs"]
    summary = summarize(loss_and_gradient(inputs, denominator=1)[2])
    assert summary["ratio_mean"] == summary["ratio_max"] == pytest.approx(1.0)
    assert summary["ess"] == pytest.approx(1.0)
    assert summary["kl_k3"] == summary["log_ratio_abs_mean"] == 0.0


def test_count_accepted_completes_the_masked_counts() -> None:
    inputs = batch()
    _, _, stats = loss_and_gradient(inputs, denominator=1)
    accepted = count_accepted(
        inputs["logprobs"].requires_grad_(),
        inputs["rollout_logprobs"],
        inputs["action_mask"],
        eps_low=0.3,
        eps_high=5.0,
    )
    assert not accepted.requires_grad
    assert float(accepted) + float(stats["masked_low"] + stats["masked_high"]) == float(stats["tokens"])


def test_no_gradient_into_advantages_or_rollout() -> None:
    inputs = batch()
    leaves = [inputs[name].requires_grad_() for name in ("logprobs", "rollout_logprobs", "advantages")]
    loss, _ = dis_loss(**inputs, eps_low=0.3, eps_high=5.0, denominator=torch.tensor(3.0, requires_grad=True))
    loss.backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": torch.zeros(2, 2)}, r"logprobs: expected shape \[T\]"),
        ({"rollout_logprobs": torch.zeros(3)}, r"rollout_logprobs: expected shape \[4\], got \[3\]"),
        ({"advantages": torch.zeros(4, dtype=torch.bfloat16)}, "advantages: expected dtype torch.float32"),
        ({"logprobs": torch.zeros(4, dtype=torch.bfloat16)}, "logprobs: expected dtype torch.float32 or torch.float64"),
        ({"action_mask": torch.ones(4, dtype=torch.int32)}, "action_mask: expected dtype torch.bool"),
        ({"eps_low": 1.0}, r"eps_low: expected a number in \(0, 1\), got 1.0"),
        ({"eps_low": 0.0}, "eps_low"),
        ({"eps_high": math.inf}, "eps_high: expected a finite number > 0, got inf"),
        ({"denominator": -1.0}, "denominator: expected a finite number >= 0, got -1.0"),
        ({"denominator": math.nan}, "denominator"),
        ({"denominator": torch.ones(4)}, "denominator: expected a number or a 0-d tensor"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    arguments: dict[str, object] = {
        "logprobs": torch.zeros(4),
        "rollout_logprobs": torch.zeros(4),
        "advantages": torch.zeros(4),
        "action_mask": torch.ones(4, dtype=torch.bool),
        "eps_low": 0.3,
        "eps_high": 5.0,
        "denominator": 1.0,
    }
    call: Callable[..., object] = dis_loss
    with pytest.raises(ValueError, match=message):
        call(**(arguments | change))
