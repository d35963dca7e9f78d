"""No file of a checkpoint in format torch_dist runs code when it is read."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megasao.storage.torch_dist import COMMON, METADATA, check_common, read_metadata

PARTS = ["__0_0.distcp"]


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.victim),)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What torch itself writes."""
    path = tmp_path / "checkpoint"
    checkpoint.save({"weight": torch.ones(3, 2), "half": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=path)
    torch.save({"step": 3}, path / COMMON)
    return path


def rewrite(directory: Path, change: Callable[[Metadata], Any]) -> None:
    file = directory / METADATA
    file.write_bytes(pickle.dumps(change(pickle.loads(file.read_bytes()))))


def test_a_description_of_tensors_is_read(directory: Path) -> None:
    rewrite(directory, lambda metadata: replace(metadata, storage_meta=None, planner_data=None))
    metadata = read_metadata(directory, PARTS)
    assert metadata.state_dict_metadata["weight"].size == torch.Size([3, 2])
    assert metadata.state_dict_metadata["half"].properties.dtype == torch.bfloat16
    check_common(directory)


def test_code_in_the_metadata_is_refused_and_does_not_run(directory: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    rewrite(directory, lambda metadata: replace(metadata, planner_data=Evil(victim), storage_meta=None))
    with pytest.raises(ValueError, match=r"\.metadata is refused: it names posix\.mkdir"):
        read_metadata(directory, PARTS)
    assert not victim.exists()
    # Control: an ordinary load runs it.
    pickle.loads((directory / METADATA).read_bytes())
    assert victim.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.serialization.load", "os.system"])
def test_no_other_name_is_looked_up(directory: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (directory / METADATA).write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(ValueError, match=f"it names {name}"):
        read_metadata(directory, PARTS)


def test_code_in_the_common_part_is_refused_and_does_not_run(directory: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    torch.save({"step": Evil(victim)}, directory / COMMON)
    with pytest.raises(ValueError, match=r"common\.pt is refused"):
        check_common(directory)
    assert not victim.exists()
    torch.load(directory / COMMON, weights_only=False)
    assert victim.exists()


def _object(metadata: Metadata) -> Metadata:
    metadata.state_dict_metadata["weight"] = BytesStorageMetadata()
    return metadata


def _elsewhere(metadata: Metadata) -> Metadata:
    for place in metadata.storage_data.values():
        place.relative_path = "../other/__0_0.distcp"
    return metadata


def _transformed(metadata: Metadata) -> Metadata:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]
    return metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_object, "BytesStorageMetadata"),
        (_elsewhere, "not in one of the checkpoint's files"),
        (_transformed, "transformed"),
        (lambda metadata: {"weight": 1}, "holds a dict"),
        (lambda metadata: replace(metadata, storage_data=None), "lacks the tensors or their places"),
    ],
    ids=["object", "elsewhere", "transformed", "dict", "no places"],
)
def test_what_is_no_plain_tensor_of_the_checkpoint_is_refused(
    directory: Path, change: Callable[[Metadata], Any], message: str
) -> None:
    def changed(metadata: Metadata) -> Any:
        return change(replace(metadata, storage_meta=None, planner_data=None))

    rewrite(directory, changed)
    with pytest.raises(ValueError, match=message):
        read_metadata(directory, PARTS)


def test_a_file_that_is_no_pickle_is_refused_by_name(directory: Path) -> None:
    (directory / METADATA).write_bytes(b"\x80\x04nonsense")
    with pytest.raises(ValueError, match=r"\.metadata is refused"):
        read_metadata(directory, PARTS)
