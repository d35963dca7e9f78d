"""What a checkpoint in Megatron-Core's torch_dist format consists of, read so that no file of it can run code.

Two of its files are pickles: ``.metadata``, which says where each tensor is, and ``common.pt``. Invariants (tests
assert them):

- from ``.metadata`` nothing can be named but the few classes of torch that describe tensors, and the dtypes;
- objects (which torch would unpickle without limits), files outside the checkpoint's parts, and transformed bytes are
  refused;
- ``common.pt`` is read by torch's ``weights_only`` loader, as are the tensors themselves.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

FORMAT = "megasao-torch-dist-1"
METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
DESCRIPTIONS = (METADATA, COMMON, CONFIG)
"""What one rank writes when all others have written their tensors."""

_ALLOWED = {
    **{
        (kind.__module__, kind.__name__): kind
        for kind in (
            described.Metadata,
            described.MetadataIndex,
            described.TensorStorageMetadata,
            described.TensorProperties,
            described.ChunkStorageMetadata,
            described.StorageMeta,
            described._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


def data_file(rank: int) -> str:
    """Name of the file with the tensors that a rank writes."""
    return f"__{rank}_0.distcp"


class _Restricted(pickle.Unpickler):
    """Knows the classes that describe tensors, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; UnpicklingError for all others."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")
        return found


def read_metadata(directory: Path, parts: list[str]) -> Metadata:
    """Where each tensor is. Compare checksums before.

    Args:
        directory: the checkpoint.
        parts: names of its files: tensors are in these, and nowhere else.

    Raises:
        ValueError: the file is not such a description; the message names it, and what is wrong in it.
    """
    file = directory / METADATA
    try:
        metadata = _Restricted(io.BytesIO(file.read_bytes())).load()
    except OSError:
        raise
    except Exception as error:  # a pickle can fail in any way; all mean that this is none of ours
        raise ValueError(f"{file} is refused: {error}") from error
    if (problem := _problem(metadata, parts)) is not None:
        raise ValueError(f"{file} is refused: {problem}")
    assert isinstance(metadata, Metadata)
    return metadata


def _problem(metadata: Any, parts: list[str]) -> str | None:
    if type(metadata) is not Metadata:
        return f"it holds a {type(metadata).__name__}, not a description of tensors"
    if type(metadata.state_dict_metadata) is not dict or type(metadata.storage_data) is not dict:
        return "it lacks the tensors or their places"
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            return f"{name} is not a tensor"
    for index, place in metadata.storage_data.items():
        if type(place) is not filesystem._StorageInfo or place.relative_path not in parts:
            return f"{index} is not in one of the checkpoint's files"
        if place.transform_descriptors:
            return f"{index} is compressed or transformed, which is not supported"
    return None


def check_common(directory: Path) -> None:
    """ValueError if ``common.pt`` holds anything but plain data."""
    file = directory / COMMON
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{file} is refused: {str(error).splitlines()[0]}") from error
