"""Sparse attention and rotary frequencies by themselves, without a process world."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megasao.megatron  # noqa: F401 - before Megatron-Core, where there is no CUDA
from megasao.families.facts import rope
from megasao.megatron import sparse_attention
from megasao.megatron.modules import PackedRow
from megasao.megatron.rope import llama3_frequencies
from megasao.megatron.sparse_attention import SparseAttention, attend

BATCH, HEADS, LENGTH, WIDTH, KEPT = 2, 3, 37, 8, 5


def case() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Queries, keys and values in float64, and for each query some earlier keys, its own among them."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, LENGTH)
    widths = {"query": WIDTH, "key": WIDTH, "value": WIDTH - 2}
    vectors = {n: torch.randn(*shape, w, generator=generator, dtype=torch.float64) for n, w in widths.items()}
    position = torch.arange(LENGTH)[:, None]
    chosen = torch.rand(BATCH, LENGTH, KEPT, generator=generator) * (position + 1)
    selected = torch.cat([chosen.long(), position.expand(BATCH, LENGTH, 1)], dim=-1)
    return {name: vector.requires_grad_() for name, vector in vectors.items()}, selected.int()


def plain(query: Any, key: Any, value: Any, selected: Any, scale: float) -> torch.Tensor:
    """Softmax over the selected keys, query by query."""
    result = torch.zeros(BATCH, HEADS, LENGTH, value.shape[-1], dtype=torch.float64)
    for batch in range(BATCH):
        for position in range(LENGTH):
            keys = selected[batch, position].long().unique()
            scores = (key[batch][:, keys] @ query[batch, :, position, :, None]).squeeze(-1) * scale
            result[batch, :, position] = (scores.softmax(-1)[..., None] * value[batch][:, keys]).sum(1)
    return result


@pytest.mark.parametrize("chunk", [1, 7, 36, LENGTH])
def test_any_chunk_gives_the_plain_result_and_gradients(chunk: int) -> None:
    vectors, selected = case()
    expected = plain(**vectors, selected=selected, scale=0.3)
    ours = attend(**vectors, selected=selected, scale=0.3, chunk=chunk)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    theirs = torch.autograd.grad((expected * weight).sum(), list(vectors.values()))
    gradients = torch.autograd.grad((ours * weight).sum(), list(vectors.values()))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    for gradient, wanted in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)
    # Control: another selection is another result.
    assert (attend(**vectors, selected=None, scale=0.3) - expected).abs().max() > 0.1


def test_nothing_selected_is_causal_attention() -> None:
    vectors, _ = case()
    every = torch.arange(LENGTH)[None, None].minimum(torch.arange(LENGTH)[None, :, None]).expand(BATCH, -1, -1)
    all_keys = attend(**vectors, selected=every, scale=0.3)
    torch.testing.assert_close(attend(**vectors, selected=None, scale=0.3), all_keys, rtol=0, atol=1e-12)


UNLIKE = (2, 40, 3, 5, 29, 4, *[2] * 30)
"""Sequences of one row: a few long ones among many that are short, as rows are filled."""


def row_of_unlike_sequences() -> tuple[PackedRow, list[torch.Tensor], torch.Tensor]:
    """The row; queries, keys and values [T, heads, width]; and for each query KEPT + 1 keys of its own sequence."""
    generator = torch.Generator().manual_seed(1)
    tokens, bounds = sum(UNLIKE), torch.tensor([0, *UNLIKE]).cumsum(0).int()
    vectors = [
        torch.randn(tokens, HEADS, w, generator=generator, dtype=torch.float64) for w in (WIDTH, WIDTH, WIDTH - 2)
    ]
    position = torch.cat([torch.arange(length) for length in UNLIKE])[:, None]
    chosen = (torch.rand(tokens, KEPT, generator=generator) * (position + 1)).int()
    short = torch.arange(KEPT + 1).minimum(position).int()
    lengths = torch.tensor(UNLIKE).repeat_interleave(torch.tensor(UNLIKE))[:, None]
    selected = torch.where(lengths > KEPT + 1, torch.cat([chosen, position.int()], dim=1), short)
    return PackedRow(qkv_format="thd", cu_seqlens_q=bounds, max_seqlen_q=max(UNLIKE)), vectors, selected


@pytest.mark.parametrize("sparse", [True, False])
def test_short_sequences_are_not_padded_to_the_longest_of_their_row(
    sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, vectors, selected = row_of_unlike_sequences()
    row.selected[0] = selected if sparse else None
    computed: list[torch.Size] = []

    def noted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        computed.append(query.shape)
        return attend(query, *others)

    monkeypatch.setattr(sparse_attention, "attend", noted)
    config: Any = SimpleNamespace(context_parallel_size=1)
    module = SparseAttention(config, source=0, indexer=False, softmax_scale=0.3)
    together = module(*vectors, packed_seq_params=row).unflatten(1, (HEADS, WIDTH - 2))
    assert sum(UNLIKE) <= sum(batch * length for batch, _, length, _ in computed) <= 3 * sum(UNLIKE) // 2
    alone = []
    for begin, end in zip(row.cu_seqlens_q.tolist(), row.cu_seqlens_q.tolist()[1:], strict=False):
        parts = [each[begin:end].transpose(0, 1)[None] for each in vectors]
        alone.append(attend(*parts, selected[None, begin:end] if sparse else None, 0.3)[0].transpose(0, 1))
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)
    # Control: the other selection is another result.
    row.selected[0] = None if sparse else selected
    assert (module(*vectors, packed_seq_params=row).unflatten(1, (HEADS, WIDTH - 2)) - together).abs().max() > 0.1


def test_llama3_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    settings |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=settings)
    expected, scaling = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 128, 2).float() / 128))
    ours = llama3_frequencies(plain, rope({"rope_parameters": settings}))
    assert scaling == 1.0
    assert ((ours - expected).abs() / expected).max() < 1e-6
    assert ((plain - expected).abs() / expected).max() > 1.0
