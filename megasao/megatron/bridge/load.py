"""Reading a Hugging Face checkpoint into Megatron parameters: every rank reads only its slices."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megasao.families import Rule
from megasao.families.names import name_problem, shape_problem
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import merge
from megasao.megatron.bridge.table import VALUE_HEAD
from megasao.storage.hf_directory import checkpoint_files
from megasao.storage.reader import TensorFiles

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


def load_hf(model: "MegatronModel", path: Path) -> None:
    """Fill the model's parameters from the checkpoint at ``path``; a critic's value head is left as it is.

    Raises:
        ValueError: a tensor is missing, left over, or has another shape; the message names it and the nearest name.
    """
    files = TensorFiles(checkpoint_files(path))
    check_tensors(model, files, path)
    for local in local_parameters(model):
        if local.rule in VALUE_HEAD:
            continue
        parts = [read_part(files, name, local) for name in local.rule.hf]
        assign(local.parameter, merge(local.rule, parts, model.hf_config), local.rule)


def read_part(files: TensorFiles, name: str, local: LocalParameter) -> Tensor:
    """The part of a tensor that ``local`` is made of: one of equal shards; rows of a vocabulary are filled up."""
    dimension, shards = local.rule.shard, local.shards
    if dimension is None or shards == 1:
        return files.read_whole(name)
    size = files.info(name).shape[dimension]
    if size % shards and not local.rule.vocabulary:
        raise ValueError(f"{name}: dimension {dimension} has {size} entries, not a multiple of {shards} shards")
    each = -(-size // shards)
    tensor = files.read_slice(name, dimension, min(local.shard * each, size), min((local.shard + 1) * each, size))
    missing = each - tensor.shape[dimension]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def check_tensors(model: "MegatronModel", files: TensorFiles, path: Path) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model, or whose shapes are others."""
    shapes = ((info.name, info.shape) for info in files.infos())
    problem = name_problem(model.hf_config, model.role, files.names()) or shape_problem(model.hf_config, shapes)
    if problem is not None:
        raise ValueError(f"{path} {problem}")


def assign(parameter: Tensor, value: Tensor, rule: Rule) -> None:
    """Copy ``value`` into ``parameter``; shapes must agree."""
    check_shape(parameter, value, rule)
    with torch.no_grad():
        parameter.copy_(value)


def check_shape(parameter: Tensor, value: Tensor, rule: Rule) -> None:
    """ValueError, with the tensors' names, if ``value`` has another shape than ``parameter``."""
    if parameter.shape != value.shape:
        raise ValueError(
            f"{', '.join(rule.hf)} give shape {tuple(value.shape)}, but {rule.megatron} has {tuple(parameter.shape)}; "
            "config.json does not describe these weights"
        )
