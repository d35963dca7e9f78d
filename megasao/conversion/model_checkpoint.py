"""A model's training checkpoint as the source of a conversion."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasao.config.architecture import read_hf_config
from megasao.config.errors import UserError
from megasao.conversion.hf import HfCheckpoint
from megasao.conversion.torch_dist import TorchDistTensors
from megasao.families.names import Role, name_problem, shape_problem
from megasao.storage import torch_dist
from megasao.storage.header import TensorInfo
from megasao.storage.model_parts import CARRIED, FORMAT, MANIFEST, WEIGHT, read_manifest, sum_file
from megasao.storage.reader import TensorFiles

HF_DIRECTORY = "hf"
"""Where a checkpoint that was converted keeps config.json and the tokenizer."""


@dataclass(frozen=True)
class ModelCheckpoint:
    """A model's checkpoint whose parts are all there.

    Attributes:
        path: the directory with the manifest.
        role: actor or critic.
        files: its tensors, under their stored names.
    """

    path: Path
    role: Role
    files: TensorFiles

    def weights(self) -> list[str]:
        """Hugging Face names of the weights, in the order of the files."""
        return self._names(WEIGHT)

    def carried(self) -> list[str]:
        """Names of tensors that are not part of the model."""
        return self._names(CARRIED)

    def _names(self, kind: str) -> list[str]:
        return [info.name.removeprefix(kind) for info in self.files.infos() if info.name.startswith(kind)]

    def stored(self, name: str) -> str:
        """The stored name of a weight, or of a tensor that is carried."""
        return WEIGHT + name if WEIGHT + name in self.files.names() else CARRIED + name

    def info(self, name: str) -> TensorInfo:
        """Its dtype and shape."""
        return self.files.info(self.stored(name))

    @property
    def hf_directory(self) -> Path | None:
        """Where config.json and tokenizer are, if the checkpoint has its own."""
        directory = self.path / HF_DIRECTORY
        return directory if (directory / "config.json").is_file() else None

    def problem(self, hf_config: dict[str, Any], names: Sequence[str]) -> str | None:
        """Why the tensors ``names`` are not those of a model with this config.json; None if they are."""
        return name_problem(hf_config, self.role, set(names)) or shape_problem(
            hf_config, ((name, self.info(name).shape) for name in names)
        )

    def check_against(self, origin: HfCheckpoint) -> None:
        """UserError if this is not a checkpoint of the model at ``origin``."""
        if problem := self.problem(origin.hf_config, self.weights()):
            raise UserError(f"{self.path} is not a checkpoint of {origin.path}: it {problem}")


def model_of_run(checkpoint: Path) -> Path:
    """The model that the run around a checkpoint was started with.

    Raises:
        UserError: there is no such run.
    """
    from megasao.config.load import load_config

    for directory in checkpoint.absolute().parents[:3]:
        if (directory / "config.yaml").is_file():
            return Path(load_config(directory / "config.yaml").model.path)
    raise UserError(
        f"{checkpoint} is in no run directory; say with --model which Hugging Face directory it was trained from"
    )


def open_model(path: Path, model: Path | None = None) -> ModelCheckpoint:
    """Open a model's checkpoint, the actor's of a run's checkpoint, or the actor's of a run's latest checkpoint.

    Args:
        path: where it is.
        model: the Hugging Face directory that it was trained from, which tells one in format torch_dist what its
            tensors are called there; None where the run around it says which.

    Raises:
        UserError: there is none, or it is not complete.
    """
    directory = _model_directory(path)
    try:
        manifest = read_manifest(directory, FORMAT, torch_dist.FORMAT)
        parts = [directory / name for name in manifest["parts"]]
        for part in parts:
            if not sum_file(part).is_file():
                raise UserError(f"{directory} is not a complete model checkpoint: {sum_file(part).name} is missing")
        if manifest["format"] == torch_dist.FORMAT:
            hf_config = read_hf_config(model or model_of_run(directory))
            return ModelCheckpoint(directory, manifest["role"], TorchDistTensors(directory, manifest, hf_config))
        return ModelCheckpoint(directory, manifest["role"], TensorFiles(parts))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(str(error)) from error


def _model_directory(path: Path) -> Path:
    latest = path / "checkpoints" / "latest"
    if latest.is_file():
        path = path / "checkpoints" / latest.read_text(encoding="utf-8", errors="replace").strip()
    if (path / MANIFEST).is_file():
        if path.parent.name.startswith("step_"):
            _check_complete(path.parent)
        return path
    if (path / "actor").is_dir():
        _check_complete(path)
        return path / "actor"
    if (path / "config.json").is_file():
        raise UserError(
            f"{path} is a Hugging Face directory, not a training checkpoint; hf-to-megatron makes one of it"
        )
    raise UserError(
        f"{path} is not a training checkpoint: it has neither {MANIFEST} nor a directory actor, nor is it a run with "
        "checkpoints/latest; give the directory of one of these"
    )


def _check_complete(step: Path) -> None:
    if not (step / "COMPLETE").is_file():
        raise UserError(f"{step} was not completed (no file COMPLETE); take an older checkpoint")
