"""A model and its Adam state in Megatron-Core's torch_dist format, by ``megatron.core.dist_checkpointing``.

Weights are under Megatron's names for whole models, one tensor for each layer and expert, and optimizer state under
``optimizer.state.<exp_avg, exp_avg_sq, fp32_param>.<name>`` in the shape of the weight: what Megatron calls fully
reshardable. Invariants (tests assert them):

- names are those of the TransformerEngine specification, whichever is used, and do not depend on the layout;
- what is saved under one layout loads under any other, bit for bit;
- what is written is a copy: training may go on meanwhile. Planning is collective, writing is not;
- no file is unpickled without limits (:mod:`megasao.storage.torch_dist`), and Megatron's own loader reads the result.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from megasao.families.facts import is_moe_layer
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.models import MegatronModel
from megasao.megatron.optimizer import MOMENTS, Optimizer
from megasao.megatron.runtime import gather_counts
from megasao.storage.torch_dist import check_common, read_metadata

Place: TypeAlias = ShardedTensor | ShardedTensorFactory
"""Which part of the whole model's tensors a parameter is; a factory where it is two of them side by side."""

STATE = "optimizer.state"
MAIN = "fp32_param"
"""What Adam updates, where the weight itself is in another precision."""


def places(model: MegatronModel) -> Iterator[tuple[LocalParameter, Place]]:
    """Every parameter of this rank with its place in the whole model. Names do not depend on the specification."""
    metadata = {
        "singleton_local_shards": True,  # a name for each layer and expert, not one tensor of all of them
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    found = [place for module in model.modules for place in module.sharded_state_dict(metadata=metadata).values()]
    by_tensor = {id(place.data): place for place in found if not isinstance(place, ShardedObject)}
    for local in local_parameters(model):
        place = by_tensor[id(local.parameter)]
        yield local, replace(place, key=_canonical(place.key, local.rule.megatron, model.hf_config))


def _canonical(key: str, name: str, hf_config: dict[str, Any]) -> str:
    """Megatron's key, but for the norm after attention: part of the product after it, and a module before a router.

    So it is in TransformerEngine's specification; the local one takes the first for all layers of some families, and
    the second for all of others.
    """
    norm = re.fullmatch(r"(decoder\.layers\.(\d+)\.)pre_mlp_layernorm\.weight", name)
    if norm is None:
        return key
    return name if is_moe_layer(hf_config, int(norm[2])) else f"{norm[1]}mlp.linear_fc1.layer_norm_weight"


def plan_save(model: MegatronModel, optimizer: Optimizer, directory: Path) -> tuple[AsyncRequest, bool]:
    """Copy weights and Adam state to host memory, and plan who writes what into ``directory``. Collective.

    The request's ``async_fn`` writes this rank's part, in any thread; after all have, each rank calls ``finalize_fns``.

    Returns:
        The request, and whether this rank has a part.
    """
    model.finish_gathering()
    entries: dict[str, Place] = {}
    writes = False
    for number, (local, place) in enumerate(places(model)):
        mine = is_main_replica(place.replica_id)
        writes |= mine
        for kind, tensor in _state(local.parameter, optimizer):
            # Another rank writes what this one has a copy of: only the shape is needed here.
            data = tensor.detach().cpu().clone() if mine else torch.empty_like(tensor, device="meta")
            entries[f"{number}.{kind}"] = _at(place, kind, data)
    request = dist_checkpointing.save(entries, str(directory), WriteByThisRank(), async_sharded_save=True)
    assert request is not None
    return request, writes


def _state(parameter: Tensor, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What is saved of a parameter; the first kind, "", is the weight itself. Collective as the optimizer's methods."""
    yield "", parameter
    main = optimizer.main(parameter)
    if main is not parameter:
        yield MAIN, main
    for moment in MOMENTS:
        tensor = optimizer.moment(parameter, moment)
        if tensor is not None:
            yield moment, tensor


def _at(place: Place, kind: str, data: Tensor) -> Place:
    """``data``, which has the parameter's shape, at the parameter's place."""
    if kind:
        return make_sharded_optimizer_tensor(place, data, f"{STATE}.{kind}")
    dtype = {} if isinstance(place, ShardedTensorFactory) else {"dtype": data.dtype}
    return replace(place, data=data, **dtype)


def load(model: MegatronModel, optimizer: Optimizer, directory: Path, manifest: dict[str, Any]) -> None:
    """Restore weights and Adam state from a checkpoint whose checksums are right. Collective.

    Raises:
        ValueError: a file is refused, or it is a checkpoint of another model. On every rank.
    """
    metadata, updates = _read(directory, manifest["parts"]), manifest["updates"]
    wanted = list(places(model))
    entries: dict[str, Place] = {}
    for number, (local, place) in enumerate(wanted):
        main = _at(place, MAIN, _empty(local))
        entries[f"{number}.weight"] = _at(place, "", _empty(local)) if _absent(main, metadata) else main
        for moment in MOMENTS if updates and local.parameter.requires_grad else ():
            entries[f"{number}.{moment}"] = _at(place, moment, _empty(local))
    problems = (_absent(entry, metadata) or _misfit(entry, metadata) for entry in entries.values())
    _agree(directory, next(filter(None, problems), None))
    loaded = dist_checkpointing.load(entries, str(directory), ReadWithLimits(metadata))
    for number, (local, _) in enumerate(wanted):
        moments = {moment: loaded[f"{number}.{moment}"] for moment in MOMENTS if f"{number}.{moment}" in entries}
        optimizer.restore(local.parameter, loaded[f"{number}.weight"], moments, updates)


def _empty(local: LocalParameter) -> Tensor:
    """In float32: as wide as anything that is stored."""
    return torch.zeros_like(local.parameter, dtype=torch.float32, device="cpu")


def _read(directory: Path, parts: list[str]) -> Metadata:
    """The checkpoint's description; ValueError on every rank where it is refused."""
    metadata, problem = None, None
    try:
        check_common(directory)
        metadata = read_metadata(directory, parts)
    except ValueError as error:
        problem = str(error)
    _agree(directory, problem)
    assert metadata is not None
    return metadata


def _leaves(entry: Place) -> list[ShardedTensor]:
    return entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]


def _absent(entry: Place, metadata: Metadata) -> str | None:
    names = [leaf.key for leaf in _leaves(entry) if leaf.key not in metadata.state_dict_metadata]
    return f"it lacks the tensor {names[0]}; it is a checkpoint of another model" if names else None


def _misfit(entry: Place, metadata: Metadata) -> str | None:
    for leaf in _leaves(entry):
        stored = metadata.state_dict_metadata[leaf.key]
        assert isinstance(stored, TensorStorageMetadata), "refused when it was read"
        found, expected = tuple(stored.size), tuple(leaf.global_shape)
        # Rows of a vocabulary may be filled up to another number.
        if found != expected and not (leaf.allow_shape_mismatch and found[1:] == expected[1:]):
            return f"{leaf.key} has shape {found}, and {expected} is needed; it is a checkpoint of another model"
    return None


def _agree(directory: Path, problem: str | None) -> None:
    """ValueError on every rank if one of them has a problem."""
    refused = [rank for rank, bad in enumerate(gather_counts(int(problem is not None))) if bad]
    if refused:
        raise ValueError(f"{directory}: {problem or f'rank {refused[0]} refused it, and says why'}")


class _Writer(FileSystemWriter):
    """torch's writer, in two steps: what to write is known before it is written."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Remember the plan, which every rank has a part of."""
        self._plan, self._planner, self._written = plan, planner, list[WriteResult]()

    def write(self) -> None:
        """Write this rank's part, whole and synced, in the thread that calls."""
        if self._plan.items:
            self._written = self.write_data(self._plan, self._planner).value()

    def retrieve_write_results(self) -> list[WriteResult]:
        """What was written, and where."""
        return self._written

    def storage_meta(self) -> StorageMeta:
        """Without the directory's name: it may be moved."""
        return StorageMeta(save_id=self.save_id)


class WriteByThisRank(TorchDistSaveShardedStrategy):
    """Megatron's strategy, which writes one file a rank in the calling thread.

    Megatron's own forks processes and keeps a server for their results: forks of a process full of communication
    threads, and a server that survives it.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        """Plan together; the request writes."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = _Writer(checkpoint_dir, single_file_per_rank=True, sync_files=True, thread_count=1)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), writer, None, 0, planner=planner)
        return AsyncRequest(writer.write, (), [partial(save_state_dict_async_finalize, *planned)])


class _Reader(FileSystemReader):
    """torch's reader, with a description that was read with limits."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The one that was given."""
        return self._metadata


class ReadWithLimits(TorchDistLoadShardedStrategy):
    """Megatron's strategy, which never unpickles ``.metadata`` by itself."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        """Each rank reads the parts of tensors that it needs."""
        leaves = list(nested_values(sharded_state_dict))
        flexible = {leaf.key: leaf for leaf in leaves if leaf.allow_shape_mismatch}
        by_key, mapping, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, is_loading=True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[leaf for leaf in leaves if not leaf.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=flexible,
        )
        with warnings.catch_warnings():
            # The newer name wants the same keys on every rank: a pipeline's stages have different ones.
            warnings.simplefilter("ignore", FutureWarning)
            checkpoint.load_state_dict(state, _Reader(checkpoint_dir, self._metadata), planner=planner)
        tensors = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        return _replace_sharded_keys_with_state_dict_keys(tensors, mapping, names)
