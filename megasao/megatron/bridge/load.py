"""Reading a Hugging Face checkpoint into Megatron parameters: every rank reads only its slices."""

import difflib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasao.families import Rule
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import merge
from megasao.megatron.bridge.table import LM_HEAD, VALUE_HEAD, carried_names, hf_names, optional_names

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


class TensorFiles:
    """Tensors by name over several safetensors files, read lazily and in slices. A context manager.

    ValueError names a file that cannot be read.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for path in files:
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._files)

    def read_whole(self, name: str) -> Tensor:
        """A whole tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def read(self, name: str, local: LocalParameter) -> Tensor:
        """The part of a tensor that ``local`` is made of: one of equal shards; rows of a vocabulary are filled up."""
        lazy, dimension, shards = self._files[name].get_slice(name), local.rule.shard, local.shards
        if dimension is None or shards == 1:
            return self.read_whole(name)
        size = lazy.get_shape()[dimension]
        if size % shards and not local.rule.vocabulary:
            raise ValueError(f"{name}: dimension {dimension} has {size} entries, not a multiple of {shards} shards")
        each = -(-size // shards)
        part = slice(min(local.shard * each, size), min((local.shard + 1) * each, size))
        tensor: Tensor = lazy[part] if dimension == 0 else lazy[:, part]
        missing = each - tensor.shape[dimension]
        return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def load_hf(model: "MegatronModel", path: Path) -> None:
    """Fill the model's parameters from the checkpoint at ``path``; a critic's value head is left as it is.

    Raises:
        ValueError: a tensor is missing, left over, or has another shape; the message names it and the nearest name.
    """
    with TensorFiles(checkpoint_files(path)) as files:
        check_names(model, files.names(), path)
        for local in local_parameters(model):
            if local.rule in VALUE_HEAD:
                continue
            parts = [files.read(name, local) for name in local.rule.hf]
            assign(local.parameter, merge(local.rule, parts, model.hf_config), local.rule)


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory: those of its index, or the single one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} is not a complete Hugging Face checkpoint: {', '.join(absent)} is missing")
    return [path / name for name in names]


def check_names(model: "MegatronModel", found: set[str], path: Path) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model.

    A critic ignores ``lm_head``. Layers of multi-token prediction are there whole or not at all.
    """
    expected, carried = hf_names(model.hf_config, model.role), carried_names(model.hf_config)
    if model.role == "critic":
        expected -= {name for rule in VALUE_HEAD for name in rule.hf}
    if carried & found:
        expected |= carried
    tolerated = optional_names(model.hf_config)
    if model.role == "critic" or model.hf_config.get("tie_word_embeddings"):
        tolerated |= set(LM_HEAD.hf)
    missing, extra = sorted(expected - found), sorted(found - expected - tolerated)
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensor(s), first {missing[0]}{_nearest(missing[0], extra or found)}"
        )
    if extra:
        raise ValueError(f"{path} has {len(extra)} unknown tensor(s), first {extra[0]}{_nearest(extra[0], expected)}")


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (nearest: {close[0]})" if close else ""


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
