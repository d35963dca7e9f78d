"""A Hugging Face checkpoint as the source of a conversion, refused at once if anything about it is wrong."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megasao.config.architecture import read_hf_config
from megasao.config.errors import UserError
from megasao.conversion.blocks import BLOCK, FP8, Block, scale_shape
from megasao.conversion.tasks import Copy, Dequantize, Task
from megasao.families.names import SCALE, Role, name_problem, shape_problem, value_head_names
from megasao.storage.documents import read_object
from megasao.storage.hf_directory import INDEX, checkpoint_files, read_index, side_files
from megasao.storage.model_parts import MANIFEST
from megasao.storage.reader import TensorFiles

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class HfCheckpoint:
    """A checkpoint directory whose files are whole and whose tensors are those of its family.

    Attributes:
        path: the directory.
        hf_config: its config.json, with what transformers takes for settings that are not written.
        files: its tensors.
        block: rows and columns of a block of FP8; None for a checkpoint without.
    """

    path: Path
    hf_config: dict[str, Any]
    files: TensorFiles
    block: Block | None

    @property
    def unquantized_config(self) -> dict[str, Any]:
        """config.json as it is written, without a quantisation: what a conversion hands on."""
        written = read_object(self.path / "config.json")
        return {key: value for key, value in written.items() if key != "quantization_config"}

    @property
    def role(self) -> Role:
        """A critic has a value head."""
        return "critic" if value_head_names() <= self.files.names() else "actor"

    def weights(self) -> list[str]:
        """Names of all tensors but the scales of FP8, in the order of the files."""
        return [info.name for info in self.files.infos() if not self._is_scale(info.name)]

    def plain(self, name: str, output: str) -> Task:
        """The task that gives a weight as ``output``, as it is, or in bfloat16 if it is in FP8."""
        info = replace(self.files.info(name), name=output)
        if info.dtype != FP8:
            return Copy(self.files, name, info)
        assert self.block is not None
        return Dequantize(self.files, name, self.block, replace(info, dtype=torch.bfloat16))

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self.files.names()


def open_hf(path: Path) -> HfCheckpoint:
    """Open a checkpoint and check all that can be checked without reading a tensor, but for the scales of FP8.

    Raises:
        UserError: no such directory; a family or a quantisation that is not supported; a file missing, truncated or
            other than the index says; a tensor missing, unknown, or of a shape or dtype that does not belong; a scale
            that is no number.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give a Hugging Face checkpoint directory (nothing is downloaded)")
    if (path / MANIFEST).is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"{path} is a training checkpoint, not a Hugging Face directory; megatron-to-hf makes one of it"
        )
    try:
        hf_config = read_hf_config(path)
        files = TensorFiles(checkpoint_files(path))
        index = read_index(path)
    except ValueError as error:
        raise UserError(str(error)) from error
    checkpoint = HfCheckpoint(path, hf_config, files, _block(path, hf_config))
    problem = (
        _index_problem(index, files)
        or _scale_problem(checkpoint)
        or name_problem(hf_config, checkpoint.role, set(checkpoint.weights()))
        or _dtype_problem(checkpoint)
        or shape_problem(hf_config, ((name, files.info(name).shape) for name in checkpoint.weights()))
        or _unusable_scale(checkpoint)
        or _side_problem(path)
    )
    if problem:
        raise UserError(f"{path} {problem}; copy it again, with the config.json that belongs to it")
    return checkpoint


def _block(path: Path, hf_config: dict[str, Any]) -> Block | None:
    quantization = hf_config.get("quantization_config")
    if quantization is None:
        return None
    settings = quantization if isinstance(quantization, dict) else {}
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    match block:
        case [int(rows), int(columns)] if method == "fp8" and min(rows, columns) > 0 and bool not in map(type, block):
            return rows, columns
    raise UserError(
        f"{path / 'config.json'}: quantization_config has quant_method = {method!r} and weight_block_size = {block!r}; "
        f"expected 'fp8' in blocks such as {list(BLOCK)}: take that version of the checkpoint, or the one in bfloat16"
    )


def _index_problem(index: dict[str, str] | None, files: TensorFiles) -> str | None:
    if index is None:
        return None
    for name, file in sorted(index.items()):
        if name not in files.names():
            return f"lacks the tensor {name}, which {INDEX} has in {file}"
        if (found := files.file(name).name) != Path(file).name:
            return f"has the tensor {name} in {found}, not in {file} as {INDEX} says"
    unlisted = sorted(files.names() - index.keys())
    return f"has the tensor {unlisted[0]}, which {INDEX} does not list" if unlisted else None


def _scale_problem(checkpoint: HfCheckpoint) -> str | None:
    """FP8 without scales, or scales that do not fit."""
    if checkpoint.block is not None and all(info.dtype != FP8 for info in checkpoint.files.infos()):
        return "has no tensor in FP8, but config.json has quantization_config"
    for info in checkpoint.files.infos():
        if info.dtype != FP8:
            continue
        if checkpoint.block is None:
            return f"has {info.name} in FP8, but config.json has no quantization_config"
        scale = info.name + SCALE
        if scale not in checkpoint.files.names():
            return f"has {info.name} in FP8 without its {scale}"
        if len(info.shape) != 2:
            return f"has {info.name} in FP8 of shape {info.shape}; only matrices have blocks"
        expected, found = scale_shape(info.shape, checkpoint.block), checkpoint.files.info(scale).shape
        if found != expected:
            return f"has {scale} of shape {found}; {info.shape} in blocks of {checkpoint.block} needs {expected}"
    return None


def _unusable_scale(checkpoint: HfCheckpoint) -> str | None:
    """A scale that makes its whole block infinite or NaN."""
    for name in sorted(checkpoint.files.names() - set(checkpoint.weights())):
        if not torch.isfinite(checkpoint.files.read_whole(name)).all():
            return f"has a scale in {name} that is infinite or NaN"
    return None


def _side_problem(path: Path) -> str | None:
    """A tokenizer or the like that could not be copied when all else is done."""
    for file in side_files(path):
        if not os.access(file, os.R_OK):
            return f"has {file.name}, which cannot be read"
    return None


def _dtype_problem(checkpoint: HfCheckpoint) -> str | None:
    """Numbers that are no weights. Whether FP8 has its scales is seen elsewhere."""
    for info in checkpoint.files.infos():
        if info.dtype not in (*_DTYPES, FP8):
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            found = str(info.dtype).removeprefix("torch.")
            return f"has {info.name} in {found}; expected {expected}, or float8_e4m3fn in blocks"
    return None
