"""Comparing two checkpoints: keys, shapes, dtypes, and values bit by bit.

Either is a Hugging Face directory of any model, a training checkpoint, or one safetensors file. A training checkpoint
compared with anything else stands for its weights and what it carries; two of them are compared whole. Two that agree
on shapes which their config.json contradicts are refused: they would be equal, and no checkpoint of that model.

Invariants (tests assert them): equal checkpoints have no differences, however they are cut into files; every kind of
difference is found and named with its tensor, the first place, and how many numbers differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasao.config.architecture import read_hf_config
from megasao.config.errors import UserError
from megasao.conversion.model_checkpoint import open_model
from megasao.conversion.tasks import Advance, pieces
from megasao.families.names import shape_problem
from megasao.storage.hf_directory import INDEX, SINGLE, checkpoint_files
from megasao.storage.model_parts import CARRIED, WEIGHT
from megasao.storage.reader import TensorFiles

_PIECE = 4 << 20
"""Bytes that are compared at a time; numbers are widened to float64."""


@dataclass(frozen=True)
class Side:
    """One of the two: its tensors by the names that are compared, by stored name, and its config.json if it has one."""

    path: Path
    files: TensorFiles
    stored: dict[str, str]
    hf_config: dict[str, Any] | None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of the names that are compared."""
        return self.files.info(self.stored[name]).shape


@dataclass
class Comparison:
    """What was found. ``differences`` has one line for each tensor that differs."""

    tensors: int = 0
    equal_bytes: int = 0
    differences: list[str] = field(default_factory=list)


def open_sides(a: Path, b: Path) -> tuple[Side, Side]:
    """Open both; nothing but headers is read.

    Raises:
        UserError: one of them is no checkpoint, not a whole one, or of shapes that its config.json contradicts.
    """
    files = [_files(path) for path in (a, b)]
    both_trained = all(is_model for _, is_model, _ in files)
    sides = []
    for path, (opened, is_model, documents) in zip((a, b), files, strict=True):
        names = {name: name for name in opened.names()}
        if is_model and not both_trained:
            names = {
                name.removeprefix(kind): name for name in names for kind in (WEIGHT, CARRIED) if name.startswith(kind)
            }
        sides.append(Side(path, opened, names, _family_config(documents)))
    for side, other in (sides, sides[::-1]):
        if problem := _shape_problem(side, other):
            raise UserError(f"{side.path} {problem}; copy it again, with the config.json that belongs to it")
    return sides[0], sides[1]


def _family_config(documents: Path | None) -> dict[str, Any] | None:
    """config.json, where it is that of a supported model."""
    try:
        return None if documents is None else read_hf_config(documents)
    except ValueError:
        return None


def _shape_problem(side: Side, other: Side) -> str | None:
    """What config.json contradicts of the shapes in which the two agree; other shapes are differences to be listed."""
    shapes = dict[str, tuple[int, ...]]()
    for name in side.stored.keys() & other.stored.keys():
        # Quantisations pack several numbers into one of a whole type.
        packed = not side.files.info(side.stored[name]).dtype.is_floating_point
        if not packed and (shape := side.shape(name)) == other.shape(name):
            shapes[name.removeprefix(WEIGHT).removeprefix(CARRIED)] = shape
    return None if side.hf_config is None else shape_problem(side.hf_config, sorted(shapes.items()))


def _files(path: Path) -> tuple[TensorFiles, bool, Path | None]:
    """The tensors of a checkpoint, whether it is a training checkpoint, and where its config.json would be."""
    try:
        if path.is_file():
            return TensorFiles([path]), False, None
        if any((path / name).is_file() for name in (INDEX, SINGLE, "config.json")):
            return TensorFiles(checkpoint_files(path)), False, path
        if path.is_dir():
            model = open_model(path)
            return model.files, True, model.hf_directory
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
