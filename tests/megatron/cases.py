"""What test worlds run: every function takes a JSON payload on each rank and returns JSON.

Tensors go to files: rank 0 writes ``payload["out"]`` with safetensors.
"""

import errno
import gc
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import save_file
from torch import Tensor

from megasao.config import Config
from megasao.config.model import ParallelConfig
from megasao.megatron import context, models, runtime
from megasao.megatron import optimizer as optimizers
from megasao.megatron.bridge import export_hf, export_tensors, load_hf, save_hf
from megasao.megatron.bridge.local import local_parameters
from megasao.megatron.checkpoint import load_model, save_model
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.optimizer import MOMENTS, Optimizer, build_optimizer
from megasao.megatron.options import passed_on
from megasao.megatron.router_replay import ReplayedChoice
from megasao.megatron.rows import Row
from megasao.megatron.runtime import Topology
from megasao.megatron.step import LossFunction, forward_backward, forward_only
from tests.megatron.tiny import make_config, random_sequences

Payload = dict[str, Any]


def outputs(payload: Payload) -> Any:
    """Per-token outputs of one row of ``sequences`` at ``temperatures``, replaying ``routed_experts`` if given."""
    config, _ = _start(payload)
    model = build_model(payload.get("role", "actor"), Path(payload["path"]), config)
    row = Row.from_sequences(payload["sequences"], payload["temperatures"])
    if "routed_experts" in payload:
        row = replace(row, routed_experts=torch.tensor(payload["routed_experts"]))
    return [output.tolist() for output in forward_only(model, [row])]


def chosen_experts(payload: Payload) -> Any:
    """[T, M, K]: the experts that the routers choose for one row of ``sequences``."""
    config, _ = _start(payload)
    model = build_model("actor", Path(payload["path"]), config)
    routers = [module.router for gpt in model.modules for module in gpt.modules() if isinstance(module, MoELayer)]
    for router in routers:
        router.router_replay = NotedChoice()
    forward_only(model, [Row.from_sequences(payload["sequences"], payload["temperatures"])])
    return torch.stack([router.router_replay.chosen for router in routers], 1).tolist()


class NotedChoice(ReplayedChoice):
    """A router's own choice, kept."""

    def get_replay_topk(self, scores: Tensor, topk: int, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.chosen = None
        best, self.chosen = super().get_replay_topk(scores, topk, *arguments)
        return best, self.chosen


def values_with_open_head(payload: Payload) -> Any:
    """A critic's values with head weight 1/64, for two temperatures."""
    config, _ = _start(payload)
    model = build_model("critic", Path(payload["path"]), config)
    for module in model.modules:
        if module.post_process:
            with torch.no_grad():
                module.output_layer.weight.fill_(1 / 64)
    rows = [Row.from_sequences(payload["sequences"], [t] * len(payload["sequences"])) for t in (1.0, 0.5)]
    return [output.tolist() for output in forward_only(model, rows)]


def train(payload: Payload) -> Any:
    """Adam steps on fixed rows; writes gradients of the first step and the weights after the last.

    ``mutation`` makes a deliberate mistake: ``scale`` divides by the data-parallel size too, ``swap`` exchanges
    two experts.
    """
    config, topology = _start(payload)
    model = build_model(payload["role"], Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer)
    if payload.get("mutation") == "swap":
        _swap_experts(model)
    report: list[Any] = []
    for step in range(payload["steps"]):
        losses, norm = _train_step(model, optimizer, topology, payload, step)
        report.append([losses, norm])
    _write(payload, "weights", export_hf(model))
    return report


def round_trip(payload: Payload) -> Any:
    """Export a freshly loaded model."""
    config, _ = _start(payload)
    model = build_model(payload["role"], Path(payload["path"]), config)
    _write(payload, "weights", export_hf(model))
    return len(export_hf(model))


def load_errors(payload: Payload) -> Any:
    """The message with which each of ``paths`` is refused."""
    config, _ = _start(payload)
    messages = []
    for path in payload["paths"]:
        try:
            build_model("actor", Path(path), config)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def save_directory(payload: Payload) -> Any:
    """Write a Hugging Face directory, twice: the second replaces the first."""
    config, _ = _start(payload)
    model = build_model("actor", Path(payload["path"]), config)
    for _ in range(2):
        save_hf(model, Path(payload["path"]), Path(payload["directory"]))
    load_hf(model, Path(payload["directory"]))
    return Path(payload["directory"], "COMPLETE").is_file()


def save_in_vain(payload: Payload) -> Any:
    """The errors of each rank where the disk is full for the last one, and where that does not see the source."""
    config, topology = _start(payload)
    source, directory = Path(payload["path"]), Path(payload["directory"])
    model = build_model("actor", source, config)
    full = OSError(errno.ENOSPC, "no space left")
    last = topology.rank == topology.world_size - 1
    with patch("megasao.weights.directory.TensorFileWriter", side_effect=full) if last else nullcontext():
        without_room = _save_error(model, source, directory)
    return [without_room, _save_error(model, source / "elsewhere" if last else source, directory)]


def _save_error(model: MegatronModel, source: Path, directory: Path) -> str:
    try:
        save_hf(model, source, directory)
    except RuntimeError as error:
        return str(error)
    return ""


def bytes_read(payload: Payload) -> Any:
    """What loading reads on this rank, counted by the kernel, and what the rank's own tensors have."""
    config, _ = _start(payload)
    model = build_model("actor", Path(payload["path"]), config, load=False)
    before = _read_calls()
    load_hf(model, Path(payload["path"]))
    own = sum(local.parameter.nbytes for local in local_parameters(model))
    return [_read_calls() - before, own]


def _read_calls() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def save_trained(payload: Payload) -> Any:
    """Train ``steps``, checkpoint, train ``more`` steps; writes state at the checkpoint and weights at the end."""
    config, topology = _start(payload)
    model = build_model(payload["role"], Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer)
    for step in range(payload["steps"]):
        _train_step(model, optimizer, topology, payload, step)
    save_model(model, optimizer, Path(payload["directory"]), payload.get("format", "safetensors"))
    _write(payload, "state", _whole_state(model, optimizer))
    for step in range(payload["steps"], payload["steps"] + payload["more"]):
        _train_step(model, optimizer, topology, payload, step)
    _write(payload, "weights", export_hf(model))
    return None


def plain_tensors(payload: Payload) -> Any:
    """What Megatron's own loader, with its own strategies, reads of a checkpoint."""
    from megatron.core import dist_checkpointing

    _start(payload)
    _write(payload, "plain", dist_checkpointing.load_plain_tensors(payload["directory"]))


def resume_trained(payload: Payload) -> Any:
    """Load the checkpoint into a random model, under whatever layout, and train ``more`` steps."""
    config, topology = _start(payload)
    model = build_model(payload["role"], Path(payload["path"]), config, load=False)
    optimizer = build_optimizer(model, config.actor.optimizer)
    load_model(model, optimizer, Path(payload["directory"]))
    _write(payload, "state", _whole_state(model, optimizer))
    for step in range(payload["steps"], payload["steps"] + payload["more"]):
        _train_step(model, optimizer, topology, payload, step)
    _write(payload, "weights", export_hf(model))
    return None


def repeat_step(payload: Payload) -> Any:
    """Steps on the same rows: the loss of each, and dtypes; writes what Adam updates, before and after."""
    config, topology = _start(payload)
    model = build_model(payload["role"], Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer, passed_on("optimizer", config))
    _write(payload, "start", export_tensors(model, _main(optimizer)))
    losses = []
    for _ in range(payload["steps"]):
        losses.append(_train_step(model, optimizer, topology, payload | {"out": None}, 0)[0])
    _write(payload, "end", export_tensors(model, _main(optimizer)))
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    tensors = {
        "parameter": parameters,
        "gradient": [parameter.main_grad for parameter in parameters],
        "main": [optimizer.main(parameter) for parameter in parameters],
        "exp_avg": [optimizer.moment(parameter, "exp_avg") for parameter in parameters],
    }
    return [losses, {name: sorted({str(t.dtype) for t in found}) for name, found in tensors.items()}]


def passed_options(payload: Payload) -> Any:
    """What of the section ``megatron`` has arrived."""
    config, _ = _start(payload)
    model = build_model("actor", Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer, passed_on("optimizer", config))
    return {
        **{
            name: getattr(model.transformer_config, name)
            for name in ("moe_router_dtype", "recompute_granularity", "recompute_modules")
        },
        "log_num_zeros_in_grad": optimizer.megatron.config.log_num_zeros_in_grad,
        "main_grads_dtype": str(optimizer.megatron.config.main_grads_dtype),
        "bucket_size": model.chunks[0].ddp_config.bucket_size,
        "buckets": len(model.chunks[0].bucket_groups),
    }


def arguments_set(payload: Payload) -> Any:
    """Names of the arguments that the three dataclasses are given without any options."""
    config, _ = _start(payload)
    given: dict[str, list[str]] = {}

    def recording(kind: str, dataclass: Any) -> Any:
        def make(**arguments: Any) -> Any:
            given[kind] = sorted(arguments.keys() - models._kernel_settings().keys())
            return dataclass(**arguments)

        return make

    with (
        patch.object(models, "TransformerConfig", recording("model", models.TransformerConfig)),
        patch.object(
            models, "DistributedDataParallelConfig", recording("gradients", models.DistributedDataParallelConfig)
        ),
        patch.object(optimizers, "MegatronOptimizerConfig", recording("optimizer", optimizers.MegatronOptimizerConfig)),
    ):
        build_optimizer(build_model("actor", Path(payload["path"]), config), config.actor.optimizer)
    return given


def load_checkpoint_errors(payload: Payload) -> Any:
    """The message with which each of ``directories`` is refused."""
    config, _ = _start(payload)
    model = build_model(payload["role"], Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer)
    messages = []
    for directory in payload["directories"]:
        try:
            load_model(model, optimizer, Path(directory))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def idle_rank(payload: Payload) -> Any:
    """Only data rank 0 has tokens; the other enters with a dummy row and a constant loss."""
    config, topology = _start(payload)
    model = build_model("actor", Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer)
    optimizer.zero_grad()
    rows = [_rows(0)[0] if topology.data_rank == 0 else Row.dummy()]

    def loss(index: int, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if topology.data_rank:
            return torch.zeros(()), {}
        return -values.sum() / 100.0, {}

    forward_backward(model, rows, loss)
    _write(payload, "gradients", export_tensors(model, lambda local: local.parameter.main_grad))  # type: ignore[attr-defined]
    return None


def split_gradients(payload: Payload) -> Any:
    """Gradients of one sum over all sequences, cut into rows of ``sequences_per_row``, dealt to data-parallel ranks."""
    config, topology = _start(payload)
    context.TILE = payload.get("tile", 1024)
    model = build_model("actor", Path(payload["path"]), config)
    build_optimizer(model, config.actor.optimizer).zero_grad()
    sequences, size, temperature = payload["sequences"], payload["sequences_per_row"], payload.get("temperature", 0.7)
    rows = [
        Row.from_sequences(sequences[start : start + size], [temperature] * len(sequences[start : start + size]))
        for start in range(0, len(sequences), size)
    ][topology.data_rank :: topology.data_size]
    forward_backward(model, rows, lambda index, values: (-values.sum() / 100.0, {}))
    _write(payload, "gradients", export_tensors(model, _gradient))
    return len(rows)


def unequal_rows(payload: Payload) -> Any:
    """Ranks disagree on the number of rows."""
    config, topology = _start(payload)
    model = build_model("actor", Path(payload["path"]), config)
    try:
        forward_only(model, [Row.dummy()] * (1 + topology.data_rank))
    except ValueError as error:
        return str(error)
    return ""


def not_finite(payload: Payload) -> Any:
    """A NaN loss is refused by the optimizer, and nothing moves."""
    config, _ = _start(payload)
    model = build_model("actor", Path(payload["path"]), config)
    optimizer = build_optimizer(model, config.actor.optimizer)
    before = export_hf(model)
    optimizer.zero_grad()
    forward_backward(model, [_rows(0)[0]], lambda index, values: (values.sum() * float("nan"), {}))
    try:
        optimizer.step(1.0)
        message = ""
    except RuntimeError as error:
        message = str(error)
    after = export_hf(model)
    return [message, all(torch.equal(before[name], after[name]) for name in before)]


def collectives(payload: Payload) -> Any:
    """Sums over data-parallel ranks, and bytes from rank 0."""
    _, topology = _start(payload)
    mine = torch.tensor([1.0 + topology.data_rank, 0.1], dtype=torch.float64)
    if not topology.is_last_stage:
        mine = torch.full_like(mine, float("nan"))
    received = topology.broadcast_bytes(b"\x00payload" if topology.rank == 0 else None)
    empty = topology.broadcast_bytes(b"" if topology.rank == 0 else None)
    return [topology.all_reduce_data(mine).tolist(), received.hex(), empty.hex(), topology.data_size]


def layout_errors(payload: Payload) -> Any:
    """The message with which a layout is refused."""
    try:
        config, _ = _start(payload)
        build_model("actor", Path(payload["path"]), config)
    except ValueError as error:
        return str(error)
    return ""


def threads_over_layouts(payload: Payload) -> Any:
    """Threads of this process after each of a few layouts, made and cleared."""
    found = []
    for layout in payload["layouts"]:
        runtime.set_layout(ParallelConfig(**layout), seed=1)
        runtime.clear_layout()
        gc.collect()
        torch.distributed.barrier()
        found.append(len(os.listdir("/proc/self/task")))
    return found


def fail_on(payload: Payload) -> Any:
    """Raise on one rank, while the other waits for it in a collective."""
    if torch.distributed.get_rank() == payload["rank"]:
        raise RuntimeError("deliberate")
    torch.distributed.barrier()


def wait_forever(payload: Payload) -> Any:
    """Rank 1 never answers."""
    import time

    if torch.distributed.get_rank() == 1:
        time.sleep(600)


def _start(payload: Payload) -> tuple[Config, Topology]:
    config: Config = make_config(
        Path(payload["path"]), payload.get("parallel"), payload.get("model"), **payload.get("critic", {})
    )
    changes = {key: payload[key] for key in ("megatron", "trainer", "actor") if key in payload}
    config = Config.model_validate({**config.model_dump(), **changes})
    return config, runtime.set_layout(config.parallel, seed=1)


def _rows(step: int) -> list[Row]:
    """Four rows of a step, of different lengths, at two temperatures."""
    return [
        Row.from_sequences(random_sequences(count, seed=10 * step + count), ([1.0, 0.7] * count)[:count])
        for count in (2, 3, 4, 5)
    ]


def _loss(role: str, row: Row, seed: int, denominator: float) -> LossFunction:
    """A weighted sum of log-probabilities, or a squared error against random targets; some tokens count zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(row.tokens.numel(), generator=generator)
    counted = torch.rand(row.tokens.numel(), generator=generator) < 0.7

    def loss(index: int, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        each = -weights * values if role == "actor" else (values - weights) ** 2
        total = torch.where(counted, each, torch.zeros_like(each)).sum() / denominator
        return total, {"loss": total, "tokens": counted.sum()}

    return loss


def _train_step(
    model: MegatronModel, optimizer: Optimizer, topology: Topology, payload: Payload, step: int
) -> tuple[float, float]:
    numbered = list(enumerate(_rows(step)))[topology.data_rank :: topology.data_size]
    denominator = 100.0 * (topology.data_size if payload.get("mutation") == "scale" else 1)
    losses = [_loss(payload["role"], row, 100 * step + number, denominator) for number, row in numbered]
    optimizer.zero_grad()
    stats = forward_backward(model, [row for _, row in numbered], lambda index, values: losses[index](index, values))
    if step == 0:
        _write(payload, "gradients", export_tensors(model, lambda local: optimizer.gradient(local.parameter)))
    total = topology.all_reduce_data(torch.stack([row["loss"] for row in stats]).sum())
    return total.item(), optimizer.step(payload.get("lr", 1e-3))


def _gradient(local: Any) -> Tensor | None:
    return local.parameter.main_grad if local.parameter.requires_grad else None


def _whole_state(model: MegatronModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights (those that Adam updates) and Adam's state, whole, on rank 0."""
    whole = {f"weight:{name}": tensor for name, tensor in export_tensors(model, _main(optimizer)).items()}
    for moment in MOMENTS:
        tensors = export_tensors(model, lambda local, moment=moment: optimizer.moment(local.parameter, moment))
        whole.update({f"{moment}:{name}": tensor for name, tensor in tensors.items()})
    if torch.distributed.get_rank() == 0:
        whole["updates"] = torch.tensor(optimizer.updates())
    return whole


def _main(optimizer: Optimizer) -> Any:
    return lambda local: optimizer.main(local.parameter)


def _swap_experts(model: MegatronModel) -> None:
    for module in model.modules:
        experts = module.decoder.layers[0].mlp.experts.local_experts
        first, second = experts[0].linear_fc1.weight, experts[1].linear_fc1.weight
        with torch.no_grad():
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


def _write(payload: Payload, name: str, tensors: dict[str, Tensor]) -> None:
    if torch.distributed.get_rank() == 0 and payload.get("out") is not None:
        save_file(tensors, Path(payload["out"]) / f"{name}.safetensors")
