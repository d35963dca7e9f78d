"""The plan as text."""

from collections.abc import Iterator

from megasao.config import Config
from megasao.planning.memory import GIB, RoleMemory, offloaded
from megasao.planning.plan import Plan, Stage

_COLUMNS = ("stage", "layers", "model", "parameters", "weights", "gradients", "optimizer", "activations", "scratch")


def describe_plan(plan: Plan, config: Config) -> str:
    """Several lines; memory in GiB."""
    notes = [f"cannot be trained as it is: {note}" for note in plan.untrainable]
    critic = []
    if plan.critic_stages:
        own = [*_layout(config.of_critic), "", *_stages(plan.critic_stages, plan.available)]
        critic = ["", "the critic, in a world of its own:", *own]
    stages = _stages(plan.stages, plan.available)
    return "\n".join([*_sizes(plan), "", *_layout(config), *notes, "", *stages, *critic, "", *_transfer(plan, config)])


def _sizes(plan: Plan) -> Iterator[str]:
    sizes = plan.sizes
    everything, no_embedding, neither = map(_many, sizes.active)
    yield f"parameters        {sizes.total:,}"
    if sizes.with_mtp != sizes.total:
        yield f"  with MTP        {sizes.with_mtp:,}"
    if sizes.routed:
        yield f"  routed experts  {sizes.routed:,}"
    active = f"{everything}; {no_embedding} without the embedding, {neither} also without the head"
    yield f"active            {active}"


def _many(number: float) -> str:
    """A number of parameters, in units in which it shows."""
    return f"{number / 1e9:.3f} B" if number >= 1e8 else f"{number / 1e6:.3f} M"


def _layout(config: Config) -> Iterator[str]:
    parallel = config.parallel
    parts = {
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        **({"VPP": parallel.virtual_pipeline} if parallel.virtual_pipeline > 1 else {}),
        "CP": parallel.context,
        "EP": parallel.expert,
        "ETP": parallel.expert_tensor,
        "DP": parallel.data,
    }
    shown = " ".join(f"{name}{size}" for name, size in parts.items())
    options = (
        f"{' SP' if parallel.sequence else ''}{', distributed optimizer' if parallel.distributed_optimizer else ''}"
    )
    yield f"{parallel.ranks} ranks: {shown}{options}, {config.model.dtype}"
    recomputation = {"none": "without recomputation", "selective": "selective recomputation not counted"}
    yield (
        f"rows of {config.trainer.token_budget} tokens; memory in GiB of the fullest rank of each stage, "
        f"{recomputation.get(config.trainer.recompute, 'layers recomputed')}"
        f"{f', {offloaded(config):.0%} of the optimizer in host memory' if offloaded(config) else ''}"
    )


def _stages(stages: list[Stage], available: float) -> Iterator[str]:
    rows = [list(_COLUMNS)]
    for index, stage in enumerate(stages):
        for role, memory in stage.roles.items():
            rows.append([str(index), _layers(stage), role, *_numbers(memory)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    yield from ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    yield ""
    for index, stage in enumerate(stages):
        room = available - stage.peak
        verdict = "fits" if room >= 0 else f"lacks {-room / GIB:.1f} GiB"
        host = sum(memory.host for memory in stage.roles.values()) / GIB
        verdict += f"; {host:.1f} GiB of the host's memory a rank" if host else ""
        yield f"stage {index}: {stage.peak / GIB:.1f} of {available / GIB:.1f} GiB at the worst time: {verdict}"


def _layers(stage: Stage) -> str:
    return f"{len(stage.layers)} ({', '.join(f'{chunk.start}-{chunk.stop - 1}' for chunk in stage.chunks)})"


def _numbers(memory: RoleMemory) -> list[str]:
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.scratch)
    return [_many(memory.parameters), *(f"{part / GIB:.2f}" for part in parts)]


def _transfer(plan: Plan, config: Config) -> Iterator[str]:
    if plan.transfer is None:
        yield "weights to the engines: plan.rollout_gpus = 0, so no transfer is planned"
        return
    transfer, assumed = plan.transfer, config.plan
    engines = assumed.rollout_gpus // assumed.engine_gpus
    fp8 = config.weights.dtype == "fp8_block"
    kind = ", in blocks of FP8" if fp8 else ""
    yield f"weights to {engines} engines of {assumed.engine_gpus} GPUs: {transfer.total / 1e9:.1f} GB{kind}"
    for index, loads in enumerate(transfer.shares):
        spread = f"{min(loads) / 1e9:.2f} to {max(loads) / 1e9:.2f} GB each"
        yield f"stage {index}: {len(loads)} ranks write {sum(loads) / 1e9:.1f} GB, {spread}; nothing between stages"
    yield (
        f"assumed: {assumed.link_gb_per_s:g} GB/s of each GPU's link, {assumed.storage_gb_per_s:g} GB/s of the shared "
        f"storage, {assumed.checksum_gb_per_s:g} GB/s of a worker's checksums, nodes of {assumed.node_gpus} GPUs; "
        f"{assumed.host_gb_per_s:g} GB/s from a GPU to its host, {assumed.fetch_gb_per_s:g} GB/s into one node over "
        f"TCP, {assumed.node_storage_gb_per_s:g} GB/s of a node's own storage"
    )
    for route in (route for route in transfer.routes if not (fp8 and route.transport == "stream")):
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in route.phases.items())
        chosen = " (weights.transport)" if route.transport == config.weight_transport else ""
        yield f"{route.transport}{chosen}: about {route.seconds:.0f} s: {phases}; {route.memory}"
