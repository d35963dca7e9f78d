"""Numbers of a benchmark out of per-sample rewards, with their uncertainty. Pure; numpy only.

Invariants:
- an excluded sample is no sample: it is neither right nor wrong;
- ``pass_at`` is unbiased: its mean over all subsets of k of n samples is itself;
- resampling is over problems, since samples of one problem are not independent; it is seeded, so a report is the same
  every time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

RESAMPLES = 2000
FLIPS = 10000
_EXACT_FLIPS = 12
"""Most differing problems for which all sign flips are counted instead of drawn."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    problems: int


def pass_at(k: int, samples: int, right: int) -> float:
    """The chance that at least one of k samples out of these is right. ValueError unless 1 <= k <= samples."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k}: expected 1 to {samples} samples")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """The reward of the most frequent answer; ties share. Right answers are one answer, however they are written.

    A sample without an answer has no vote; without any vote it is 0.
    """
    votes = Counter(
        "right" if reward >= 1 else f"wrong {' '.join(answer.split())}"
        for answer, reward in zip(answers, rewards, strict=True)
        if answer is not None
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    return float(votes.get("right") == most) / sum(count == most for count in votes.values())


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of one value a problem. ValueError without values."""
    if not len(values):
        raise ValueError("an estimate needs at least one problem")
    numbers = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(_resampled_means(numbers, seed), [0.025, 0.975])
    return Estimate(float(numbers.mean()), float(low), float(high), len(numbers))


@dataclass(frozen=True)
class Comparison:
    """Of two runs on the same problems: mean of B minus A, its interval, and the sign-flip test's p."""

    difference: Estimate
    p: float


def compare(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Comparison:
    """Two values a problem, in the same order. ValueError if there are none or not equally many."""
    if len(a) != len(b):
        raise ValueError(f"a comparison needs the same problems, got {len(a)} and {len(b)}")
    differences = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    return Comparison(estimate(list(differences), seed=seed), sign_flip_p(differences, seed=seed))


def sign_flip_p(differences: np.ndarray, *, seed: int = 0) -> float:
    """Two-sided: how often flipping signs at random gives a sum at least as far from 0. 1 where nothing differs."""
    moved = differences[differences != 0]
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) - 1e-12
    if len(moved) <= _EXACT_FLIPS:
        signs = 1 - 2 * ((np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1)
        return float((np.abs(signs @ moved) >= observed).mean())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(FLIPS, len(moved)))
    return float((1 + (np.abs(signs @ moved) >= observed).sum()) / (1 + FLIPS))


def _resampled_means(numbers: np.ndarray, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    means: np.ndarray = numbers[rows].mean(axis=1)
    return means
