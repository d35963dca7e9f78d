"""Weight versions on disk, from which SGLang servers load them.

A version is a directory of safetensors under Hugging Face names: one file that is written here, or links to those that
the trainer's ranks wrote; or the nodes of the servers have it (``megasao/weights/nodes.py``), and here is its label.
Invariants, asserted by the tests:
- a version is complete when its directory has its name: it is written beside it and renamed;
- names and shapes are exactly those of the checkpoint that is served, without its layers of multi-token prediction
  (they are not trained), in FP8 with the scales of its blocks; a wrong tensor is refused by name, and nothing is
  written;
- at most the committed version and one staged version are kept.
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megasao.config.architecture import read_hf_config
from megasao.conversion.blocks import FP8, scale_shape
from megasao.families.names import SCALE, fp8_names, hf_names
from megasao.rollout.engines.checkpoint_names import check_tensors
from megasao.weights.directory import WeightDirectory
from megasao.weights.nodes import NodeWeights

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": FP8,
}


@dataclass(frozen=True)
class StagedWeights:
    """A complete version. ``label`` names it at the servers: unique, also over restarts of trainer and worker."""

    version: int
    label: str
    path: Path | None
    """Where it is; None: every node of a server has it in its own directory."""


class WeightStaging:
    """Versions below ``directory``, for servers of the checkpoint at ``checkpoint``; ``fp8``: with its products in
    blocks of FP8, as they are where the checkpoint has them so."""

    def __init__(self, directory: Path, checkpoint: Path, *, fp8: bool = False) -> None:
        """Whatever an earlier process left in ``directory`` is removed."""
        self._directory = directory
        self._layout = read_layout(checkpoint, fp8=fp8)
        self.staged: StagedWeights | None = None
        self.committed: StagedWeights | None = None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def stage(self, version: int, tensors: Mapping[str, Any]) -> StagedWeights:
        """Write a version in the checkpoint's dtypes, or link to one that is written; one that was staged before is
        removed. ValueError if wrong."""
        if isinstance(tensors, NodeWeights):
            self.staged = StagedWeights(version, tensors.label, None)
            return self.staged
        check_tensors(tensors, {name: shape for name, (shape, _) in self._layout.items()})
        if self.staged is not None:
            self.discard(self.staged.version)
        label = version_label(version)
        path, unfinished = self._directory / label, self._directory / f".{label}"
        unfinished.mkdir()
        try:
            if isinstance(tensors, WeightDirectory):
                tensors.link_into(unfinished)
            else:
                self._write(tensors, unfinished)
            os.replace(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.staged = StagedWeights(version, label, path)
        return self.staged

    def _write(self, tensors: Mapping[str, Any], directory: Path) -> None:
        whole = {
            name: torch.as_tensor(tensors[name]).to(dtype).contiguous() for name, (_, dtype) in self._layout.items()
        }
        save_file(whole, directory / "model.safetensors")

    def commit(self, staged: StagedWeights) -> None:
        """``staged`` is current: the version before it is not needed any more."""
        if self.committed is not None and self.committed.path is not None:
            shutil.rmtree(self.committed.path, ignore_errors=True)
        self.committed, self.staged = staged, None

    def discard(self, version: int) -> None:
        """Remove the staged version if it is ``version``."""
        if self.staged is not None and self.staged.version == version:
            if self.staged.path is not None:
                shutil.rmtree(self.staged.path, ignore_errors=True)
            self.staged = None


def read_layout(checkpoint: Path, *, fp8: bool = False) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that a trainer of the checkpoint publishes: all but those that it only carries.

    ``fp8``: where products are in blocks of FP8. ValueError if one of them is not there, or has an unknown dtype.
    """
    hf_config = read_hf_config(checkpoint)
    names = hf_names(hf_config, "actor")
    in_blocks = names & fp8_names(hf_config) if fp8 else set()
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(names.intersection(tensors.keys())):
                part = tensors.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{file}: {name} has dtype {part.get_dtype()}; weights are updated in one of {sorted(_DTYPES)}"
                    )
                shape, dtype = tuple(part.get_shape()), FP8 if name in in_blocks else _DTYPES[part.get_dtype()]
                layout[name] = (shape, dtype)
                if dtype == FP8:
                    layout[name + SCALE] = (scale_shape(shape), torch.float32)
    if missing := sorted(names - layout.keys()):
        raise ValueError(f"{checkpoint} lacks {len(missing)} tensors of its model in *.safetensors: {missing[:4]}")
    return layout


def version_label(version: int) -> str:
    """A name that no other life of the trainer or of the worker has given to another set of weights."""
    return f"{version}.{uuid.uuid4().hex[:12]}"


def version_of_label(label: str) -> int:
    """The version in a label; 0 for the name that a server has before its first update."""
    number, dot, _ = label.partition(".")
    return int(number) if dot and number.isdigit() else 0
