"""Log-probabilities straight from hidden states: the logits exist for one chunk of tokens at a time, in both passes.

    logits = hidden @ weight^T / temperature;   logprob = logits[target] - log sum exp(logits)

Invariants that the tests assert:
- values and gradients equal those of the plain computation, for chunks of 1, 7 and all tokens, also with entropy;
- with the vocabulary split over ranks they equal those of one rank;
- no [T, V] tensor: the extra memory is bounded by one chunk (measured at V = 154,880 by ``benchmarks/logprobs.py``);
- bfloat16 logits are sums in float32, never rounded to bfloat16;
- ``ops.backend: reference`` takes the plain computation, with logits of all tokens at once.
"""

from typing import Any

import torch
from torch import Tensor, distributed

from megasao.ops.backend import configured
from megasao.ops.reference import logprobs_reference

_NEVER = -1e30
"""Logit of a token that does not exist."""

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CHUNK_BYTES = 2**28
"""Logits of one chunk by default. The backward pass holds up to three tensors of this size."""
WIDENED_ROWS = 4096
"""Rows of a narrow weight that are copied to float32 at one time, where a product cannot widen by itself."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    entropy: bool = False,
    group: distributed.ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunked_logprobs`` or the plain computation, as ``ops.backend`` and ``ops.logprob_chunk`` say."""
    config = configured()
    if config.backend == "reference":
        vocabulary = _vocabulary(weight, group, vocabulary)
        scale = _check(hidden, weight, targets, temperature, vocabulary)
        return logprobs_reference(
            hidden, weight, targets, scale=scale, entropy=entropy, group=group, vocabulary=vocabulary
        )
    return chunked_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk=config.logprob_chunk,
        entropy=entropy,
        group=group,
        vocabulary=vocabulary,
    )


def default_chunk(rows: int, dtype: torch.dtype) -> int:
    """Tokens whose logits over ``rows`` of the vocabulary take ``CHUNK_BYTES``; at least 1."""
    return max(1, CHUNK_BYTES // (max(rows, 1) * dtype.itemsize))


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    group: distributed.ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under ``softmax(hidden @ weight^T / temperature)``.

    Logits are float32 (float64 for float64 inputs), also where ``hidden`` is narrower. The backward pass makes them
    again: one product more than the plain computation, in exchange for its memory.

    Args:
        hidden: [T, H], float32, float64, bfloat16 or float16; with gradient. The same on every rank of ``group``.
        weight: [V / ranks, H], the same dtype; this rank's rows of the output weight, in rank order; with gradient.
        targets: int64 [T], ids in the whole vocabulary.
        temperature: > 0, a number or [T]; no gradient flows into it.
        chunk: tokens whose logits exist at one time, >= 1; None: as many as take ``CHUNK_BYTES``.
        entropy: also give the entropy of each law, in nats, with gradient.
        group: ranks that the vocabulary is split over; None for one. Collective over it, forward and backward. As in
            Megatron's output layer, the gradient of ``hidden`` is complete on every rank.
        vocabulary: ids that there are; the rows of ``weight`` after them are filling, and have probability 0. None is
            every row.

    Returns:
        (logprobs, entropies), [T] in float32 (float64 for float64 inputs); entropies is None unless asked for.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.
    """
    vocabulary = _vocabulary(weight, group, vocabulary)
    scale = _check(hidden, weight, targets, temperature, vocabulary)
    if chunk is None:
        chunk = default_chunk(len(weight), scale.dtype)
    elif chunk < 1:
        raise ValueError(f"chunk: expected a number >= 1, got {chunk}")
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, weight, targets, scale, chunk, entropy, group, vocabulary)
    return logprobs, entropies if entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """Saves the inputs and one number a token (log sum exp; two with entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        chunk: int,
        entropy: bool,
        group: distributed.ProcessGroup | None,
        vocabulary: int,
    ) -> tuple[Tensor, Tensor]:
        shard = _Shard(weight, group, vocabulary)
        logprobs, normalisers = (torch.empty_like(scale) for _ in range(2))
        entropies = torch.empty_like(scale) if entropy else scale.new_empty(0)
        for part in _chunks(len(targets), chunk):
            logits = shard.logits(hidden[part], scale[part])
            normalisers[part] = shard.log_sum_exp(logits)
            logprobs[part] = shard.pick(logits, targets[part]) - normalisers[part]
            if entropy:
                # -sum p log p = log Z - sum p z
                law = (logits - normalisers[part, None]).exp_()
                entropies[part] = normalisers[part] - shard.sum(law.mul_(logits).sum(dim=-1))
        ctx.save_for_backward(hidden, weight, targets, scale, normalisers, entropies)
        ctx.settings = chunk, entropy, group, vocabulary
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, scale, normalisers, entropies = ctx.saved_tensors
        chunk, entropy, group, vocabulary = ctx.settings
        shard = _Shard(weight, group, vocabulary)
        to_logprobs, to_entropies = gradients
        for_hidden = torch.empty_like(hidden)
        # Chunks add up in the accuracy of the logits: bfloat16 would lose all but the first.
        for_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(targets), chunk):
            logits = shard.logits(hidden[part], scale[part])
            log_law = logits.sub_(normalisers[part, None])
            if entropy:
                # d entropy / d z = -p (log p + entropy);  d logprob / d z = [target] - p
                law = log_law.exp()
                factor = log_law.add_(entropies[part, None]).mul_(to_entropies[part, None])
                gradient = factor.add_(to_logprobs[part, None]).mul_(law).neg_()
            else:
                gradient = log_law.exp_().mul_(-to_logprobs[part, None])
            shard.add_at(gradient, targets[part], to_logprobs[part])
            gradient = gradient.mul_(scale[part, None]).to(hidden.dtype)
            for_hidden[part] = shard.sum(gradient @ weight)
            if for_weight is not None:
                _add_product(for_weight, gradient, hidden[part])
        return (for_hidden, None if for_weight is None else for_weight.to(weight.dtype), *[None] * 6)


class _Shard:
    """This rank's part of the vocabulary, and the reductions over all parts."""

    def __init__(self, weight: Tensor, group: distributed.ProcessGroup | None, vocabulary: int) -> None:
        self.weight, self.group = weight, group
        self.alone = group is None or distributed.get_world_size(group) == 1
        self.start = 0 if self.alone else distributed.get_rank(group) * len(weight)
        self.real = min(max(vocabulary - self.start, 0), len(weight))

    def logits(self, hidden: Tensor, scale: Tensor) -> Tensor:
        """[t, V / ranks], in the dtype of ``scale``: in bfloat16 they would be off by up to 0.4 %."""
        if hidden.dtype == scale.dtype:
            logits = hidden @ self.weight.T
        elif hidden.is_cuda:
            logits = torch.mm(hidden, self.weight.T, out_dtype=scale.dtype)
        else:
            logits, wide = scale.new_empty(len(hidden), len(self.weight)), hidden.to(scale.dtype)
            for rows in _chunks(len(self.weight), WIDENED_ROWS):
                logits[:, rows] = wide @ self.weight[rows].to(scale.dtype).T
        logits.mul_(scale[:, None])
        if self.real < len(self.weight):
            # Finite: an infinite logit times probability 0 is no number.
            logits[:, self.real :] = _NEVER
        return logits

    def sum(self, parts: Tensor) -> Tensor:
        """The sum over ranks."""
        if not self.alone:
            distributed.all_reduce(parts, group=self.group)
        return parts

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[t], over the whole vocabulary."""
        own = torch.logsumexp(logits, dim=-1)
        if self.alone:
            return own
        largest = own.clone()
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        return largest + self.sum((own - largest).exp_()).log_()

    def pick(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[t], the logit of each target, from the rank that has it."""
        mine, local = self._local(targets)
        picked = logits.gather(1, local[:, None]).squeeze(1)
        return self.sum(torch.where(mine, picked, 0.0))

    def add_at(self, gradient: Tensor, targets: Tensor, value: Tensor) -> None:
        """Add ``value`` [t] at the targets, on the rank that has them."""
        mine, local = self._local(targets)
        gradient.scatter_add_(1, local[:, None], torch.where(mine, value, 0.0)[:, None])

    def _local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        local = targets - self.start
        mine = (local >= 0) & (local < len(self.weight))
        return mine, torch.where(mine, local, 0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T @ right; in place where the dtypes are equal."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _inverse_temperature(temperature: Tensor | float, hidden: Tensor) -> Tensor:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    value = torch.as_tensor(temperature, dtype=dtype, device=hidden.device).detach()
    tokens = hidden.shape[0] if hidden.dim() else 0
    if value.dim() not in (0, 1) or (value.dim() == 1 and len(value) != tokens):
        raise ValueError(f"temperature: expected a number or shape [{tokens}], got {list(value.shape)}")
    if not bool((value > 0).all() & torch.isfinite(value).all()):
        raise ValueError("temperature: expected finite numbers > 0")
    return value.reciprocal().expand(tokens).contiguous()


def _vocabulary(weight: Tensor, group: distributed.ProcessGroup | None, vocabulary: int | None) -> int:
    """The ids that there are: all rows of all ranks, unless said otherwise."""
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape [V, H], got {list(weight.shape)}")
    rows = len(weight) * (1 if group is None else distributed.get_world_size(group))
    vocabulary = rows if vocabulary is None else vocabulary
    if not 0 < vocabulary <= rows:
        raise ValueError(f"vocabulary: expected between 1 and the {rows} rows of weight on all ranks, got {vocabulary}")
    return vocabulary


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    vocabulary: int,
) -> Tensor:
    """1 / temperature [T] in the dtype of the results, if all arguments are right."""
    scale = _inverse_temperature(temperature, hidden)
    if hidden.dim() != 2 or hidden.dtype not in FLOATS:
        raise ValueError(f"hidden: expected floats of shape [T, H], got {hidden.dtype} {list(hidden.shape)}")
    if weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight: expected {hidden.dtype} of shape [V, {hidden.shape[1]}], got {weight.dtype} {list(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets: expected int64 of shape [{len(hidden)}], got {targets.dtype} {list(targets.shape)}")
    if weight.device != hidden.device or targets.device != hidden.device:
        raise ValueError(f"weight, targets: expected device {hidden.device}, got {weight.device} and {targets.device}")
    if targets.numel() and not bool(((targets >= 0) & (targets < vocabulary)).all()):
        raise ValueError(
            f"targets: expected ids in [0, {vocabulary}), got {int(targets.min())} to {int(targets.max())}"
        )
    return scale
