"""Hugging Face checkpoint names against the parameters of a live transformers model.

A checkpoint names every expert's matrices; transformers holds all experts of a layer in two fused tensors. Weight
updates carry checkpoint names, so they are fused here.

Invariants, asserted by the tests:
- the names are exactly those of a saved checkpoint (a tied output matrix has none of its own);
- a missing, extra or misshapen tensor is refused by name, and then nothing is changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megasao.storage.header import TensorInfo
from megasao.weights.directory import WeightDirectory
from megasao.weights.shared import ShareTensors


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, and where it lies in the live parameter."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...]


class CheckpointLayout:
    """How live parameters (and persistent buffers) are assembled from checkpoint tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.live = _live_tensors(model)
        self.pieces = {name: _pieces(name, tensor) for name, tensor in self.live.items()}
        self.shapes = {piece.name: piece.shape for pieces in self.pieces.values() for piece in pieces}

    def check(self, tensors: Mapping[str, Any]) -> None:
        """ValueError naming what is missing, extra or misshapen."""
        check_tensors(tensors, self.shapes)

    def assemble(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Live-shaped copies, in the live dtypes, of a complete set of checkpoint tensors (see ``check``)."""
        self.check(tensors)
        result = {}
        for name, live in self.live.items():
            assembled = torch.empty_like(live, requires_grad=False)
            for piece in self.pieces[name]:
                assembled[piece.index].copy_(torch.as_tensor(tensors[piece.name]))
            result[name] = assembled
        return result


def check_tensors(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError naming what of ``shapes`` is missing in ``tensors``, extra, misshapen, or no float."""
    if isinstance(tensors, WeightDirectory | ShareTensors):
        tensors = tensors.infos
    missing = sorted(shapes.keys() - tensors.keys())
    extra = sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        raise ValueError(
            f"weights do not fit the model: {len(missing)} tensors missing {missing[:4]}, "
            f"{len(extra)} not in the model {extra[:4]}; send exactly the names of its Hugging Face checkpoint"
        )
    for name, expected in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != expected:
            raise ValueError(f"weights do not fit the model: {name} has shape {tuple(tensor.shape)}, not {expected}")
        dtype = tensor.dtype if isinstance(tensor, TensorInfo) else torch.as_tensor(tensor).dtype
        if not dtype.is_floating_point:
            raise ValueError(f"weights do not fit the model: {name} has dtype {dtype}, not a float one")


def _live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (a tied one once) and persistent buffers, detached."""
    saved = model.state_dict().keys()
    live = {name: tensor.detach() for name, tensor in model.named_parameters()}
    live.update({name: tensor for name, tensor in model.named_buffers() if name in saved})
    return live


def _pieces(name: str, tensor: torch.Tensor) -> list[Piece]:
    prefix, _, leaf = name.rpartition(".")
    if prefix.endswith(".experts") and leaf == "gate_up_proj":
        count, double, hidden = tensor.shape
        width = double // 2
        return [
            Piece(f"{prefix}.{expert}.{half}_proj.weight", (width, hidden), (expert, part))
            for expert in range(count)
            for half, part in (("gate", slice(0, width)), ("up", slice(width, double)))
        ]
    if prefix.endswith(".experts") and leaf == "down_proj":
        return [
            Piece(f"{prefix}.{expert}.down_proj.weight", tuple(tensor.shape[1:]), (expert,))
            for expert in range(tensor.shape[0])
        ]
    return [Piece(name, tuple(tensor.shape), (slice(None),) if tensor.ndim else ())]
