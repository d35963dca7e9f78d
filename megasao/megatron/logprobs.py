"""Log-probabilities of tokens from hidden states and a head split over the vocabulary; the shift to per-token arrays.

Convention: index t of a result belongs to token t itself. It comes from the output at t - 1 of the same sequence; the
first token of each sequence has 0.
"""

import torch
from megatron.core import parallel_state
from torch import Tensor

from megasao.ops.logprobs import token_logprobs


def shift_to_tokens(outputs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move ``outputs`` [..., T] (index t - 1 speaks of token t) to the token they speak of; 0 at first tokens."""
    shifted = outputs.roll(1, dims=-1)
    first = torch.zeros(shifted.shape[-1], dtype=torch.bool, device=shifted.device)
    first[cu_seqlens[:-1].long()] = True
    return torch.where(first, torch.zeros_like(shifted), shifted)


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    vocabulary: int | None = None,
    entropy: bool = False,
) -> Tensor:
    """float32 [T]: log-probability of each target under ``softmax(hidden @ weight^T / its temperature)``.

    With ``entropy`` float32 [2, T]: the log-probabilities, and the entropy in nats of the law that each target was
    chosen from. Aligned with the outputs: see :func:`shift_to_tokens`. Logits exist for a chunk of tokens at a time,
    forward and backward (unless ``ops.backend`` is reference). Collective over the tensor-parallel group.

    Args:
        hidden: [T, hidden], the same on every tensor-parallel rank.
        weight: [V / TP, hidden], this rank's part of the vocabulary.
        targets: int64 [T], the token that each output predicts.
        temperature: float32 [T], that of the targets.
        vocabulary: tokens that there are, where the last rows are filling.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    # A bfloat16 model's output comes in float32, without loss.
    states = hidden.to(weight.dtype)
    outputs = token_logprobs(
        states, weight, targets, temperature=temperature, entropy=entropy, group=group, vocabulary=vocabulary
    )
    logprobs, *entropies = [output for output in outputs if output is not None]
    return torch.stack([logprobs, *entropies]) if entropies else logprobs
