"""Argument checks shared by the ops: every error names the argument, what was expected and what was given."""

import math

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
"""Not bfloat16: of a log-probability near -1 it knows 1 %, so every ratio would be noise of that size, and of a return
of 100 it knows 0.5, about as much as an advantage."""


def check_flat(
    name: str, tensor: Tensor, *, length: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """``tensor`` is one-dimensional, of ``length`` elements, of one of ``dtypes``, on ``device``; else ValueError."""
    if tensor.shape != (length,):
        raise ValueError(f"{name}: expected shape [{length}], got {list(tensor.shape)}; pass flat packed tensors")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {expected}, got {tensor.dtype}; convert it before the call")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}; move it before the call")


def check_same_floats(**tensors: Tensor) -> int:
    """All tensors are [T] of the same float dtype (float32 or float64) and device; returns T."""
    (first_name, first), *others = tensors.items()
    if first.dim() != 1:
        raise ValueError(f"{first_name}: expected shape [T], got {list(first.shape)}; pass flat packed tensors")
    check_flat(first_name, first, length=first.numel(), dtypes=FLOATS, device=first.device)
    for name, tensor in others:
        check_flat(name, tensor, length=first.numel(), dtypes=(first.dtype,), device=first.device)
    return first.numel()


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> int:
    """``cu_seqlens`` is int32 [B+1], starts at 0, never decreases and ends at ``tokens``; returns B."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens: expected shape [B+1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens: expected dtype torch.int32, got {cu_seqlens.dtype}")
    if tokens >= 2**31:
        raise ValueError(f"cu_seqlens: int32 bounds reach 2^31 - 1 tokens, got {tokens}; split the row")
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"cu_seqlens: expected cu_seqlens[0] = 0, got {first}")
    if last != tokens:
        raise ValueError(f"cu_seqlens: expected cu_seqlens[-1] = {tokens} (all tokens), got {last}")
    falls = cu_seqlens[1:] < cu_seqlens[:-1]
    if bool(falls.any()):
        index = int(falls.nonzero()[0]) + 1
        left, right = int(cu_seqlens[index - 1]), int(cu_seqlens[index])
        raise ValueError(f"cu_seqlens: expected bounds that never decrease, got {left} then {right} at {index}")
    return cu_seqlens.numel() - 1


def check_finite_actions(action_mask: Tensor, **tensors: Tensor) -> None:
    """No NaN at an action token; else ValueError. Waits for the device."""
    for name, tensor in tensors.items():
        bad = action_mask & torch.isnan(tensor)
        if bool(bad.any()):
            where = int(bad.nonzero()[0])
            raise ValueError(f"{name}: NaN at action token {where} ({int(bad.sum())} in all); see what computed it")


def check_band(eps_low: float, eps_high: float) -> None:
    """The band (1 - eps_low, 1 + eps_high) has two finite edges above 0; else ValueError."""
    if not 0 < eps_low < 1:
        raise ValueError(f"eps_low: expected a number in (0, 1), got {eps_low}")
    if not 0 < eps_high < float("inf"):
        raise ValueError(f"eps_high: expected a finite number > 0, got {eps_high}")


def clamped_denominator(denominator: Tensor | float, like: Tensor) -> Tensor | float:
    """``denominator`` (a number or a 0-d tensor), at least 1e-8, so that a batch without tokens gives 0 and not NaN."""
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0:
            raise ValueError(f"denominator: expected a number or a 0-d tensor, got shape {list(denominator.shape)}")
        return denominator.detach().to(device=like.device, dtype=like.dtype).clamp_min(1e-8)
    if not math.isfinite(denominator) or denominator < 0:
        raise ValueError(f"denominator: expected a finite number >= 0, got {denominator}")
    return max(float(denominator), 1e-8)


def as_divisor(denominator: Tensor | float, like: Tensor) -> Tensor:
    """The clamped denominator as the compiled operators take it: float64 0-d on the device of ``like``."""
    return torch.as_tensor(clamped_denominator(denominator, like), dtype=torch.float64).to(like.device)


def contiguous(logprobs: Tensor, *others: Tensor) -> list[Tensor]:
    """The tensors as the compiled operators take them: contiguous, and gradient flows into the first one alone."""
    return [logprobs.contiguous(), *(tensor.detach().contiguous() for tensor in others)]
