"""Estimates and tests against their definitions, by counting."""

from itertools import combinations

import numpy as np
import pytest

from megasao.evaluation.statistics import compare, estimate, majority, pass_at, sign_flip_p


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(samples):
    for right in range(samples + 1):
        rewards = [1] * right + [0] * (samples - right)
        for k in range(1, samples + 1):
            counted = np.mean([any(chosen) for chosen in combinations(rewards, k)])
            assert pass_at(k, samples, right) == pytest.approx(counted)
    for k in (0, samples + 1):
        with pytest.raises(ValueError, match="expected 1 to"):
            pass_at(k, samples, 0)


def test_the_usual_wrong_pass_at_k_is_biased():
    """Negative control: 1 - (1 - p)^k from the observed share is not the mean over subsets."""
    assert pass_at(2, 4, 1) == pytest.approx(0.5)
    assert pass_at(2, 4, 1) != pytest.approx(1 - (1 - 1 / 4) ** 2)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["1", "1", "2"], [1, 1, 0], 1.0),
        (["1", "2", "2"], [1, 0, 0], 0.0),
        (["1", "2"], [1, 0], 0.5),
        (["1/2", "0.5", "3", "3"], [1, 1, 0, 0], 0.5),
        (["1/2", "0.5", "\\frac12", "3", "3"], [1, 1, 1, 0, 0], 1.0),
        (["3", " 3 ", "1"], [0, 0, 1], 0.0),
        ([None, None, "1"], [0, 0, 1], 1.0),
        ([None], [0], 0.0),
        (["1", "2", "3"], [0, 0, 1], 1 / 3),
    ],
)
def test_the_majority_votes(answers, rewards, expected):
    assert majority(answers, rewards) == pytest.approx(expected)


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(5)
    covered = 0
    for seed in range(200):
        found = estimate(list(generator.binomial(8, 0.4, size=60) / 8), seed=seed)
        assert found.low <= found.value <= found.high
        covered += found.low <= 0.4 <= found.high
    assert 0.88 <= covered / 200 <= 0.99
    assert estimate([0.5, 0.5]).low == 0.5 and estimate([0.0, 1.0]) == estimate([0.0, 1.0])
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_the_sign_flip_test_is_exact_where_it_can_be_and_finds_what_differs():
    assert sign_flip_p(np.zeros(5)) == 1.0
    assert sign_flip_p(np.array([1.0, 1.0, 1.0])) == pytest.approx(2 / 8)
    assert sign_flip_p(np.array([1.0, -1.0])) == pytest.approx(1.0)
    generator = np.random.default_rng(0)
    noise = [sign_flip_p(generator.normal(size=30), seed=i) for i in range(100)]
    assert 0.01 <= np.mean(np.array(noise) < 0.1) <= 0.2
    assert sign_flip_p(generator.normal(size=30) + 1.0) < 0.01
    found = compare([0.0, 0.5, 0.25], [0.5, 0.5, 1.0])
    assert found.difference.value == pytest.approx(1.25 / 3) and found.p == pytest.approx(0.5)
    with pytest.raises(ValueError, match="same problems"):
        compare([0.0], [0.0, 1.0])
