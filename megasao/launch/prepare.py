"""The run directory before the first process starts: is it ours to use, and what goes in.

Invariants:
- two launchers never hold one run directory;
- a fresh run never writes into a directory that holds something, and a resumed run is the run that was started, but
  for the fields that are safe to change;
- no run is asked to end before the step that it is at.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.load import dump_config, load_config
from megasao.config.lock import exclusive
from megasao.config.rundir import Endpoints, RunDirectory, all_engine_names, server_ports, write_atomically
from megasao.launch.ports import free_ports, taken_ports
from megasao.observability.history import latest_step
from megasao.transport.keys import make_run_keys, make_server_key

SAFE_TO_CHANGE = (
    "loop.steps",
    "observability",
    "checkpoint",
    "evaluation",
    "benchmarks",
    "supervision",
    "slurm",
    "weights",
    "plan",  # it and simulate are read by commands of their own; the plan's fleet must be that of slurm
    "simulate",
)
_SAME_BY_CONSTRUCTION = ("run.directory",)  # may be spelled another way for the same place
_LOCK = "lock"


@contextmanager
def prepared_run(
    config: Config,
    *,
    resume: bool,
    place: Callable[[RunDirectory, Config], Endpoints] | None = None,
    lock_wait_s: float = 0.0,
) -> Iterator[RunDirectory]:
    """The run directory of ``config``, locked for this process and ready for the roles; UserError if it cannot be.

    ``place`` says where the run's sockets are; by default on this machine. Another launcher that has the run is given
    ``lock_wait_s`` seconds to let go of it.
    """
    run = RunDirectory(Path(config.run.directory) / config.run.name)
    _refuse_wrong_start(run, resume)
    with _written(run):
        run.path.mkdir(parents=True, exist_ok=True)
    with _locked(run.path / _LOCK, run, lock_wait_s):
        _refuse_wrong_start(run, resume)
        if resume:
            refuse_unsafe_changes(load_config(run.config), config)
            _refuse_fewer_steps(run, config)
        with _written(run):
            write_atomically(run.config, dump_config(config))  # before all else: with it a run can be resumed
            run.create()
            if config.transport.curve:
                make_run_keys(run.keys)
            if config.rollout.engine == "sglang":
                make_server_key(run.keys)
        run.write_endpoints(place(run, config) if place is not None else new_endpoints(config))
        yield run


def new_endpoints(config: Config) -> Endpoints:
    """Addresses on ports that are free now. UserError where ``transport.host`` is no address of this machine, or a port
    that the config gives to a server is taken: a server that cannot listen may hang, and who is there would be asked.
    """
    host = "127.0.0.1" if config.transport.host == "localhost" else config.transport.host
    names, of_servers = all_engine_names(config), server_ports(config)
    if taken := taken_ports(of_servers or ()):
        raise UserError(
            f"rollout.sglang.first_port = {config.rollout.sglang.first_port}: another program listens on "
            f"{', '.join(map(str, taken))}; stop it, or choose another first_port"
        )
    count = 4 + (len(names) if of_servers is None else 0)
    try:
        controller, weights, torch_port, critic, *ports = free_ports(count, host, promised=of_servers or ())
    except OSError as error:
        raise UserError(f"transport.host = {config.transport.host}: {error}") from error
    ports = list(of_servers or ports)
    return Endpoints(
        controller=f"tcp://{host}:{controller}",
        weights=f"tcp://{host}:{weights}",
        torch_host="127.0.0.1",
        torch_port=torch_port,
        critic=f"tcp://{host}:{critic}" if config.critic_is_separate else "",
        engines={name: f"http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)},
    )


def refuse_unsafe_changes(old: Config, new: Config) -> None:
    """UserError naming every field that differs and is not safe to change in a resumed run."""
    changed = [
        f"  {path}: was {before!r}, now {after!r}"
        for path, before, after in _differences(old.model_dump(), new.model_dump(), "")
        if not _under(path, (*SAFE_TO_CHANGE, *_SAME_BY_CONSTRUCTION))
    ]
    if changed:
        lines = "\n".join(changed)
        raise UserError(
            f"this run was started with another configuration:\n{lines}\n"
            f"A resumed run may change only {', '.join(SAFE_TO_CHANGE)}; put the old values back, "
            "or start a new run with run.name=..."
        )


def _refuse_fewer_steps(run: RunDirectory, config: Config) -> None:
    done = latest_step(run)
    if done is not None and done > config.loop.steps:
        raise UserError(
            f"{run.path} has made {done} steps, and loop.steps = {config.loop.steps} is less; give {done} or more"
        )


@contextmanager
def _written(run: RunDirectory) -> Iterator[None]:
    """A disk that is full, a place where nothing can be made, or nobody may write: UserError."""
    try:
        yield
    except OSError as error:
        reason = f"the run directory {run.path} cannot be written: {error}"
        raise UserError(f"{reason}; make room, or choose another run.directory") from error


def _refuse_wrong_start(run: RunDirectory, resume: bool) -> None:
    if resume:
        if not run.config.is_file():
            raise UserError(
                f"there is no run to resume in {run.path} (no config.yaml); start it without --resume, "
                "or check run.directory and run.name"
            )
        return
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is not a directory; choose another run.name or run.directory")
    if run.path.exists() and any(entry.name != _LOCK for entry in run.path.iterdir()):
        raise UserError(
            f"the run directory {run.path} already exists; continue that run with --resume, "
            f"start another one with run.name=..., or remove the directory"
        )


@contextmanager
def _locked(path: Path, run: RunDirectory, wait_s: float) -> Iterator[None]:
    """Hold the lock file, with this process's number in it."""
    try:
        file = exclusive(path, "launcher", wait_s=wait_s)
    except ValueError:
        owner = path.read_text(encoding="utf-8").strip() or "unknown"
        reason = f"another launcher (process {owner}) is running {run.path}; wait for it, or stop it first"
        raise UserError(reason) from None
    with file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        yield


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Leaves in which two dumps differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif old != new:
        yield path, old, new


def _under(path: str, sections: tuple[str, ...]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
