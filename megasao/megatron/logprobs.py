"""Log-probabilities of tokens from logits that are split over the vocabulary, and the shift to per-token arrays.

Convention: index t of a result belongs to token t itself. It comes from the output at t - 1 of the same sequence; the
first token of each sequence has 0.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor


def shift_to_tokens(outputs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move ``outputs`` [T] (index t - 1 speaks of token t) to the token they speak of; 0 at first tokens."""
    shifted = torch.cat([outputs.new_zeros(1), outputs[:-1]])
    first = torch.zeros(shifted.shape, dtype=torch.bool, device=shifted.device)
    first[cu_seqlens[:-1].long()] = True
    return torch.where(first, torch.zeros_like(shifted), shifted)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor, cu_seqlens: Tensor) -> Tensor:
    """float32 [T]: log-probability of each token under ``softmax(logits / its temperature)``.

    Args:
        logits: [T, V / TP], this rank's part of the vocabulary.
        tokens: int64 [T].
        temperature: float32 [T], aligned with the token (not with the output that predicts it).
        cu_seqlens: int32 [B + 1].
    """
    predictions = _vocab_parallel_logprobs(logits[:-1].float() / temperature[1:, None], tokens[1:])
    return shift_to_tokens(torch.cat([predictions, predictions.new_zeros(1)]), cu_seqlens)


def _vocab_parallel_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 [N] from ``logits`` [N, V / TP] and global ids ``targets`` [N]; gradients flow to the local logits."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
    vocabulary = logits.shape[1]
    start = parallel_state.get_tensor_model_parallel_rank() * vocabulary
    largest = logits.detach().amax(dim=-1)
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits - largest[:, None]
    mine = (targets >= start) & (targets < start + vocabulary)
    local = torch.where(mine, targets - start, torch.zeros_like(targets))
    picked = shifted.gather(1, local[:, None]).squeeze(1)
    both = torch.stack([shifted.exp().sum(dim=-1), torch.where(mine, picked, torch.zeros_like(picked))])
    # Each rank goes on with the same sum, so its gradient is passed through unreduced.
    total, target = reduce_from_tensor_model_parallel_region(both)
    return target - total.log()
