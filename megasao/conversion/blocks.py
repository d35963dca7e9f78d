"""FP8 in blocks: e4m3 numbers, and for each block of a matrix a float32 scale that they are multiplied by.

A matrix is worked on whole, or in parts of any rows and columns, wherever blocks are cut: the largest magnitudes of
the parts give the scales of the whole, and with those each part is quantised by itself. Invariants (tests assert
them), for a block whose largest magnitude is m:

- a number w comes back within max(|w| / 16, m / 448 / 1024), but for rounding in float32;
- blocks of zeros, of denormals and of the largest numbers come back finite;
- parts give the bits of the whole;
- beside what goes in and comes out, a few float32 copies of one row of blocks are held.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

Block = tuple[int, int]
Place = tuple[int, int]
"""First row and column of a part in the whole matrix."""
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
    largest = torch.zeros(scale_shape(tuple(weight.shape), block), device=weight.device)
    add_largest(largest, weight, block=block)
    scale = scales(largest)
    return quantize_part(weight, scale, block=block), scale


def add_largest(largest: Tensor, part: Tensor, *, place: Place = (0, 0), block: Block = BLOCK) -> None:
    """Raise ``largest``, float32 [:func:`scale_shape`] of the whole, to the magnitudes in the part at ``place``.

    A number that is infinite or none counts as infinite.
    """
    if not part.numel():
        return
    first, left = divmod(place[1], block[1])
    across = (left + part.shape[1] - 1) // block[1] + 1
    for down, rows in _bands(part, place[0], block):
        low, high = torch.aminmax(rows, dim=0)
        columns = torch.maximum(-low, high).float()
        filled = torch.nn.functional.pad(columns, (left, across * block[1] - left - len(columns)))
        found = filled.view(across, block[1]).amax(dim=1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        so_far = largest[down, first : first + across]
        torch.maximum(so_far, found, out=so_far)


def scales(largest: Tensor) -> Tensor:
    """The scales of blocks with these largest magnitudes. ValueError if one is infinite."""
    if not torch.isfinite(largest).all():
        raise ValueError("has numbers that are infinite or NaN, which FP8 cannot hold")
    return (largest / _LARGEST).clamp(min=_SMALLEST_SCALE)


def quantize_part(part: Tensor, scale: Tensor, *, place: Place = (0, 0), block: Block = BLOCK) -> Tensor:
    """The part at ``place`` of a matrix as float8_e4m3fn of its shape, with the ``scale`` of the whole."""
    quantized = torch.empty(part.shape, dtype=FP8, device=part.device)
    done = 0
    for down, rows in _bands(part, place[0], block):
        divided = rows.float() / _by_column(scale[down], place[1], part.shape[1], block)
        quantized[done : done + len(rows)] = divided.clamp_(-_LARGEST, _LARGEST)
        done += len(rows)
    return quantized


def dequantize_blocks(
    quantized: Tensor, scale: Tensor, block: Block = BLOCK, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The inverse of :func:`quantize_blocks`: products in float32, rounded to ``dtype``."""
    whole = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    done = 0
    for down, rows in _bands(quantized, 0, block):
        product = rows.float() * _by_column(scale[down].float(), 0, quantized.shape[1], block)
        whole[done : done + len(rows)] = product
        done += len(rows)
    return whole


def _bands(part: Tensor, first_row: int, block: Block) -> Iterator[tuple[int, Tensor]]:
    """Rows of one row of blocks each, and which one that is."""
    start = 0
    while start < len(part):
        down = (first_row + start) // block[0]
        stop = min((down + 1) * block[0] - first_row, len(part))
        yield down, part[start:stop]
        start = stop


def _by_column(scale: Tensor, first_column: int, columns: int, block: Block) -> Tensor:
    """The scale of each column, [columns], from one row of scales."""
    first, left = divmod(first_column, block[1])
    each = scale[first : (first_column + columns - 1) // block[1] + 1].repeat_interleave(block[1])
    return each[left : left + columns]
