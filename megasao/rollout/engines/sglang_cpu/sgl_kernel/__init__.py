"""Stands in for SGLang's kernel package on machines without a GPU. See the README beside it.

Invariant, asserted by the tests: ``murmur_hash32_cpu`` is SGLang's 32-bit MurmurHash3 of (seed, position, column).
"""

from typing import Any, NoReturn

import torch

_MASK = 0xFFFFFFFF


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs SGLang's compiled kernels, which this CPU server runs without"
        )

    return missing


def _rotl(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One 4-byte block into the hash state; int64 tensors of 32-bit values, whose products wrap in the high bits."""
    block = (_rotl((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotl(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _finish(state: torch.Tensor, length: int) -> torch.Tensor:
    state = state ^ length
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """uint32 [rows, columns] of seeds (64 bits) [rows], positions [rows] and column numbers [columns]."""
    low_and_high = seed.view(torch.int64)
    state = torch.zeros_like(low_and_high)
    for block in (low_and_high & _MASK, (low_and_high >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        state = _mix(state, block)
    return _finish(_mix(state[:, None], columns.to(torch.int64)[None, :]), 16).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
