"""Skip-observation GAE against the golden fixture, a textbook oracle, its invariants, and wrong variants of itself."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasao.ops import gae

Estimator = Callable[..., tuple[Tensor, Tensor]]

VALUES = [0.1, 0.2, 0.9, 0.8, 0.3, 0.4]
MASK = [True, True, False, False, True, True]
REWARDS = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
GOLDEN = {
    1.0: [0.9, 0.8, 0.0, 0.0, 0.7, 0.6],
    0.95: [0.799675, 0.7365, 0.0, 0.0, 0.67, 0.6],
    0.5: [0.25, 0.3, 0.0, 0.0, 0.4, 0.6],
}
WITHOUT_SKIPPING = [0.791782, 0.728191, 0.029675, 0.1365, 0.67, 0.6]


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def golden(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.tensor(REWARDS, dtype=dtype), torch.tensor(VALUES, dtype=dtype), torch.tensor(MASK), bounds(6)


def textbook(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
    skip: bool = True,
    carry_rewards: bool = True,
) -> tuple[Tensor, Tensor]:
    """The delta form, token by token. The last two arguments make the wrong variants of negative controls."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        lam_b = float(lam[b]) if isinstance(lam, Tensor) else lam
        steps: list[list[float]] = []
        for t in range(start, end):
            used = bool(action_mask[t]) or not skip
            if used:
                steps.append([t, float(rewards[t]), float(values[t])])
            elif steps and carry_rewards and math.isfinite(rewards[t]):
                steps[-1][1] += float(rewards[t])
        next_value = 0.0 if bootstrap is None else float(bootstrap[b])
        advantage = 0.0
        for t, reward, value in reversed(steps):
            advantage = reward + gamma * next_value - value + gamma * lam_b * advantage
            advantages[int(t)], returns[int(t)] = advantage, advantage + value
            next_value = value
    return torch.where(action_mask, advantages, 0.0), torch.where(action_mask, returns, 0.0)


def no_skip(*args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
    return textbook(*args, **kwargs, skip=False)  # type: ignore[arg-type]


def losing_rewards(*args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
    return textbook(*args, **kwargs, carry_rewards=False)  # type: ignore[arg-type]


def multiplying_mask(rewards: Tensor, values: Tensor, action_mask: Tensor, *rest: Tensor, **kwargs: object) -> tuple:
    """Walks over observations with rewards and values multiplied by the mask."""
    return no_skip(rewards * action_mask, values * action_mask, action_mask, *rest, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5])
def test_golden_fixture(lam: float, dtype: torch.dtype) -> None:
    rewards, values, mask, cu = golden(dtype)
    advantages, returns = gae(rewards, values, mask, cu, gamma=1.0, lam=lam)
    expected = torch.tensor(GOLDEN[lam], dtype=dtype)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), atol=1e-6, rtol=0)
    assert advantages.dtype == returns.dtype == dtype


def test_golden_fixture_rejects_an_estimator_that_does_not_skip() -> None:
    advantages, _ = no_skip(*golden(), gamma=1.0, lam=0.95)
    skipped, _ = gae(*golden(), gamma=1.0, lam=0.95)
    dense = torch.tensor(WITHOUT_SKIPPING, dtype=torch.float64)
    torch.testing.assert_close(advantages[MASK], dense[MASK], atol=1e-6, rtol=0)
    assert not torch.allclose(skipped[MASK], dense[MASK], atol=1e-3)
    everything = torch.ones(6, dtype=torch.bool)
    rewards, values, _, cu = golden()
    torch.testing.assert_close(gae(rewards, values, everything, cu, gamma=1.0, lam=0.95)[0], dense, atol=1e-6, rtol=0)


@st.composite
def packed(draw: st.DrawFn) -> dict[str, Tensor | float]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = sum(lengths)
    return {
        "rewards": torch.randn(tokens, dtype=torch.float64, generator=generator),
        "values": torch.randn(tokens, dtype=torch.float64, generator=generator),
        "action_mask": torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        "cu_seqlens": bounds(*lengths),
        "gamma": draw(st.sampled_from([1.0, 0.99, 0.5])),
        "lam": torch.rand(len(lengths), dtype=torch.float64, generator=generator),
        "bootstrap": torch.randn(len(lengths), dtype=torch.float64, generator=generator),
    }


@settings(max_examples=150, deadline=None)
@given(packed())
def test_agrees_with_the_textbook_form(case: dict) -> None:
    for got, expected in zip(gae(**case), textbook(**case), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(packed())
def test_gamma_lambda_one_telescopes_to_rewards_minus_value(case: dict) -> None:
    case |= {"gamma": 1.0, "lam": 1.0, "bootstrap": None, "rewards": case["rewards"] * case["action_mask"]}
    advantages, returns = gae(**case)
    dense, _ = no_skip(**case)
    torch.testing.assert_close(advantages, dense, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.where(case["action_mask"], returns - case["values"], 0.0), advantages)


def insert_observations(case: dict, at: list[int], value: float, reward: float) -> tuple[dict, Tensor]:
    """``case`` with an observation before each position of ``at``, and the new positions of the old tokens.

    At a boundary it goes to the sequence that starts there (or ends the last one).
    """
    lengths = case["cu_seqlens"].diff().tolist()
    owner = [b for b, length in enumerate(lengths) for _ in range(length)]
    rewards, values, mask = (case[name].tolist() for name in ("rewards", "values", "action_mask"))
    kept = list(range(len(values)))
    for position in sorted(at, reverse=True):
        b = owner[position] if position < len(owner) else len(lengths) - 1
        lengths[b] += 1
        for column, new in ((rewards, reward), (values, value), (mask, False), (kept, -1)):
            column.insert(position, new)
    wider = case | {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "values": torch.tensor(values, dtype=torch.float64),
        "action_mask": torch.tensor(mask, dtype=torch.bool),
        "cu_seqlens": bounds(*lengths),
    }
    return wider, torch.tensor(kept) >= 0


@settings(max_examples=150, deadline=None)
@given(packed(), st.data())
def test_inserted_observations_change_nothing(backend: str, case: dict, data: st.DataObject) -> None:
    tokens = len(case["values"])
    at = data.draw(st.lists(st.integers(0, tokens), min_size=1, max_size=12))
    value = data.draw(st.sampled_from([0.0, 5.0, math.nan, math.inf, -math.inf]))
    reward = data.draw(st.sampled_from([0.0, math.nan, math.inf]))
    wider, old = insert_observations(case, at, value, reward)
    for before, after in zip(gae(**case), gae(**wider), strict=True):
        # The compiled operator adds in groups, whose borders move; the reference gives the same bits.
        tolerance = 0.0 if backend == "reference" else 1e-13
        torch.testing.assert_close(after[old], before, rtol=tolerance, atol=tolerance)
        assert torch.equal(after[~wider["action_mask"]], torch.zeros(int((~wider["action_mask"]).sum())).double())


@pytest.mark.parametrize("wrong", [no_skip, multiplying_mask])
def test_insertion_rejects_estimators_that_do_not_skip(wrong: Estimator) -> None:
    rewards, values, mask, cu = golden()
    case = {"rewards": rewards, "values": values, "action_mask": mask, "cu_seqlens": cu}
    wider, old = insert_observations(case, [1, 4], 0.7, 0.0)
    before, _ = wrong(**case, gamma=1.0, lam=0.9)
    after, _ = wrong(**wider, gamma=1.0, lam=0.9)
    assert not torch.allclose(before[MASK], after[old][MASK], atol=1e-3)


def test_reward_on_an_observation_goes_to_the_last_action_before_it() -> None:
    _, values, mask, cu = golden()
    on_action, on_observation = torch.zeros(6).double(), torch.zeros(6).double()
    on_action[1] = on_observation[3] = 1.0
    expected = gae(on_action, values, mask, cu, gamma=0.9, lam=0.8)
    got = gae(on_observation, values, mask, cu, gamma=0.9, lam=0.8)
    torch.testing.assert_close(got, expected)
    lost, _ = losing_rewards(on_observation, values, mask, cu, gamma=0.9, lam=0.8)
    multiplied, _ = multiplying_mask(on_observation, values, mask, cu, gamma=0.9, lam=0.8)
    assert not torch.allclose(lost, expected[0], atol=0.1)
    assert not torch.allclose(multiplied, expected[0], atol=0.1)


def test_nan_at_observations_rejects_multiplying_by_the_mask() -> None:
    rewards, values, mask, cu = golden()
    expected, _ = gae(rewards, values, mask, cu, gamma=1.0, lam=0.95)
    values[2], rewards[3] = math.nan, math.nan
    assert torch.equal(gae(rewards, values, mask, cu, gamma=1.0, lam=0.95)[0], expected)
    assert torch.isnan(multiplying_mask(rewards, values, mask, cu, gamma=1.0, lam=0.95)[0][MASK]).any()


def test_reward_before_the_first_action_is_ignored() -> None:
    mask = torch.tensor([True, True, False, False, True])
    cu = bounds(2, 3)
    values = torch.tensor([0.1, 0.2, 9.0, 9.0, 0.3])
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    expected = gae(rewards, values, mask, cu, gamma=1.0, lam=0.9)
    rewards[2], rewards[3] = 100.0, 100.0
    assert torch.equal(torch.stack(gae(rewards, values, mask, cu, gamma=1.0, lam=0.9)), torch.stack(expected))


def test_nan_at_an_action_stays_in_its_sequence() -> None:
    torch.manual_seed(0)
    mask, cu = torch.tensor([False, True, True] * 3), bounds(3, 3, 3)
    rewards, values = torch.randn(9), torch.randn(9)
    bootstrap = torch.tensor([0.5, 0.5, 0.5])
    clean, _ = gae(rewards, values, mask, cu, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    values[4], rewards[5] = math.nan, math.inf
    bootstrap[1] = math.nan
    dirty, _ = gae(rewards, values, mask, cu, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    others = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(dirty[others], clean[others])
    assert not torch.isfinite(dirty[[4, 5]]).any()


@pytest.mark.parametrize("lengths", [[0], [3], [0, 3, 0], []])
def test_nothing_to_credit_gives_zeros(lengths: list[int]) -> None:
    tokens = sum(lengths)
    advantages, returns = gae(
        torch.full((tokens,), math.nan),
        torch.full((tokens,), math.nan),
        torch.zeros(tokens, dtype=torch.bool),
        bounds(*lengths),
        gamma=1.0,
        lam=1.0,
    )
    assert torch.equal(advantages, torch.zeros(tokens)) and torch.equal(returns, torch.zeros(tokens))


def test_no_gradient_flows() -> None:
    rewards, values, mask, cu = golden()
    advantages, returns = gae(rewards, values.requires_grad_(), mask, cu, gamma=1.0, lam=0.9)
    assert not advantages.requires_grad and not returns.requires_grad


def test_float32_input_is_accurate_over_a_long_sequence() -> None:
    tokens = 20_000
    torch.manual_seed(0)
    values, mask, cu = torch.randn(tokens), torch.ones(tokens, dtype=torch.bool), bounds(tokens)
    rewards = torch.randn(tokens)
    exact = rewards.double().flip(0).cumsum(0).flip(0) - values.double()
    scale = exact.abs().max()
    got, _ = gae(rewards, values, mask, cu, gamma=1.0, lam=1.0)
    assert float((got.double() - exact).abs().max() / scale) < 1e-7
    advantage, worst = torch.zeros(()), 0.0
    for t in reversed(range(tokens)):
        following = values[t + 1] if t + 1 < tokens else torch.zeros(())
        advantage = rewards[t] + following - values[t] + advantage
        worst = max(worst, abs(float(advantage.double() - exact[t])))
    assert worst / float(scale) > 1e-7, "the float32 delta form must fail this bound"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(2, 3)}, r"rewards: expected shape \[T\], got \[2, 3\]"),
        ({"values": torch.zeros(5)}, r"values: expected shape \[6\], got \[5\]"),
        ({"values": torch.zeros(6, dtype=torch.bfloat16)}, "values: expected dtype torch.float32, got torch.bfloat16"),
        ({"rewards": torch.zeros(6, dtype=torch.float16)}, "rewards: expected dtype torch.float32 or torch.float64"),
        ({"values": torch.zeros(6, dtype=torch.float64)}, "values: expected dtype torch.float32, got torch.float64"),
        ({"action_mask": torch.ones(6)}, "action_mask: expected dtype torch.bool, got torch.float32"),
        ({"action_mask": torch.ones(7, dtype=torch.bool)}, r"action_mask: expected shape \[6\], got \[7\]"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens: expected dtype torch.int32, got torch.int64"),
        ({"cu_seqlens": torch.tensor([[0, 6]], dtype=torch.int32)}, r"cu_seqlens: expected shape \[B\+1\]"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, r"cu_seqlens: expected shape \[B\+1\], got \[0\]"),
        ({"cu_seqlens": torch.tensor([1, 6], dtype=torch.int32)}, r"expected cu_seqlens\[0\] = 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, r"expected cu_seqlens\[-1\] = 6 .*, got 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6], dtype=torch.int32)}, "never decrease, got 4 then 3 at 2"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, r"cu_seqlens: expected shape \[B\+1\], got \[2, 2\]"),
        ({"values": torch.zeros(6, device="meta")}, "values: expected device cpu, got meta"),
        ({"action_mask": torch.ones(6, dtype=torch.bool, device="meta")}, "action_mask: expected device cpu, got meta"),
        ({"gamma": -0.1}, r"gamma: expected a number in \[0, 1\], got -0.1"),
        ({"gamma": 1.5}, "gamma: expected"),
        ({"gamma": math.nan}, "gamma: expected"),
        ({"lam": 1.01}, r"lam: expected a number in \[0, 1\], got 1.01"),
        ({"lam": torch.tensor([-0.1])}, "lam: expected every element"),
        ({"lam": torch.tensor([math.nan])}, "lam: expected every element"),
        ({"lam": torch.ones(2)}, r"lam: expected shape \[1\], got \[2\]"),
        ({"lam": torch.ones(1, dtype=torch.bfloat16)}, "lam: expected dtype"),
        ({"bootstrap": torch.zeros(2)}, r"bootstrap: expected shape \[1\], got \[2\]"),
        ({"bootstrap": torch.zeros(1, dtype=torch.int64)}, "bootstrap: expected dtype"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    rewards, values, mask, cu = golden(torch.float32)
    arguments = {"rewards": rewards, "values": values, "action_mask": mask, "cu_seqlens": cu, "gamma": 1.0, "lam": 1.0}
    with pytest.raises(ValueError, match=message):
        gae(**(arguments | change))


def test_more_tokens_than_bounds_can_count_are_refused() -> None:
    endless, actions = torch.zeros(1).expand(2**31), torch.ones(1, dtype=torch.bool).expand(2**31)
    with pytest.raises(ValueError, match=r"cu_seqlens: int32 bounds reach 2\^31 - 1 tokens, got 2147483648"):
        gae(endless, endless, actions, bounds(6), gamma=1.0, lam=1.0)


def test_gamma_zero_leaves_the_reward_alone() -> None:
    rewards, values, mask, cu = golden()
    advantages, _ = gae(rewards, values, mask, cu, gamma=0.0, lam=0.9)
    torch.testing.assert_close(advantages, torch.where(mask, rewards - values, 0.0))
