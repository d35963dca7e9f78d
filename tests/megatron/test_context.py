"""Context parallelism: which rank has which tokens, and that putting the parts together is the whole row."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.tiny import random_sequences, read
from tests.megatron.world import run_world


def parts(cu_seqlens: list[int], ranks: int) -> list[list[int]]:
    from megasao.megatron.context import zigzag

    return [zigzag(torch.tensor(cu_seqlens, dtype=torch.int32), rank, ranks).tolist() for rank in range(ranks)]


def test_each_rank_has_a_chunk_from_the_front_and_its_mirror_from_the_back() -> None:
    assert parts([0, 8, 12], 2) == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_parts_are_the_row(ranks: int) -> None:
    from megasao.megatron.context import whole_order

    bounds = [0, 2 * ranks, 8 * ranks, 8 * ranks, 20 * ranks]
    ends = [token for part in parts(bounds, ranks) for token in part]
    assert sorted(ends) == list(range(20 * ranks))
    order = whole_order(torch.tensor(bounds, dtype=torch.int32), ranks)
    assert torch.tensor(ends)[order].tolist() == list(range(20 * ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_causal_attention_costs_every_rank_the_same(ranks: int) -> None:
    costs = [sum(token + 1 for token in part) for part in parts([0, 64], ranks)]
    assert len(set(costs)) == 1


def test_a_sequence_that_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"\[6\] are no multiples of 4"):
        parts([0, 6], 2)


@pytest.mark.world
@pytest.mark.parametrize("tile", [4, 1024])
def test_tiles_of_queries_change_nothing(checkpoint: Path, tmp_path: Path, tile: int) -> None:
    """Also where a tile is computed again in the backward pass."""
    gradients = []
    for parallel in ({"ranks": 1}, {"ranks": 2, "context": 2}):
        payload: dict[str, Any] = {"path": str(checkpoint), "parallel": parallel, "out": str(tmp_path), "tile": tile}
        payload |= {"sequences": [*random_sequences(4, seed=9), [5]], "sequences_per_row": 3}
        counts = run_world(parallel["ranks"], "tests.megatron.cases:split_gradients", payload)
        assert set(counts) == {2}
        gradients.append(read(tmp_path, "gradients"))
    largest = max(tensor.abs().max().item() for tensor in gradients[0].values())
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() < 2e-6 * largest, name


def test_sequences_of_similar_length_stand_together() -> None:
    from megasao.megatron.modules import by_length

    order, groups = by_length(torch.tensor([0, 2, 8, 8, 13, 14], dtype=torch.int32))
    assert groups == [[6, 5], [2], [1]]
    assert order.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 13]


def test_padding_is_bounded_whatever_the_lengths() -> None:
    from megasao.megatron.modules import by_length

    lengths = [4000, *range(1, 200), 0, 17]
    order, groups = by_length(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    assert sorted(order.tolist()) == list(range(sum(lengths)))
    assert sorted(length for group in groups for length in group) == sorted(length for length in lengths if length)
    padded = sum(len(group) * group[0] for group in groups)
    assert padded <= 1.5 * sum(lengths)
    assert padded < 0.05 * len(lengths) * max(lengths), "padding all to the longest would be twenty times that"
