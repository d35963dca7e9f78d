"""Checkpoints of a whole run: models, optimizers, RNG, estimator, the controller's state; or no checkpoint.

Layout: ``checkpoints/step_000050/{actor/, critic/, rng-<rank>.safetensors, trainer.json, estimator.json,
controller.json, COMPLETE}`` and the pointer file ``checkpoints/latest``. Without a critic there is no ``critic/``.

Invariants:
- ``COMPLETE`` is written last, ``latest`` after it; a directory without ``COMPLETE`` is never loaded;
- a resumed run continues bit for bit on the same layout.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megasao.config.rundir import RunDirectory, write_atomically
from megasao.megatron.checkpoint import load_model, save_model
from megasao.megatron.runtime import Topology
from megasao.training.actor import Actor
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator

COMPLETE = "COMPLETE"
LATEST = "latest"


@dataclass(frozen=True)
class Progress:
    """How far a run is: finished training steps, and the actor's weight version."""

    step: int = 0
    version: int = 0
    trained_trajectories: int = 0
    seconds: float = 0.0
    """Wall time spent training, over all launches."""


def latest_checkpoint(run: RunDirectory) -> Path | None:
    """The newest complete checkpoint, by the pointer; None when there is none yet."""
    pointer = run.checkpoints / LATEST
    if not pointer.exists():
        return None
    directory = run.checkpoints / pointer.read_text(encoding="utf-8").strip()
    if not (directory / COMPLETE).exists():
        raise ValueError(
            f"{pointer} names {directory.name}, which is not a complete checkpoint (no file {COMPLETE}); "
            f"point it at another directory of {run.checkpoints}, or remove it to start over"
        )
    return directory


def save(
    run: RunDirectory,
    progress: Progress,
    actor: Actor,
    critic: Critic | None,
    estimator: Estimator,
    topology: Topology,
    *,
    controller_state: dict[str, Any] | None,
    keep: int,
) -> Path:
    """Write the checkpoint after ``progress.step`` steps; every rank enters. Only rank 0 has the controller's state."""
    directory = run.checkpoints / f"step_{progress.step:06d}"
    if topology.rank == 0:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
    topology.barrier()
    save_model(actor.model, actor.optimizer, directory / "actor")
    if critic is not None:
        save_model(critic.model, critic.optimizer, directory / "critic")
    save_file({"torch": torch.get_rng_state()}, directory / f"rng-{topology.rank}.safetensors")
    topology.barrier()
    if topology.rank == 0:
        write_atomically(directory / "trainer.json", json.dumps(asdict(progress), indent=2))
        write_atomically(directory / "estimator.json", json.dumps(estimator.state()))
        write_atomically(directory / "controller.json", json.dumps(controller_state, indent=2))
        write_atomically(directory / COMPLETE, "")
        write_atomically(run.checkpoints / LATEST, directory.name)
        prune(run, keep)
    topology.barrier()
    return directory


def prune(run: RunDirectory, keep: int) -> None:
    """Remove all but the ``keep`` newest complete checkpoints up to the latest.

    What lies beyond the latest belongs to a course of the run that was given up, and goes too.
    """
    latest = latest_checkpoint(run)
    assert latest is not None
    complete = sorted(p.parent for p in run.checkpoints.glob(f"step_*/{COMPLETE}") if p.parent <= latest)
    for directory in set(run.checkpoints.glob("step_*")) - set(complete[-keep:]):
        shutil.rmtree(directory)


def restore(
    run: RunDirectory, actor: Actor, critic: Critic | None, estimator: Estimator, topology: Topology
) -> Progress:
    """Load the latest checkpoint into the roles, or leave them as they are; every rank enters."""
    directory = latest_checkpoint(run)
    if directory is None:
        return Progress()
    parts = ["actor", *(["critic"] if critic is not None else []), "trainer.json", "estimator.json", "controller.json"]
    missing = [name for name in parts if not (directory / name).exists()]
    if missing:
        raise ValueError(f"checkpoint {directory} lacks {', '.join(missing)}; restore an older one or start over")
    load_model(actor.model, actor.optimizer, directory / "actor")
    if critic is not None:
        load_model(critic.model, critic.optimizer, directory / "critic")
    estimator.load(json.loads((directory / "estimator.json").read_text(encoding="utf-8")))
    torch.set_rng_state(load_file(directory / f"rng-{topology.rank}.safetensors")["torch"])
    return Progress(**json.loads((directory / "trainer.json").read_text(encoding="utf-8")))
