"""Comparing two checkpoints: keys, shapes, dtypes, and values bit by bit.

Either is a Hugging Face directory of any model, a training checkpoint, or one safetensors file. A training checkpoint
compared with anything else stands for its weights and what it carries; two of them are compared whole.

Invariants (tests assert them): equal checkpoints have no differences, however they are cut into files; every kind of
difference is found and named with its tensor, the first place, and how many numbers differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megasao.config.errors import UserError
from megasao.conversion.model_checkpoint import open_model
from megasao.conversion.tasks import Advance, pieces
from megasao.storage.hf_directory import INDEX, SINGLE, checkpoint_files
from megasao.storage.model_parts import CARRIED, WEIGHT
from megasao.storage.reader import TensorFiles

_PIECE = 4 << 20
"""Bytes that are compared at a time; numbers are widened to float64."""


@dataclass(frozen=True)
class Side:
    """One of the two: its tensors by the names that are compared, each with its stored name."""

    path: Path
    files: TensorFiles
    stored: dict[str, str]


@dataclass
class Comparison:
    """What was found. ``differences`` has one line for each tensor that differs."""

    tensors: int = 0
    equal_bytes: int = 0
    differences: list[str] = field(default_factory=list)


def open_sides(a: Path, b: Path) -> tuple[Side, Side]:
    """Open both; nothing but headers is read.

    Raises:
        UserError: one of them is no checkpoint, or not a whole one.
    """
    files = [_files(path) for path in (a, b)]
    both_trained = all(is_model for _, is_model in files)
    sides = []
    for path, (opened, is_model) in zip((a, b), files, strict=True):
        names = {name: name for name in opened.names()}
        if is_model and not both_trained:
            names = {
                name.removeprefix(kind): name for name in names for kind in (WEIGHT, CARRIED) if name.startswith(kind)
            }
        sides.append(Side(path, opened, names))
    return sides[0], sides[1]


def _files(path: Path) -> tuple[TensorFiles, bool]:
    """The tensors of a checkpoint, and whether it is a training checkpoint."""
    try:
        if path.is_file():
            return TensorFiles([path]), False
        if any((path / name).is_file() for name in (INDEX, SINGLE, "config.json")):
            return TensorFiles(checkpoint_files(path)), False
        if path.is_dir():
            return open_model(path).files, True
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    raise UserError(f"{path} does not exist; give a checkpoint directory or a safetensors file")


def compared_bytes(a: Side, b: Side) -> int:
    """Bytes that :func:`compare` reads of ``a``, if no shape differs."""
    return sum(a.files.info(a.stored[name]).nbytes for name in a.stored.keys() & b.stored.keys())


def compare(a: Side, b: Side, advance: Advance) -> Comparison:
    """Every difference; ``advance`` is told of the bytes of ``a`` as they are read."""
    result = Comparison()
    for one, other in ((a, b), (b, a)):
        for name in sorted(one.stored.keys() - other.stored.keys()):
            result.differences.append(f"{name}: only in {one.path}")
    for name in (name for name in a.stored if name in b.stored):
        result.tensors += 1
        mine, theirs = a.files.info(a.stored[name]), b.files.info(b.stored[name])
        if mine.shape != theirs.shape:
            result.differences.append(f"{name}: shape {mine.shape}, other {theirs.shape}")
            advance(mine.nbytes)
            continue
        difference = "" if _equal(a, b, name) else _statistics(a, b, name)
        advance(mine.nbytes)
        if mine.dtype != theirs.dtype:
            values = difference or "values equal"
            result.differences.append(f"{name}: dtype {_name(mine.dtype)}, other {_name(theirs.dtype)}; {values}")
        elif difference:
            result.differences.append(f"{name}: {difference}")
        else:
            result.equal_bytes += mine.nbytes
    return result


def _pairs(a: Side, b: Side, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows of both, flat, a piece at a time."""
    start = 0
    for mine in pieces(a.files, a.stored[name], most_bytes=_PIECE):
        if mine.ndim:
            theirs = b.files.read_slice(b.stored[name], 0, start, start + len(mine))
            start += len(mine)
        else:
            theirs = b.files.read_whole(b.stored[name])
        yield mine.reshape(-1), theirs.reshape(-1)


def _equal(a: Side, b: Side, name: str) -> bool:
    """Whether no bit differs."""
    if a.files.info(a.stored[name]).dtype != b.files.info(b.stored[name]).dtype:
        return False
    return all(torch.equal(_bits(mine), _bits(theirs)) for mine, theirs in _pairs(a, b, name))


def _statistics(a: Side, b: Side, name: str) -> str:
    """How the numbers of two tensors of one shape differ; nothing if none does."""
    count, largest, squares, norm, first, before = 0, 0.0, 0.0, 0.0, -1, 0
    for mine, theirs in _pairs(a, b, name):
        unlike = _unlike(mine, theirs).nonzero()
        distance = (mine.double() - theirs.double()).abs().nan_to_num(0.0, math.inf)
        if len(unlike):
            first = before + int(unlike[0]) if first < 0 else first
            count += len(unlike)
            largest = max(largest, float(distance.max()))
        squares += float(distance.square().sum())
        norm += float(mine.double().nan_to_num(0.0, math.inf, -math.inf).square().sum())
        before += len(mine)
    if not count:
        return ""
    shape = a.files.info(a.stored[name]).shape
    relative = math.sqrt(squares / norm) if norm else math.inf
    return (
        f"{count} of {before} numbers differ, first at [{', '.join(map(str, _index(first, shape)))}], by at most "
        f"{largest:.3g}; root mean square of the difference {relative:.3g} of that of the numbers (without NaN)"
    )


def _unlike(mine: Tensor, theirs: Tensor) -> Tensor:
    """Where bits differ; between dtypes, where numbers do."""
    if mine.dtype == theirs.dtype:
        return _bits(mine) != _bits(theirs)
    x, y = mine.double(), theirs.double()
    return (x != y) & ~(x.isnan() & y.isnan())


def _bits(tensor: Tensor) -> Tensor:
    """The same bits as whole numbers, so that NaN equals itself and 0 is not -0."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.view(whole)


def _index(flat: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return index[::-1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
