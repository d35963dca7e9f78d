"""The tensors of a training checkpoint in format torch_dist, under the names that one in safetensors has for them.

Invariants (tests assert them):

- a weight has the bits that a checkpoint in safetensors holds of the same state: those that Adam updates;
- nothing is unpickled without limits (:mod:`megasao.storage.torch_dist`).
"""

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megasao.families import Rule
from megasao.families.names import Role, rules
from megasao.families.sizes import dimensions, explanation
from megasao.storage.header import TensorInfo
from megasao.storage.model_parts import WEIGHT, damage, is_whole
from megasao.storage.reader import TensorFiles
from megasao.storage.torch_dist import METADATA, read_metadata

_MAIN, _MOMENTS = "optimizer.state.fp32_param.", ("exp_avg", "exp_avg_sq")
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class _Source:
    """A Hugging Face tensor as a part of a stored one: ``part`` of the query, key and value rows of each group."""

    key: str
    info: TensorInfo
    sizes: tuple[int, ...] | None = None
    part: int = 0


class TorchDistTensors(TensorFiles):
    """Tensors by name, read lazily: a stored tensor at a time, which is kept until another one is asked for."""

    def __init__(self, directory: Path, manifest: dict[str, Any], hf_config: dict[str, Any]) -> None:
        """ValueError if the description is damaged or refused, or is not of this model."""
        if not is_whole(directory / METADATA):
            raise ValueError(damage(directory / METADATA))
        self.files = [directory / name for name in manifest["parts"]]
        self._directory, self._metadata = directory, read_metadata(directory, manifest["parts"])
        self._sources = {
            source.info.name: source for source in _sources(self._metadata, hf_config, manifest["role"], directory)
        }
        self._last = threading.local()

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._sources)

    def infos(self) -> list[TensorInfo]:
        """All tensors."""
        return [source.info for source in self._sources.values()]

    def info(self, name: str) -> TensorInfo:
        """One tensor's dtype and shape."""
        return self._sources[name].info

    def file(self, name: str) -> Path:
        """The file that says where a tensor is."""
        return self._directory / METADATA

    def read_whole(self, name: str) -> Tensor:
        """A whole tensor."""
        source = self._sources[name]
        tensor = self._stored(source.key)
        if source.sizes is not None:
            groups = tensor.unflatten(0, (-1, sum(source.sizes)))
            tensor = groups.split(source.sizes, dim=1)[source.part].flatten(0, 1)
        # A vocabulary may have rows that only fill it up.
        return tensor[: source.info.shape[0]] if tensor.ndim else tensor

    def read_slice(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        """Entries ``start`` to ``stop`` of one dimension, in a new tensor."""
        return self.read_whole(name).narrow(dimension, start, stop - start).clone()

    def _stored(self, key: str) -> Tensor:
        if getattr(self._last, "key", None) != key:
            self._last.key, self._last.tensor = key, self._read_stored(key)
        tensor: Tensor = self._last.tensor
        return tensor

    def _read_stored(self, key: str) -> Tensor:
        """Put together what the ranks wrote."""
        entry = _entry(self._metadata, key)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            with (self._directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                piece = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
            where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[where] = piece
        return tensor


def _entry(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), "refused when it was read"
    return entry


def _sources(metadata: Metadata, hf_config: dict[str, Any], role: Role, directory: Path) -> Iterator[_Source]:
    stored = metadata.state_dict_metadata
    for rule in (rule for rule in rules(hf_config, role).values() if not rule.copy):
        for index, name in enumerate(rule.hf):
            key = _key(rule, index, stored.keys())
            if key not in stored:
                raise ValueError(f"{directory} lacks the tensor {key}; it is a checkpoint of another model")
            yield _source(
                metadata, WEIGHT + name, _MAIN + key if _MAIN + key in stored else key, rule, index, hf_config
            )
            for moment in _MOMENTS:
                if (state := f"optimizer.state.{moment}.{key}") in stored:
                    yield _source(metadata, f"{moment}:{name}", state, rule, index, hf_config)


def _key(rule: Rule, index: int, stored: Any) -> str:
    """The stored name of the ``index``-th Hugging Face tensor of a rule."""
    key = rule.megatron.replace(".local_experts.", ".experts.")
    for own, fused in _FUSED.items():
        if key.endswith(own) and key not in stored:
            key = key.removesuffix(own) + fused
    return f"{key}_{'wv'[index]}" if rule.kind == "gate_up" else key


def _source(metadata: Metadata, name: str, key: str, rule: Rule, index: int, hf_config: dict[str, Any]) -> _Source:
    """ValueError if the stored tensor has another shape than config.json says."""
    entry, sizes = _entry(metadata, key), None
    parts = [dimensions(shape, hf_config) for shape in rule.shapes]
    stored, expected = tuple(entry.size), parts[index]
    if rule.kind == "qkv":
        sizes = tuple(rows // hf_config["num_key_value_heads"] for rows, *_ in parts)
        expected = (sum(rows for rows, *_ in parts), *expected[1:])
    filled_up = rule.vocabulary and stored[:1] > expected[:1] and stored[1:] == expected[1:]
    if stored != expected and not filled_up:
        why = "; ".join(dict.fromkeys(explanation(shape, hf_config) for shape in rule.shapes))
        raise ValueError(
            f"{key} has the shape {stored}; expected {expected} for {', '.join(rule.hf)} by config.json: {why}"
        )
    return _Source(key, TensorInfo(name, entry.properties.dtype, parts[index]), sizes, index)
