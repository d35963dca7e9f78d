"""FP8 in blocks: e4m3 numbers, and for each block of a matrix a float32 scale that they are multiplied by.

Invariants (tests assert them), for a block whose largest magnitude is m:

- a number w comes back within max(|w| / 16, m / 448 / 1024), but for rounding in float32;
- blocks of zeros, of denormals and of the largest numbers come back finite.
"""

import torch
from torch import Tensor

Block = tuple[int, int]
BLOCK: Block = (128, 128)
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Division by a smaller one would overflow; a block below 448 of these keeps fewer bits."""


def scale_shape(shape: tuple[int, ...], block: Block = BLOCK) -> tuple[int, int]:
    """Blocks of a matrix; those at its end may be smaller."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_blocks(weight: Tensor, block: Block = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix as float8_e4m3fn [rows, columns] and its scales, float32 [:func:`scale_shape`].

    Raises:
        ValueError: a number is infinite or none.
    """
    blocks = _in_blocks(weight.float(), block)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError("has numbers that are infinite or NaN, which FP8 cannot hold")
    scale = (largest / _LARGEST).clamp(min=_SMALLEST_SCALE)
    scaled = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    rows, columns = weight.shape
    return scaled.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(FP8), scale


def dequantize_blocks(quantized: Tensor, scale: Tensor, block: Block = BLOCK) -> Tensor:
    """The inverse, in float32. Shapes as in :func:`quantize_blocks`."""
    blocks = _in_blocks(quantized.float(), block) * scale.float()[:, None, :, None]
    rows, columns = quantized.shape
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def _in_blocks(matrix: Tensor, block: Block) -> Tensor:
    """[blocks down, rows of a block, blocks across, columns of a block], filled up with zeros."""
    (rows, columns), (down, across) = matrix.shape, scale_shape(tuple(matrix.shape), block)
    filled = torch.nn.functional.pad(matrix, (0, across * block[1] - columns, 0, down * block[0] - rows))
    return filled.view(down, block[0], across, block[1])
