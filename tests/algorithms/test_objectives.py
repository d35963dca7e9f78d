"""Every objective against float64 autograd of its formula, split invariance, inert masks, combining statistics."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megasao.algorithms.objectives import Objective, PolicyInputs, TokenLosses, make_objective, objective
from megasao.algorithms.stats import combine, is_maximum
from megasao.config.algorithm import (
    AsympoObjective,
    DisObjective,
    GpgObjective,
    NaiveObjective,
    ObjectiveOptions,
    PpoClipObjective,
    SpoObjective,
)
from megasao.ops import dis_loss
from megasao.ops.response import Responses, add_responses, response_totals

GROUP = 6


def row(seed: int = 0, group: int = GROUP) -> PolicyInputs:
    """A complete group: responses of 2 to 20 tokens, some observations, group advantages that sum to zero."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 21, (group,), generator=generator)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(bounds[-1])
    rewards = torch.rand(group, dtype=torch.float64, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.7
    mask[bounds[1:] - 1] = True
    rollout = -3 * torch.rand(tokens, dtype=torch.float64, generator=generator)
    return PolicyInputs(
        logprobs=(rollout + torch.randn(tokens, dtype=torch.float64, generator=generator)).clamp_max(-1e-3),
        rollout_logprobs=rollout,
        advantages=torch.repeat_interleave(rewards - rewards.mean(), lengths),
        action_mask=mask,
        cu_seqlens=bounds.to(torch.int32),
    )


def responses(inputs: PolicyInputs, logprobs: Tensor) -> list[tuple[float, Tensor, Tensor]]:
    """(A, log-probs, rollout log-probs) of each response's action tokens."""
    parts = []
    for start, end in zip(inputs.cu_seqlens[:-1].tolist(), inputs.cu_seqlens[1:].tolist(), strict=True):
        mask = inputs.action_mask[start:end]
        rollout = inputs.rollout_logprobs[start:end][mask] if inputs.rollout_logprobs is not None else mask
        parts.append((float(inputs.advantages[start]), logprobs[start:end][mask], rollout))
    return parts


def dis_formula(inputs: PolicyInputs, logprobs: Tensor) -> Tensor:
    """-sum f(r) A with r differentiable: the same gradient, another value."""
    total = logprobs.new_zeros(())
    for advantage, ours, theirs in responses(inputs, logprobs):
        ratio = (ours - theirs).exp()
        total = total - (torch.where((ratio > 0.2) & (ratio < 4.0), ratio, 0.0) * advantage).sum()
    return total


def ppo_formula(inputs: PolicyInputs, logprobs: Tensor, dual: float | None = None) -> Tensor:
    total = logprobs.new_zeros(())
    for advantage, ours, theirs in responses(inputs, logprobs):
        ratio = (ours - theirs).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        if dual is not None and advantage < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(dual * advantage, dtype=torch.float64))
        total = total - surrogate.sum()
    return total


def gpg_formula(inputs: PolicyInputs, logprobs: Tensor) -> Tensor:
    return -sum(advantage * ours.sum() for advantage, ours, _ in responses(inputs, logprobs))


def naive_formula(inputs: PolicyInputs, logprobs: Tensor, alpha: float = 1.0) -> Tensor:
    parts = responses(inputs, logprobs)
    return sum((alpha * a if a < 0 else a) * -ours.mean() for a, ours, _ in parts)


def asympo_formula(inputs: PolicyInputs, logprobs: Tensor) -> Tensor:
    return sum(a * -ours.mean() / -ours.mean().detach() for a, ours, _ in responses(inputs, logprobs))


CASES = {
    "dis": (DisObjective(eps_low=0.8, eps_high=3.0), dis_formula),
    "ppo_clip": (PpoClipObjective(eps_low=0.2, eps_high=0.3), ppo_formula),
    "ppo_clip dual": (
        PpoClipObjective(eps_low=0.2, eps_high=0.3, dual_clip=1.5),
        lambda i, p: ppo_formula(i, p, dual=1.5),
    ),
    "gpg": (GpgObjective(), gpg_formula),
    "naive": (NaiveObjective(), naive_formula),
    "spo": (SpoObjective(alpha=0.2), lambda i, p: naive_formula(i, p, alpha=0.2)),
    "asympo": (AsympoObjective(), asympo_formula),
}
every = pytest.mark.parametrize("name", CASES)


def run(options: ObjectiveOptions, inputs: PolicyInputs, denominator: float | Tensor = GROUP) -> tuple[Tensor, Tensor]:
    """(loss, gradient)"""
    logprobs = inputs.logprobs.clone().requires_grad_()
    loss, _ = make_objective(options).loss(replace(inputs, logprobs=logprobs), denominator)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


@every
@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_that_of_the_formula(name: str, seed: int) -> None:
    options, formula = CASES[name]
    inputs = row(seed)
    loss, gradient = run(options, inputs)
    logprobs = inputs.logprobs.clone().requires_grad_()
    expected = formula(inputs, logprobs) / GROUP
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    if name != "dis":
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    assert gradient.abs().max() > 1e-3


@every
def test_no_two_objectives_are_the_same(name: str) -> None:
    inputs = row()
    gradient = run(CASES[name][0], inputs)[1]
    for other in CASES.keys() - {name}:
        assert not torch.allclose(gradient, run(CASES[other][0], inputs)[1], rtol=1e-3), other


def parts_of(inputs: PolicyInputs, cuts: list[int], *, whole: bool = True) -> list[PolicyInputs]:
    """``inputs`` cut into rows at any token; ``whole`` gives each the totals of the whole responses it has parts of."""
    edges = [0, *sorted(cuts), inputs.logprobs.numel()]
    bounds = inputs.cu_seqlens.long()
    pieces, totals = [], []
    for start, end in pairwise(edges):
        piece = PolicyInputs(
            logprobs=inputs.logprobs[start:end],
            rollout_logprobs=inputs.rollout_logprobs[start:end] if inputs.rollout_logprobs is not None else None,
            advantages=inputs.advantages[start:end],
            action_mask=inputs.action_mask[start:end],
            cu_seqlens=(bounds.clamp(start, end) - start).to(torch.int32),
        )
        pieces.append(piece)
        totals.append(response_totals(piece.logprobs, piece.action_mask, piece.cu_seqlens))
    if not whole:
        return pieces
    together: Responses = totals[0]
    for part in totals[1:]:
        together = add_responses(together, part)
    return [replace(piece, responses=together) for piece in pieces]


@every
@pytest.mark.parametrize("cuts", [[1], [7, 8, 30], list(range(1, 40))])
def test_any_split_adds_up_even_inside_a_response(name: str, cuts: list[int]) -> None:
    options, _ = CASES[name]
    inputs = row()
    loss, gradient = run(options, inputs)
    parts = [run(options, part) for part in parts_of(inputs, cuts)]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-12, atol=1e-12)
    measured = make_objective(options)
    stats = combine(measured.loss(part, GROUP)[1] for part in parts_of(inputs, cuts))
    expected = measured.summarize(measured.loss(inputs, GROUP)[1])
    assert measured.summarize(stats) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["naive", "spo", "asympo"])
def test_a_response_split_without_its_totals_is_noticed(name: str) -> None:
    options, _ = CASES[name]
    inputs = row()
    wrong = [run(options, part)[1] for part in parts_of(inputs, [7, 30], whole=False)]
    assert not torch.allclose(torch.cat(wrong), run(options, inputs)[1], rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 9, 20, 33]])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_asympo_balances_whatever_the_scales_and_the_split(dtype: torch.dtype, cuts: list[int], spread: float) -> None:
    """The loss value of a complete group is zero; naive's, with stale negatives that weigh more, is not."""
    inputs = row(3)
    # Negative responses are much less likely under the current policy than positive ones, as stale ones are.
    logprobs = torch.where(inputs.advantages < 0, spread * inputs.logprobs, inputs.logprobs)
    inputs = replace(
        inputs,
        logprobs=logprobs.to(dtype),
        advantages=inputs.advantages.to(dtype),
        rollout_logprobs=None,
    )
    losses = [run(AsympoObjective(), part) for part in parts_of(inputs, cuts)]
    assert abs(float(sum(loss for loss, _ in losses))) < 1e-6
    assert max(float(gradient.abs().max()) for _, gradient in losses) > 1e-3
    measured = make_objective(AsympoObjective())
    summary = measured.summarize(measured.loss(inputs, GROUP)[1])
    assert summary["positive_loss"] == pytest.approx(-summary["negative_loss"], abs=1e-6)
    if spread > 1:
        assert abs(float(run(NaiveObjective(), inputs)[0])) > 1


def test_the_floor_bounds_what_a_near_certain_response_weighs() -> None:
    inputs = replace(row(), logprobs=torch.full_like(row().logprobs, -1e-9), rollout_logprobs=None)
    gradients = {floor: run(AsympoObjective(floor=floor), inputs)[1].abs().max() for floor in (1e-3, 1e-6)}
    assert gradients[1e-6] == pytest.approx(float(1000 * gradients[1e-3]), rel=1e-6)
    assert gradients[1e-3] <= 1000 * inputs.advantages.abs().max() / GROUP


@every
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_at_masked_positions_is_inert(name: str, garbage: float) -> None:
    clean = row()
    masked = ~clean.action_mask
    dirty = replace(
        clean,
        **{
            field: getattr(clean, field).clone().masked_fill(masked, garbage)
            for field in ("logprobs", "rollout_logprobs", "advantages")
        },
    )
    options, _ = CASES[name]
    for expected, got in zip(run(options, clean), run(options, dirty), strict=True):
        assert torch.equal(got, expected)
    measured = make_objective(options)
    assert measured.loss(dirty, 1.0)[1] == measured.loss(clean, 1.0)[1]


@every
@pytest.mark.parametrize("tokens", [0, 4])
def test_no_action_token_gives_zero(name: str, tokens: int) -> None:
    nothing = torch.full((tokens,), math.nan)
    inputs = PolicyInputs(
        nothing, nothing, nothing, torch.zeros(tokens, dtype=torch.bool), torch.tensor([0, tokens], dtype=torch.int32)
    )
    loss, gradient = run(CASES[name][0], inputs, denominator=0.0)
    assert float(loss) == 0 and torch.equal(gradient, torch.zeros(tokens))
    measured = make_objective(CASES[name][0])
    assert measured.summarize(measured.loss(inputs, 0.0)[1])["positive_nll"] is None


@pytest.mark.parametrize("difference", [1e4, -1e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["dis", "ppo_clip", "ppo_clip dual"])
def test_absurd_ratios_stay_finite(name: str, advantage: float, difference: float) -> None:
    inputs = PolicyInputs(
        logprobs=torch.tensor([-1.0, difference], dtype=torch.float32),
        rollout_logprobs=torch.tensor([-1.0, 0.0]),
        advantages=torch.tensor([0.0, advantage]),
        action_mask=torch.tensor([True, True]),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
    )
    loss, gradient = run(CASES[name][0], inputs)
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("name", ["gpg", "naive", "spo", "asympo"])
def test_rollout_logprobs_are_not_read_where_they_are_not_needed(name: str) -> None:
    options, _ = CASES[name]
    assert not options.needs_logprobs
    inputs = row()
    for expected, got in zip(run(options, inputs), run(options, replace(inputs, rollout_logprobs=None)), strict=True):
        assert torch.equal(got, expected)
    measured = make_objective(options)
    without = measured.summarize(measured.loss(replace(inputs, rollout_logprobs=None), 1.0)[1])
    assert "ratio_mean" not in without and without["positive_nll"] is not None
    assert "ratio_mean" in measured.summarize(measured.loss(inputs, 1.0)[1])


@pytest.mark.parametrize("name", ["dis", "ppo_clip"])
def test_missing_rollout_logprobs_are_an_error_where_they_are_needed(name: str) -> None:
    options, _ = CASES[name]
    assert options.needs_logprobs
    with pytest.raises(ValueError, match="rollout_logprobs: the objective needs them"):
        make_objective(options).loss(replace(row(), rollout_logprobs=None), 1.0)


def test_what_is_measured() -> None:
    inputs = row()
    measured = make_objective(PpoClipObjective())
    loss, stats = measured.loss(inputs, GROUP)
    summary = measured.summarize(stats)
    parts = responses(inputs, inputs.logprobs)
    positive = [-float(ours.mean()) for a, ours, _ in parts if a > 0]
    assert summary["positive_responses"] == pytest.approx(len(positive))
    assert summary["positive_nll"] == pytest.approx(sum(positive) / len(positive))
    assert summary["positive_loss"] + summary["negative_loss"] == pytest.approx(float(loss))
    ratio = (inputs.logprobs - inputs.rollout_logprobs).exp()[inputs.action_mask]
    advantages = inputs.advantages[inputs.action_mask]
    assert summary["clipped_low"] == pytest.approx(float(((ratio < 0.8) & (advantages < 0)).double().mean()))
    assert summary["clipped_high"] == pytest.approx(float(((ratio > 1.2) & (advantages > 0)).double().mean()))
    assert summary["ratio_mean"] == pytest.approx(float(ratio.mean()))
    gradient = run(PpoClipObjective(), inputs)[1]
    assert torch.equal(measured.kept(inputs), gradient != 0)


@pytest.mark.parametrize("band", [(0.3, 5.0), (0.8, 10.0)])
def test_dis_is_the_op_with_the_configured_band(band: tuple[float, float]) -> None:
    measured = make_objective(DisObjective(eps_low=band[0], eps_high=band[1]))
    inputs = row()
    loss, stats = measured.loss(inputs, 4.0)
    tensors = (inputs.logprobs, inputs.rollout_logprobs, inputs.advantages, inputs.action_mask)
    expected, expected_stats = dis_loss(*tensors, eps_low=band[0], eps_high=band[1], denominator=4.0)
    torch.testing.assert_close(loss, expected)
    for name, value in expected_stats.items():  # the op may be the compiled one, which adds in another order
        torch.testing.assert_close(stats[name], value, rtol=1e-6, atol=1e-6)


def test_an_objective_is_one_section_and_one_function() -> None:
    class Mine(ObjectiveOptions):
        factor: float = 2.0

    @objective(Mine)
    def mine(inputs: PolicyInputs, options: Mine) -> TokenLosses:
        return TokenLosses(torch.where(inputs.action_mask, options.factor * inputs.logprobs, 0.0))

    loss, _ = run(Mine(), row(), denominator=1.0)
    assert float(loss) == pytest.approx(2 * float(row().logprobs[row().action_mask].sum()))
    assert isinstance(make_objective(Mine()), Objective)


def test_a_plain_function_of_whole_responses_equals_the_operator() -> None:
    class Plain(ObjectiveOptions):
        pass

    @objective(Plain)
    def plain(inputs: PolicyInputs, options: Plain) -> TokenLosses:
        lengths = inputs.per_token(inputs.totals().tokens)
        high = inputs.logprobs > -1
        return TokenLosses(-inputs.logprobs * inputs.advantages / lengths, kept=~high, shares={"high": high})

    inputs = row()
    for got, expected in zip(run(Plain(), inputs), run(NaiveObjective(), inputs), strict=True):
        torch.testing.assert_close(got, expected)
    measured = make_objective(Plain())
    summary = measured.summarize(measured.loss(inputs, GROUP)[1])
    high = (inputs.logprobs > -1)[inputs.action_mask]
    assert summary["high"] == pytest.approx(float(high.double().mean()))
    assert summary["positive_loss"] == pytest.approx(
        float(measured.loss(replace(inputs, advantages=inputs.advantages.clamp_min(0)), GROUP)[0])
    )
    assert torch.equal(measured.kept(inputs)[inputs.action_mask], ~high)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(3, dtype=torch.float64)}, "advantages: expected shape"),
        ({"action_mask": torch.ones(3, dtype=torch.bool)}, "action_mask: expected shape"),
        ({"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}, "cu_seqlens"),
    ],
)
def test_wrong_inputs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_objective(NaiveObjective()).loss(replace(row(), **change), 1.0)


def test_combine_adds_sums_and_takes_maxima() -> None:
    parts = [{"a": torch.tensor(1.0), "a_max": torch.tensor(3.0)}, {"a": torch.tensor(2.0), "a_max": torch.tensor(2.0)}]
    assert {name: float(value) for name, value in combine(parts).items()} == {"a": 3.0, "a_max": 3.0}
    assert combine([]) == {}
    assert is_maximum("ratio_max") and not is_maximum("ratio_sum")


def test_combine_refuses_different_keys() -> None:
    with pytest.raises(ValueError, match=r"expected keys \['a'\], got \['b'\]"):
        combine([{"a": torch.tensor(1.0)}, {"b": torch.tensor(1.0)}])
