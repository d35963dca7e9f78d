"""Log-probabilities of tokens from hidden states and a head split over the vocabulary; the shift to per-token arrays.

Convention: index t of a result belongs to token t itself. It comes from the output at t - 1 of the same sequence; the
first token of each sequence has 0.
"""

import torch
from megatron.core import parallel_state
from torch import Tensor

from megasao.ops.logprobs import chunked_logprobs


def shift_to_tokens(outputs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move ``outputs`` [T] (index t - 1 speaks of token t) to the token they speak of; 0 at first tokens."""
    shifted = torch.cat([outputs.new_zeros(1), outputs[:-1]])
    first = torch.zeros(shifted.shape, dtype=torch.bool, device=shifted.device)
    first[cu_seqlens[:-1].long()] = True
    return torch.where(first, torch.zeros_like(shifted), shifted)


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    cu_seqlens: Tensor,
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """float32 [T]: log-probability of each token under ``softmax(hidden @ weight^T / its temperature)``.

    Logits exist for a chunk of tokens at a time, forward and backward. Collective over the tensor-parallel group.

    Args:
        hidden: [T, hidden], the same on every tensor-parallel rank.
        weight: [V / TP, hidden], this rank's part of the vocabulary.
        tokens: int64 [T].
        temperature: float32 [T], aligned with the token (not with the output that predicts it).
        cu_seqlens: int32 [B + 1].
        vocabulary: tokens that there are, where the last rows are filling.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    # A bfloat16 model's output comes in float32, without loss.
    states = hidden[:-1].to(weight.dtype)
    predictions, _ = chunked_logprobs(
        states, weight, tokens[1:], temperature=temperature[1:], group=group, vocabulary=vocabulary
    )
    return shift_to_tokens(torch.cat([predictions, predictions.new_zeros(1)]), cu_seqlens)
