"""A Hugging Face checkpoint as a model checkpoint of the trainer: parts with sums, which any layout loads."""

import shutil
from pathlib import Path

from megasao.conversion.hf import HfCheckpoint, open_hf
from megasao.conversion.model_checkpoint import HF_DIRECTORY
from megasao.conversion.output import Output, OutputFile, split
from megasao.families.names import hf_names
from megasao.storage.hf_directory import copy_side_files
from megasao.storage.model_parts import CARRIED, MANIFEST, WEIGHT, manifest_of, part_name, write_json, write_sum

PART_BYTES = 5_000_000_000


def hf_to_model(source: Path, out: Path, *, part_bytes: int = PART_BYTES) -> Output:
    """Every tensor of the checkpoint at ``source``; weights in FP8 become bfloat16. With a value head it is a critic's.

    Raises:
        UserError: see :func:`open_hf`.
    """
    hf = open_hf(source)
    trained = hf_names(hf.hf_config, hf.role)
    tasks = [hf.plain(name, (WEIGHT if name in trained else CARRIED) + name) for name in hf.weights()]
    files = [OutputFile(part_name(number), group) for number, group in enumerate(split(tasks, part_bytes))]

    def write_documents(directory: Path) -> None:
        _write_hf_documents(hf, directory / HF_DIRECTORY)
        write_json(directory / MANIFEST, manifest_of(hf.role, 0, [file.name for file in files]))

    return Output(out, files, hf.files.files, "to_megatron", write_documents, finished_file=write_sum)


def _write_hf_documents(hf: HfCheckpoint, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    copy_side_files(hf.path, directory)
    write_json(directory / "config.json", hf.unquantized_config)
