"""Checkpoints of a whole run: models, optimizers, RNG, estimator, the controller's state; or no checkpoint.

Layout: ``checkpoints/step_000050/{actor/, critic/, rng-<rank>.safetensors, trainer.json, estimator.json,
controller.json, COMPLETE}`` and the pointer file ``checkpoints/latest``. Without a critic there is no ``critic/``.
A critic in a world of its own writes ``critic/`` and ``rng-critic-<rank>.safetensors``; the actor's world the rest.

Invariants (tests assert them):
- ``COMPLETE`` is written last, ``latest`` after it; a directory without ``COMPLETE`` is never loaded;
- what is saved is the state at :func:`begin`, however long the writing takes;
- a resumed run continues bit for bit on the same layout, and to rounding on another one.
"""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from megasao.config.rundir import RunDirectory, write_atomically
from megasao.megatron.checkpoint import Format, Snapshot, load_model, take_snapshot
from megasao.megatron.runtime import Topology, gather_counts
from megasao.storage.atomic import sync
from megasao.training.actor import Actor
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator

COMPLETE = "COMPLETE"
LATEST = "latest"
CRITIC_RNG = "rng-critic"
_RUNNING, _WRITTEN, _FAILED = range(3)


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


def directory_of(run: RunDirectory, progress: Progress) -> Path:
    """Where the checkpoint of that state is."""
    return run.checkpoints / f"step_{progress.step:06d}"


@dataclass
class Pending:
    """A checkpoint that is being written. Every rank has one and calls the same methods in the same order."""

    run: RunDirectory
    progress: Progress
    topology: Topology
    models: dict[str, Snapshot]
    rng: dict[str, torch.Tensor]
    documents: dict[str, str]
    """Files of rank 0, by name; empty on the others."""
    rng_name: str = "rng"
    error: BaseException | None = field(default=None, init=False)
    _writer: threading.Thread | None = field(default=None, init=False)

    @property
    def directory(self) -> Path:
        """Where it will be."""
        return directory_of(self.run, self.progress)

    def start(self) -> None:
        """Write this rank's part in the background."""
        self._writer = threading.Thread(target=self._write, name=f"checkpoint-{self.directory.name}", daemon=True)
        self._writer.start()

    def written(self) -> bool:
        """Whether every rank has written its part. Collective.

        Raises:
            RuntimeError: a rank could not; on every rank, with the reason on the rank itself.
        """
        assert self._writer is not None, "start() comes first"
        mine = _RUNNING if self._writer.is_alive() else _FAILED if self.error is not None else _WRITTEN
        states = gather_counts(mine)
        failed = [rank for rank, state in enumerate(states) if state == _FAILED]
        if failed:
            reason = self.error or "its own message says why"
            raise RuntimeError(f"rank {failed[0]} could not write {self.directory}: {reason}") from self.error
        return all(state == _WRITTEN for state in states)

    def complete(self, keep: int) -> Path:
        """Make it the latest checkpoint and remove old ones. After :meth:`written`; every rank enters."""
        self.complete_models()
        if self.topology.rank == 0:
            for name, text in self.documents.items():
                write_atomically(self.directory / name, text)
            write_atomically(self.directory / COMPLETE, "")
            write_atomically(self.run.checkpoints / LATEST, self.directory.name)
            prune(self.run, keep)
        self.topology.barrier()
        return self.directory

    def complete_models(self) -> None:
        """Make this world's models whole. After :meth:`written`; every rank enters."""
        for name, snapshot in self.models.items():
            snapshot.finish(self.directory / name)

    def _write(self) -> None:
        try:
            for name, snapshot in self.models.items():
                snapshot.write(self.directory / name)
            rng = self.directory / f"{self.rng_name}-{self.topology.rank}.safetensors"
            save_file(self.rng, rng)
            sync(rng)
        except Exception as error:  # told to every rank by written()
            self.error = error


def begin(
    run: RunDirectory,
    progress: Progress,
    actor: Actor,
    critic: Critic | None,
    estimator: Estimator,
    topology: Topology,
    *,
    controller_state: dict[str, Any] | None,
    format: Format = "safetensors",
) -> Pending:
    """Take the state after ``progress.step`` steps and start to write it; every rank enters.

    Only rank 0 has the controller's state. Training may go on at once; see :class:`Pending` for how it ends.
    """
    directory = directory_of(run, progress)
    if topology.rank == 0:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
    topology.barrier()
    models = {"actor": take_snapshot(actor.model, actor.optimizer, directory / "actor", format)}
    if critic is not None:
        models["critic"] = take_snapshot(critic.model, critic.optimizer, directory / "critic", format)
    documents = {}
    if topology.rank == 0:
        documents = {
            "trainer.json": json.dumps(asdict(progress), indent=2),
            "estimator.json": json.dumps(estimator.state()),
            "controller.json": json.dumps(controller_state, indent=2),
        }
    pending = Pending(run, progress, topology, models, _rng_states(), documents)
    pending.start()
    return pending


def begin_critic(
    run: RunDirectory, progress: Progress, critic: Critic, topology: Topology, *, format: Format = "safetensors"
) -> Pending:
    """The same for a critic in a world of its own, into the directory that the actor's world has made."""
    directory = directory_of(run, progress) / "critic"
    models = {"critic": take_snapshot(critic.model, critic.optimizer, directory, format)}
    pending = Pending(run, progress, topology, models, _rng_states(), {}, CRITIC_RNG)
    pending.start()
    return pending


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
    run: RunDirectory,
    actor: Actor,
    critic: Critic | None,
    estimator: Estimator,
    topology: Topology,
    tell: Callable[[str], None] = print,
    *,
    critic_elsewhere: bool = False,
) -> Progress:
    """Load the latest checkpoint into the roles, or leave them as they are; every rank enters.

    ``critic_elsewhere``: its part must be there, and another world loads it. ``tell`` is given a message on rank 0 for
    each directory that was begun and never completed.
    """
    if topology.rank == 0:
        for path in incomplete_checkpoints(run):
            tell(f"checkpoint {path.name} was not completed (no file {COMPLETE}) and is skipped")
    directory = latest_checkpoint(run)
    if directory is None:
        return Progress()
    critics = ["critic"] if critic is not None or critic_elsewhere else []
    _refuse_parts_missing(directory, ["actor", *critics, "trainer.json", "estimator.json", "controller.json"])
    load_model(actor.model, actor.optimizer, directory / "actor")
    if critic is not None:
        load_model(critic.model, critic.optimizer, directory / "critic")
    estimator.load(json.loads((directory / "estimator.json").read_text(encoding="utf-8")))
    _restore_rng(directory / f"rng-{topology.rank}.safetensors")
    return _progress(directory)


def restore_critic(run: RunDirectory, critic: Critic, topology: Topology) -> Progress:
    """The same for a critic in a world of its own."""
    directory = latest_checkpoint(run)
    if directory is None:
        return Progress()
    _refuse_parts_missing(directory, ["critic", "trainer.json"])
    load_model(critic.model, critic.optimizer, directory / "critic")
    _restore_rng(directory / f"{CRITIC_RNG}-{topology.rank}.safetensors")
    return _progress(directory)


def _refuse_parts_missing(directory: Path, parts: list[str]) -> None:
    missing = [name for name in parts if not (directory / name).exists()]
    if missing:
        raise ValueError(f"checkpoint {directory} lacks {', '.join(missing)}; restore an older one or start over")


def _progress(directory: Path) -> Progress:
    return Progress(**json.loads((directory / "trainer.json").read_text(encoding="utf-8")))


def incomplete_checkpoints(run: RunDirectory) -> list[Path]:
    """Directories of checkpoints that lack their last file, oldest first."""
    return sorted(path for path in run.checkpoints.glob("step_*") if not (path / COMPLETE).exists())


def _rng_states() -> dict[str, torch.Tensor]:
    """This rank's generators: torch's, and those that Megatron keeps by name."""
    named = {f"megatron:{name}": state.cpu().clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return {"torch": torch.get_rng_state(), **named}


def _restore_rng(file: Path) -> None:
    """A rank that the saving layout did not have keeps the state that its seed gave it."""
    if not file.exists():
        return
    states = load_file(file)
    torch.set_rng_state(states.pop("torch"))
    tracker = get_cuda_rng_tracker()
    known = tracker.get_states()
    found = {name.removeprefix("megatron:"): state for name, state in states.items()}
    tracker.set_states({name: found.get(name, state).to(state.device) for name, state in known.items()})
