"""The sampler alone: exact log-probs, no impossible token, numbers that depend on seed and position only."""

import math

import pytest
import torch

from megasao.rollout.engines.sampler import SampleRow, derive_seed, sample, uniform


def test_tokens_of_probability_zero_are_never_chosen() -> None:
    logits = torch.full((4, 6), -math.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = 1.0
    numbers = [0.0, 0.2, 0.999999, 1 - 2**-53]
    tokens, logprobs = sample(logits, [SampleRow(1.0, number) for number in numbers])
    assert tokens == [2, 2, 4, 4]
    assert all(map(math.isfinite, logprobs))


def test_each_row_has_its_own_temperature() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1)
    tokens, logprobs = sample(logits, [SampleRow(0.0, 0.0), SampleRow(1.0, 0.05), SampleRow(0.5, 0.999)])
    assert tokens == [1, 0, 2]
    laws = [torch.log_softmax(logits[0] / temperature, -1) for temperature in (1.0, 1.0, 0.5)]
    assert logprobs == pytest.approx([float(law[token]) for law, token in zip(laws, tokens, strict=True)], abs=1e-7)


def test_small_tail_of_a_large_vocabulary_keeps_its_mass() -> None:
    """150000 tokens of 1e-9 each: a fp32 running sum near 1 would lose every one of them."""
    logits = torch.full((1, 150_001), math.log(1e-9))
    logits[0, 0] = 0.0
    share = 150_000e-9 / (1 + 150_000e-9)
    tokens, _ = sample(logits, [SampleRow(1.0, 1 - share / 2)])
    assert tokens[0] == pytest.approx(75_000, abs=200)
    cumulated = torch.softmax(logits, -1).cumsum(-1)[0]
    assert int((cumulated <= 1 - share / 2).sum()) != pytest.approx(75_000, abs=200)


def test_non_finite_logits_are_visible_to_the_caller() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 3] = math.nan
    _, logprobs = sample(logits, [SampleRow(1.0, 0.5)] * 2)
    assert math.isfinite(logprobs[0]) and not math.isfinite(logprobs[1])


def test_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02 and abs(float(numbers.var()) - 1 / 12) < 0.01
    correlation = torch.corrcoef(numbers)
    assert float((correlation - torch.eye(64)).abs().max()) < 0.7
    assert uniform(3, 5) == uniform(3, 5) != uniform(5, 3)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert derive_seed(1, "a") == derive_seed(1, "a") != derive_seed(2, "a")
