"""What test worlds run for the model families; as in ``cases.py``, JSON in and JSON out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor, distributed

from megasao.config.training import TrainerConfig
from megasao.megatron import context, runtime, sparse_attention, step
from megasao.megatron.bridge import export_hf
from megasao.megatron.bridge.local import local_parameters
from megasao.megatron.microbatch import MicroBatch
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.rows import Row
from megasao.megatron.step import forward_backward, forward_only
from tests.megatron import cases
from tests.megatron.tiny import make_config

Payload = dict[str, Any]


def matrix(payload: Payload) -> Any:
    """For every job (path, parallel, model): what each row's tokens get, and what its export gets wrong.

    Of each row: log-probabilities [T], and on the last stage of the pipeline logits [T, vocabulary].
    """
    results = []
    for job in payload["jobs"]:
        path = Path(job["path"])
        config = make_config(path, job["parallel"], job.get("model"))
        runtime.set_layout(config.parallel, seed=1)
        try:
            with mistake(job.get("mistake")):
                model = build_model("actor", path, config)
                rows = [Row.from_sequences(row, [1.0] * len(row)) for row in payload["rows"]]
                with recorded_logits() as logits:
                    outputs = [output.tolist() for output in forward_only(model, rows)]
            results.append([outputs, [logits[index] for index in sorted(logits)], export_differences(model, path)])
        finally:
            runtime.clear_layout()
    return results


@contextmanager
def recorded_logits() -> Iterator[dict[int, list[list[float]]]]:
    """By row: the logits [T, vocabulary] of the forward passes inside, where the pipeline ends."""
    make_outputs, found = step._outputs, dict[int, list[list[float]]]()

    def recorded(model: MegatronModel, batch: MicroBatch, raw: Tensor, entropy: bool = False) -> Tensor:
        logits = whole_logits(model, batch, raw)
        found[batch.index] = logits.tolist()
        return make_outputs(model, batch, raw, entropy)

    with patch.object(step, "_outputs", recorded):
        yield found


def whole_logits(model: MegatronModel, batch: MicroBatch, raw: Tensor) -> Tensor:
    """[T, vocabulary] of a row, from hidden states [1, P / CP, hidden] and this rank's rows of the head."""
    group = parallel_state.get_tensor_model_parallel_group()
    part = raw[0].float() @ model.output_weight.float().T
    parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, part, group=group)
    return batch.whole(torch.cat(parts, dim=1).T.contiguous())[: model.hf_config["vocab_size"]].T


def export_differences(model: MegatronModel, path: Path) -> list[str]:
    """Tensors of the checkpoint whose export has another name, dtype or bit; MTP layers are not exported."""
    exported = export_hf(model)
    if distributed.get_rank() != 0:
        return []
    last = f"model.layers.{model.hf_config['num_hidden_layers']}."
    original = {name: t for name, t in load_file(path / "model.safetensors").items() if not name.startswith(last)}
    wrong = exported.keys() ^ original.keys()
    return sorted(wrong | {name for name, t in original.items() if name not in wrong and not same(exported[name], t)})


def same(ours: Tensor, theirs: Tensor) -> bool:
    """The same dtype, shape and bits."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


@contextmanager
def mistake(name: str | None) -> Iterator[None]:
    """A deliberate mistake in sparse attention.

    ``dense`` attends to every key, ``halves`` rotates as Llama does; under context parallelism ``own_keys`` scores no
    keys of other ranks, and ``straight`` takes a rank's tokens of a sequence for neighbours.
    """
    replaced: dict[str | None, tuple[Any, str, Any]] = {
        "dense": (sparse_attention.Indexer, "forward", lambda self, hidden, latent, row: None),
        "halves": (sparse_attention, "rotate_pairs", rotate_halves),
        "own_keys": (sparse_attention, "gather_tokens", own_alone),
        "straight": (sparse_attention, "own_positions", counted_through),
    }
    if name is None:
        yield
        return
    owner, attribute, wrong = replaced[name]
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)


def rotate_halves(vectors: Tensor, positions: Tensor, base: float) -> Tensor:
    """As ``rotate_pairs``, pairing dimension i with i + width / 2."""
    width = vectors.shape[-1]
    angles = torch.outer(positions.float(), base ** -(torch.arange(0, width, 2).float() / width))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def own_alone(part: Tensor, order: Tensor) -> Tensor:
    """As ``gather_tokens``, with nothing in the places of other ranks' tokens."""
    rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    parts = [part if other == rank else torch.zeros_like(part) for other in range(ranks)]
    return torch.cat(parts).index_select(0, order)


def counted_through(cu_seqlens: Tensor) -> Tensor:
    """As ``own_positions``, from 0 up in each sequence's part."""
    lengths = cu_seqlens.long().diff() // parallel_state.get_context_parallel_world_size()
    return torch.cat([torch.arange(length) for length in lengths.tolist()])


def gathered_widths(payload: Payload) -> Any:
    """Numbers a token that context-parallel ranks gather during a forward pass, each kind once."""
    config = make_config(Path(payload["path"]), payload["parallel"])
    runtime.set_layout(config.parallel, seed=1)
    model = build_model("actor", Path(payload["path"]), config)
    gather, widths = context.gather_parts, set()

    def recorded(part: Tensor) -> Tensor:
        widths.add(part[0].numel())
        return gather(part)

    with patch.object(context, "gather_parts", recorded):
        forward_only(model, [Row.from_sequences([list(range(20))], [1.0])])
    return sorted(widths)


def sequence_parallel_flags(payload: Payload) -> Any:
    """Of each parameter's name: whether Megatron adds its gradient up over tensor-parallel ranks."""
    config = make_config(Path(payload["path"]), payload["parallel"])
    runtime.set_layout(config.parallel, seed=1)
    model = build_model("actor", Path(payload["path"]), config)
    named = model.modules[0].named_parameters()
    return {name: bool(getattr(parameter, "sequence_parallel", False)) for name, parameter in named}


def train_all(payload: Payload) -> Any:
    """``cases.train`` for each of ``jobs``, one layout after the other."""
    reports = []
    for job in payload["jobs"]:
        Path(job["out"]).mkdir(parents=True, exist_ok=True)
        reports.append(cases.train(job))
        runtime.clear_layout()
    return reports


def rank_elements(payload: Payload) -> Any:
    """[pipeline rank, numbers in this rank's tensors] for each of ``jobs``."""
    found = []
    for job in payload["jobs"]:
        config = make_config(Path(job["path"]), job["parallel"])
        topology = runtime.set_layout(config.parallel, seed=1)
        model = build_model(job["role"], Path(job["path"]), config, load=False)
        found.append([topology.pipeline_rank, sum(local.parameter.numel() for local in local_parameters(model))])
        runtime.clear_layout()
    return found


def training_peaks(payload: Payload) -> Any:
    """For each of ``jobs``: bytes that ``rows`` forward and backward passes had at the worst time, by the allocator."""
    peaks = []
    for job in payload["jobs"]:
        config = make_config(Path(job["path"]), job.get("parallel", {"ranks": 1}))
        config = config.model_copy(update={"trainer": TrainerConfig(recompute=job["recompute"])})
        runtime.set_layout(config.parallel, seed=1)
        model = build_model("actor", Path(job["path"]), config, load=False)
        tokens = torch.randint(model.hf_config["vocab_size"], (job["tokens"],)).tolist()
        row = Row.from_sequences([tokens], [1.0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            forward_backward(model, [row] * job.get("rows", 1), lambda index, values: (values.sum(), {}))
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).cumsum(0)
        peaks.append(int(held.max()))
        runtime.clear_layout()
    return peaks
