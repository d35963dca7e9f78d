"""Writing a Hugging Face checkpoint: shards of bounded size, their index, config.json, tokenizer; in FP8 or not."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megasao.config.architecture import read_hf_config
from megasao.config.errors import UserError
from megasao.conversion.blocks import BLOCK, FP8
from megasao.conversion.hf import HfCheckpoint, open_hf
from megasao.conversion.model_checkpoint import ModelCheckpoint, model_of_run, open_model
from megasao.conversion.output import Output, OutputFile, split
from megasao.conversion.tasks import Copy, Quantize, Task
from megasao.families.names import carried_names, fp8_names, optional_names
from megasao.storage.documents import read_object
from megasao.storage.hf_directory import INDEX, copy_side_files, file_names, index_of

SHARD_BYTES = 5_000_000_000
"""Most bytes of a file, unless a single tensor has more."""


def quantized(source: Path, out: Path, *, shard_bytes: int = SHARD_BYTES) -> Output:
    """The checkpoint at ``source`` with its products in blocks of FP8; which ones, the family's rules say.

    Raises:
        UserError: see :func:`open_hf`; or it is in FP8 already.
    """
    hf = open_hf(source)
    if hf.block is not None:
        raise UserError(f"{source} is in FP8 already; --dequantize makes it bfloat16")
    names = fp8_names(hf.hf_config)
    tasks = [Quantize(hf.files, name) if name in names else hf.plain(name, name) for name in hf.weights()]
    config = quantized_config(hf)
    return hf_output(out, tasks, config, hf.path, kind="fp8_block", sources=hf.files.files, shard_bytes=shard_bytes)


def dequantized(source: Path, out: Path, *, shard_bytes: int = SHARD_BYTES) -> Output:
    """The checkpoint at ``source``, which is in FP8, in bfloat16.

    Raises:
        UserError: see :func:`open_hf`; or it is not in FP8.
    """
    hf = open_hf(source)
    if hf.block is None:
        raise UserError(f"{source} is not in FP8: config.json has no quantization_config")
    tasks = [hf.plain(name, name) for name in hf.weights()]
    config = hf.unquantized_config
    return hf_output(out, tasks, config, hf.path, kind="dequantize", sources=hf.files.files, shard_bytes=shard_bytes)


def model_to_hf(checkpoint: Path, model: Path | None, out: Path, *, shard_bytes: int = SHARD_BYTES) -> Output:
    """The weights of a training checkpoint, in the dtypes of the Hugging Face checkpoint that it was trained from.

    Args:
        checkpoint: a model's checkpoint, one of a run, or a run, of which the actor's latest is taken.
        model: that Hugging Face directory; None where the checkpoint or its run says which.

    Raises:
        UserError: either is incomplete, damaged or of another model.
    """
    trained = open_model(checkpoint, model)
    if trained.hf_directory is not None and model is None:
        return _converted_to_hf(trained, trained.hf_directory, out, shard_bytes)
    origin = open_hf(model or model_of_run(trained.path))
    trained.check_against(origin)
    tasks: list[Task] = []
    for name in trained.weights():
        info = replace(trained.info(name), name=name, dtype=_dtype(name, trained, origin))
        tasks.append(Copy(trained.files, trained.stored(name), info))
    if trained.role == "actor":
        carried = carried_names(origin.hf_config) | optional_names(origin.hf_config)
        tasks += [origin.plain(name, name) for name in origin.weights() if name in carried]
    config, sources = origin.unquantized_config, [*trained.files.files, *origin.files.files]
    output = hf_output(out, tasks, config, origin.path, kind="to_hf", sources=sources, shard_bytes=shard_bytes)
    return replace(output, summed=trained.files.files)


def _converted_to_hf(trained: ModelCheckpoint, documents: Path, out: Path, shard_bytes: int) -> Output:
    """Back again what was converted: all that is stored, bit for bit."""
    try:
        hf_config, config = read_hf_config(documents), read_object(documents / "config.json")
    except ValueError as error:
        raise UserError(str(error)) from error
    names = [*trained.weights(), *trained.carried()]
    if problem := trained.problem(hf_config, names):
        raise UserError(f"{trained.path} {problem}; convert the Hugging Face directory again")
    tasks = [Copy(trained.files, trained.stored(name), replace(trained.info(name), name=name)) for name in names]
    sources = trained.files.files
    output = hf_output(out, tasks, config, documents, kind="to_hf", sources=sources, shard_bytes=shard_bytes)
    return replace(output, summed=sources)


def _dtype(name: str, trained: ModelCheckpoint, origin: HfCheckpoint) -> torch.dtype:
    """The origin's; a value head, which it has not, is as it was trained."""
    if name not in origin.files.names():
        return trained.info(name).dtype
    dtype = origin.files.info(name).dtype
    return torch.bfloat16 if dtype == FP8 else dtype


def hf_output(
    out: Path,
    tasks: Sequence[Task],
    config: dict[str, Any],
    documents: Path,
    *,
    kind: str,
    sources: Sequence[Path],
    shard_bytes: int,
) -> Output:
    """The directory that ``tasks`` make, with ``config`` and the side files of ``documents``."""
    groups = split(tasks, shard_bytes)
    files = [OutputFile(name, group) for name, group in zip(file_names(len(groups)), groups, strict=True)]

    def write_documents(directory: Path) -> None:
        copy_side_files(documents, directory)
        _write_json(directory / "config.json", config)
        if len(files) > 1:
            _write_json(directory / INDEX, _index(files))

    # config.json decides what is made of a tensor, and is not among the files whose change is seen by itself.
    kind = f"{kind} {json.dumps(config, sort_keys=True)}"
    return Output(out, files, sources, kind, write_documents)


def kept_matrices(hf: HfCheckpoint) -> list[str]:
    """Matrices that are not put into FP8."""
    quantized_names = fp8_names(hf.hf_config)
    return [name for name in hf.weights() if name not in quantized_names and len(hf.files.info(name).shape) == 2]


def _index(files: Sequence[OutputFile]) -> dict[str, Any]:
    places = {info.name: file.name for file in files for info in file.infos}
    size = sum(info.nbytes for file in files for info in file.infos)
    return index_of(places, size)


def quantized_config(hf: HfCheckpoint) -> dict[str, Any]:
    """config.json of the checkpoint with its products in blocks of FP8."""
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept_matrices(hf)),
    }
    return hf.unquantized_config | {"quantization_config": settings}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
