"""Forward and backward passes over packed rows, through Megatron's schedules.

Invariants (tests assert them):

- the gradient that ends up in the main gradients is that of the SUM of all losses over rows and data-parallel ranks,
  under every layout and every split into rows: losses come already divided by the global denominator;
- outputs are float32 [T], aligned with the tokens themselves, and present on every pipeline stage.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from megasao.megatron.logprobs import hidden_logprobs, shift_to_tokens
from megasao.megatron.microbatch import MicroBatch, micro_batches
from megasao.megatron.models import MegatronModel
from megasao.megatron.rows import Row
from megasao.megatron.runtime import broadcast_bytes, compute_device

Stats = dict[str, Tensor]
LossFunction = Callable[[int, Tensor], tuple[Tensor, Stats]]


def forward_only(model: MegatronModel, rows: list[Row]) -> list[Tensor]:
    """Per-token outputs of each row, without gradients. Collective; every rank passes equally many rows.

    Returns:
        float32 [T] per row, on the rows' device: log-probabilities (actor) or values (critic) of the tokens.
    """
    with torch.no_grad():
        outputs: list[Tensor] = _run(model, rows, partial(_collect, model), forward_only=True)
    return _broadcast_outputs(outputs, rows)


def forward_backward(
    model: MegatronModel, rows: list[Row], loss_fn: LossFunction, *, entropy: bool = False
) -> list[Stats]:
    """Add the gradient of the sum of all losses to the main gradients, reduced over the whole world. Collective.

    Args:
        rows: equally many on every rank; ranks of one data-parallel index pass the same whole rows, also where context
            parallelism splits the model's work on them.
        loss_fn: ``loss_fn(index, outputs [T]) -> (loss, stats)`` for row ``index``, outputs on the row's device: the
            loss is 0-d, already divided by the GLOBAL denominator; stats are 0-d tensors, the same keys for each row.
            Called on the last stage only.
        entropy: give the loss outputs [2, T]: an actor's log-probabilities, and the entropies (nats) of the laws that
            the tokens were chosen from, both with gradient.

    Returns:
        The stats of each row, detached, on every pipeline stage.
    """

    def loss_and_stats(batch: MicroBatch, raw: Tensor) -> tuple[Tensor, Tensor, Stats]:
        outputs = _outputs(model, batch, raw, entropy).to(rows[0].tokens.device)
        # What the schedule runs beyond the rows has no loss.
        loss, stats = loss_fn(batch.index, outputs) if batch.index < len(rows) else (outputs.new_zeros(()), {})
        if not loss.requires_grad:
            # A row without trained tokens still runs its backward pass: other ranks wait in the collectives there.
            never = torch.zeros((), dtype=torch.bool, device=loss.device)
            loss = torch.where(never, outputs.sum(), loss)
        # The token count is not used: finalisation does not divide.
        return loss, torch.zeros((), dtype=torch.int), _detached(stats)

    stats: list[Stats] = _run(model, rows, loss_and_stats, forward_only=False)
    return _broadcast_stats(stats, len(rows))


def _run(model: MegatronModel, rows: list[Row], finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
    """What ``finish`` returns for each row, on the last stage; [] on the others."""
    _check_row_count(rows)
    schedule = get_forward_backward_func()
    batches = micro_batches(rows, model.transformer_config)

    def forward_step(data: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(data)
        raw = chunk(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=batch.packed(),
        )
        return raw, partial(finish, batch)

    iterators = [iter(batches) for _ in model.chunks]
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=batches[0].size,  # not used where lengths are variable: they travel with the tensors
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return list(results)[: len(rows)]


def _collect(model: MegatronModel, batch: MicroBatch, raw: Tensor, non_loss_data: bool = True) -> Tensor:
    return _outputs(model, batch, raw)


def _outputs(model: MegatronModel, batch: MicroBatch, raw: Tensor, entropy: bool = False) -> Tensor:
    """Per-token float32 [T] of the whole row ([2, T] with ``entropy``) from the model's raw output [1, P / CP, ...]."""
    if model.role == "critic":
        outputs = raw[0, :, 0].float()
    else:
        outputs = hidden_logprobs(
            raw[0],
            model.output_weight,
            batch.targets,
            batch.temperature,
            vocabulary=model.hf_config["vocab_size"],
            entropy=entropy,
        )
    return shift_to_tokens(batch.whole(outputs), batch.row_cu_seqlens)


def _check_row_count(rows: list[Row]) -> None:
    """Unequal counts would leave some rank waiting in a collective: say so at once instead."""
    count = torch.tensor([len(rows), -len(rows)], device=compute_device())
    distributed.all_reduce(count, op=distributed.ReduceOp.MAX)
    most, fewest = int(count[0]), -int(count[1])
    if most != fewest or fewest == 0:
        raise ValueError(
            f"ranks passed between {fewest} and {most} rows (this one {len(rows)}); every rank must pass equally many, "
            "at least one: fill up with Row.dummy()"
        )


def _detached(stats: Stats) -> Stats:
    return {key: value.detach() for key, value in stats.items()}


def _broadcast_outputs(outputs: list[Tensor], rows: list[Row]) -> list[Tensor]:
    """Give the outputs of the last stage to the others."""
    device = rows[0].tokens.device
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return [output.to(device) for output in outputs]
    lengths = [row.tokens.numel() for row in rows]
    if parallel_state.is_pipeline_last_stage():
        flat = torch.cat(outputs)
    else:
        flat = torch.empty(sum(lengths), device=compute_device())
    distributed.broadcast(
        flat,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return list(flat.to(device).split(lengths))


def _broadcast_stats(stats: list[Stats], count: int) -> list[Stats]:
    """Give the stats of the last stage to the others; they have no names for them, so JSON goes ahead."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return stats
    payload = None
    if parallel_state.is_pipeline_last_stage():
        payload = json.dumps([{key: [str(value.dtype), value.item()] for key, value in row.items()} for row in stats])
    received = broadcast_bytes(
        payload.encode() if payload is not None else None,
        source=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    rows = json.loads(received)
    assert len(rows) == count
    return [
        {
            key: torch.tensor(value, dtype=getattr(torch, name.removeprefix("torch.")), device=compute_device())
            for key, (name, value) in row.items()
        }
        for row in rows
    ]
