"""A config at another number of GPUs, and in one of the modes that are compared."""

from typing import Any, Literal

from megasao.config import Config

Mode = Literal["sync", "one-step-off", "async"]
MODES: tuple[Mode, ...] = ("sync", "one-step-off", "async")


def scaled(config: Config, gpus: int, mode: Mode) -> tuple[Config, int]:
    """The config of a simulated run, and the GPUs of its trainer.

    Trainer and rollout fleet keep their proportion; batch and buffer grow alike where ``simulate.scale_batch``.
    ``sync`` waits for all of a step's rollouts, ``one-step-off`` is ``loop.max_lag = 1``, ``async`` the config's own
    ``max_lag``. Start-up is left out: no critic warm-up. ``parallel`` stays as it is, and is not looked at.

    ValueError: so many GPUs cannot be shared like that, or the batch vanishes.
    """
    options = config.simulate
    assert options is not None
    trainer, rollout = _shares(config, gpus)
    ratio = gpus / (config.parallel.ranks + config.plan.rollout_gpus) if options.scale_batch else 1.0
    group = config.loop.group_size
    batch = max(1, round(config.loop.batch_size * ratio / group)) * group
    if batch == 1:
        raise ValueError(
            f"{gpus} GPUs: a batch of {config.loop.batch_size} shrinks to 1; use simulate.scale_batch=false"
        )
    lag = 1 if mode == "one-step-off" else config.loop.max_lag
    changes: dict[str, dict[str, Any]] = {
        "loop": {
            "mode": "sync" if mode == "sync" else "async",
            "max_lag": lag,
            "batch_size": batch,
            # The end of a run, where less and less is begun, is not what is asked about.
            "steps": options.steps + lag + 2,
        },
        "buffer": {
            "max_trajectories": max(batch, round(config.buffer.max_trajectories * ratio)),
            "max_bytes": round(config.buffer.max_bytes * max(ratio, 1.0)),
        },
        "rollout": {"workers": rollout // config.plan.engine_gpus, "concurrency": options.engine.concurrency},
        "algorithm": {"allow_uncorrected": True},
    }
    data = config.model_dump()
    for section, values in changes.items():
        data[section].update(values)
    data |= {"slurm": None, "sft": None, "value_pretraining": None}
    for role in ("actor", "critic"):
        if data[role] is not None:
            data[role]["optimizer"].update(warmup_steps=0, decay_start=None)
    if data["critic"] is not None:
        data["critic"]["warmup_steps"] = 0
    return Config.model_validate(data), trainer


def _shares(config: Config, gpus: int) -> tuple[int, int]:
    """GPUs of the trainer and of the rollout fleet."""
    ranks, rollout, engine = config.parallel.ranks, config.plan.rollout_gpus, config.plan.engine_gpus
    if rollout == 0:
        raise ValueError("plan.rollout_gpus: 0, so there is no fleet to simulate; give the GPUs of the rollout side")
    here, left = divmod(gpus * rollout, ranks + rollout)
    if left or here == 0 or here % engine:
        raise ValueError(
            f"{gpus} GPUs cannot be shared as parallel.ranks = {ranks} to plan.rollout_gpus = {rollout} with whole "
            f"engines of plan.engine_gpus = {engine}; use multiples of {_least(ranks, rollout, engine)}"
        )
    return gpus - here, here


def _least(ranks: int, rollout: int, engine: int) -> int:
    """The fewest GPUs that can be shared."""
    gpus = engine
    while gpus * rollout % (ranks + rollout) or gpus * rollout // (ranks + rollout) % engine:
        gpus += 1
    return gpus


def one_replica(config: Config) -> int:
    """Ranks that the layout needs at least: fewer cannot hold it."""
    parallel = config.parallel
    dense = parallel.tensor * parallel.pipeline * parallel.context
    return max(dense, parallel.expert * parallel.expert_tensor * parallel.pipeline)
