"""The model as a Hugging Face checkpoint directory, which all ranks write, each its share.

Invariants, asserted by the tests:
- nothing is gathered on one rank: beyond its weights a rank holds a bucket, or one tensor of multi-token prediction;
- the directory has every tensor of the model once, and those that the source has besides, bit for bit;
- it appears at once, whole; a rank that cannot write its share ends this on every rank, and nothing appears.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from megasao.families.names import published_names
from megasao.megatron.bridge.outgoing import Rows, outgoing, stream_rows
from megasao.megatron.bridge.table import carried_names, optional_names
from megasao.megatron.runtime import gather_counts
from megasao.storage.atomic import replace_directory, sync
from megasao.storage.header import TensorInfo
from megasao.storage.hf_directory import INDEX, checkpoint_files, copy_side_files, file_names, index_of
from megasao.storage.model_parts import write_json
from megasao.storage.reader import TensorFiles
from megasao.weights.directory import collect_shares, write_share
from megasao.weights.shares import spread

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel

SHARD_BYTES = 5 * 10**9
BUCKET_BYTES = 64 * 2**20


def save_hf(model: "MegatronModel", source_dir: Path, out_dir: Path) -> None:
    """Write the model as a Hugging Face checkpoint directory. Collective; on return it is complete for all ranks.

    config.json, tokenizer, generation settings and layers of multi-token prediction come from ``source_dir``. The
    directory appears at once (written beside its place, then renamed) and ends with an empty file ``COMPLETE``; an
    older one is replaced. All ranks must see its place. RuntimeError if one of them cannot write.
    """
    first, temporary = distributed.get_rank() == 0, out_dir.with_name(f".{out_dir.name}.tmp")
    carried = _Carried()
    agree(temporary, attempt(carried.find, model, source_dir))
    agree(temporary, attempt(_begin, temporary) if first else None)
    shares = outgoing(model)
    infos = [info for share in shares if share.mine for info in share.infos] + carried.mine
    rows = chain(stream_rows(model, shares, BUCKET_BYTES), carried.rows())
    agree(temporary, attempt(_write, temporary, infos, rows))
    names = published_names(model.hf_config, model.role, fp8=False) | carried.names
    agree(temporary, attempt(_complete, temporary, out_dir, source_dir, names, _dtype(model)) if first else None)


def attempt(work: Callable[..., None], *arguments: Any) -> Exception | None:
    """Do the work; what went wrong."""
    try:
        work(*arguments)
    except (OSError, ValueError) as error:
        return error
    return None


def agree(path: Path, error: Exception | None) -> None:
    """RuntimeError on every rank, and nothing is left of ``path``, if one rank has an error. Collective."""
    failed = [rank for rank, lost in enumerate(gather_counts(error is not None)) if lost]
    if not failed:
        return
    if distributed.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    rank = failed[0] if error is None else distributed.get_rank()
    reason = error or "its own message says why"
    raise RuntimeError(f"rank {rank} could not write weights to {path}: {reason}") from error


class _Carried:
    """The tensors of the source that are not part of the model here: ``mine`` are those that this rank copies."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.mine: list[TensorInfo] = []

    def find(self, model: "MegatronModel", source_dir: Path) -> None:
        """What a policy's source has of them. OSError or ValueError, on a rank that cannot read the source."""
        if model.role != "actor":
            return
        self._files = TensorFiles(checkpoint_files(source_dir))
        self.names = (carried_names(model.hf_config) | optional_names(model.hf_config)) & self._files.names()
        infos = [self._files.info(name) for name in sorted(self.names)]
        writers = spread([info.nbytes for info in infos], distributed.get_world_size())
        rank = distributed.get_rank()
        self.mine = [info for info, writer in zip(infos, writers, strict=True) if writer == rank]

    def rows(self) -> Iterator[Rows]:
        """Each whole, read when it is asked for."""
        for info in self.mine:
            yield Rows(info.name, 0, self._files.read_whole(info.name))


def _begin(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _write(temporary: Path, infos: Sequence[TensorInfo], rows: Iterator[Rows]) -> None:
    write_share(temporary, distributed.get_rank(), infos, rows, shard_bytes=SHARD_BYTES)


def _complete(temporary: Path, out_dir: Path, source_dir: Path, names: set[str], dtype: str) -> None:
    """Put the shares together, and the directory in its place. ValueError if they are not ``names``."""
    files = collect_shares(temporary, distributed.get_world_size(), names)
    places: dict[str, str] = {}
    for name, file in zip(file_names(len(files)), files, strict=True):
        (temporary / file["name"]).rename(temporary / name)
        places |= dict.fromkeys(file["tensors"], name)
    if len(files) > 1:
        written = TensorFiles(temporary / name for name in file_names(len(files)))
        write_json(temporary / INDEX, index_of(places, sum(info.nbytes for info in written.infos())))
    copy_side_files(source_dir, temporary)
    config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
    config.update({key: dtype for key in ("dtype", "torch_dtype") if key in config})
    write_json(temporary / "config.json", config)
    for path in temporary.iterdir():
        sync(path)
    (temporary / "COMPLETE").touch()
    sync(temporary)
    replace_directory(temporary, out_dir)


def _dtype(model: "MegatronModel") -> str:
    """What the model's weights are in, as config.json says it; on the first rank."""
    return str(next(model.modules[0].parameters()).dtype).removeprefix("torch.")
