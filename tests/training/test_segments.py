"""Attention and positions of a segment are its own, through Megatron: nothing leaks from the segment before it."""

import pytest

from tests.megatron.tiny import random_sequences, write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world


@pytest.mark.parametrize("parallel", [{"ranks": 1}, {"ranks": 2, "context": 2}], ids=["one process", "CP2"])
def test_a_segment_in_an_episode_is_as_it_is_alone(tmp_path, parallel):
    path = write_tiny_checkpoint(tmp_path)
    first, second = random_sequences(2, seed=3, low=17, high=30)
    masks = [[index > 2 for index in range(len(tokens))] for tokens in (first, second)]
    episodes = [
        (first + second, masks[0] + masks[1], [0, len(first)]),
        (first, masks[0], None),
        (second, masks[1], None),
        (first + second, masks[0] + masks[1], None),
    ]
    payload = {"path": str(path), "episodes": episodes, "settings": {"parallel": parallel}}
    results = run_world(parallel["ranks"], "tests.training.cases:row_logprobs", payload)
    assert all(result == results[0] for result in results)
    for cut, one, other, uncut in zip(*results[0], strict=True):
        assert cut == pytest.approx(one + other, abs=2e-5)
        # negative control: without the cut the second segment sees the first
        assert uncut[: len(first)] == pytest.approx(one, abs=2e-5)
        assert max(abs(a - b) for a, b in zip(uncut[len(first) :], other, strict=True)) > 0.05
