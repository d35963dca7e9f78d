"""Where a run keeps its files, and how its processes find each other."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megasao.config.lock import exclusive
from megasao.config.root import Config
from megasao.storage.atomic import sync

CHANGE_WAIT_S = 30.0
"""Much longer than another process takes to record a change of the run's servers."""


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that a reader, or a crash, sees the old or the new file and nothing between.

    On return a crash of the machine, too, leaves the new one, and whatever else was made in its directory before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def engine_names(config: Config, worker: int) -> tuple[list[str], str]:
    """Roles of the SGLang servers of a rollout worker: those for training, and the one for evaluation."""
    return [f"engine-{worker}-{index}" for index in range(config.rollout.sglang.servers)], f"engine-{worker}-evaluation"


def all_engine_names(config: Config) -> list[str]:
    """Every SGLang server of the run, none with another engine."""
    if config.rollout.engine != "sglang":
        return []
    names = []
    for worker in range(config.rollout.workers):
        training, evaluation = engine_names(config, worker)
        names += [*training, evaluation]
    return names


def server_ports(config: Config) -> range | None:
    """Ports from ``rollout.sglang.first_port`` on: one for each server, in order, then one where each server that only
    prefills is met. None where free ones are taken."""
    options, servers = config.rollout.sglang, len(all_engine_names(config))
    if options.first_port is None:
        return None
    return range(options.first_port, options.first_port + servers + (options.prefill_servers if servers else 0))


@dataclass(frozen=True)
class Endpoints:
    """Addresses of a run, fixed before its first process starts so that any of them may restart."""

    controller: str
    weights: str
    torch_host: str
    torch_port: int
    critic: str = ""
    """Where a critic in a world of its own is asked; empty where there is none."""
    engines: dict[str, str] = field(default_factory=dict)
    """Base address of each SGLang server by its role's name."""
    meetings: dict[str, str] = field(default_factory=dict)
    """``host:port`` where the processes of a server of several nodes meet, by its name."""
    followers: dict[str, list[str]] = field(default_factory=dict)
    """Base addresses of such a server's further nodes, in order: they tell its health and nothing else."""


def training_servers(endpoints: Endpoints, worker: int) -> list[str]:
    """Roles of the SGLang servers that a worker trains with: those that the run began with, and what was added or
    removed since."""
    prefix = f"engine-{worker}-"
    return [name for name in endpoints.engines if name.startswith(prefix) and name.removeprefix(prefix).isdigit()]


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        """Trajectories and the ledger of their consumption, written by the controller only."""
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        """One directory per checkpoint, and the pointer ``latest``."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """JSON lines, one file per role."""
        return self.path / "metrics"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def evaluations(self) -> Path:
        """JSON lines, one per finished evaluation, written by the controller."""
        return self.path / "evaluations.jsonl"

    @property
    def examples(self) -> Path:
        """Example trajectories with the trainer's numbers, JSON lines, one file per step."""
        return self.path / "examples"

    @property
    def logs(self) -> Path:
        """Standard output and error of each process."""
        return self.path / "logs"

    def heartbeat(self, role: str) -> Path:
        """What the process of ``role`` (``trainer-0``, ``rollout-1``, ``controller``) touches while it works."""
        return self.path / "heartbeats" / role

    def engine(self, name: str) -> Path:
        """What belongs to the SGLang server ``name``: its arguments, and the model that it serves."""
        return self.path / "engines" / name

    def staging(self, name: str) -> Path:
        """Weights for the SGLang servers of ``name``, written by their rollout worker."""
        return self.path / "weights" / name

    def payload(self, config: Config, name: str) -> Path:
        """The journal of the rollout worker ``name``, where workers keep their trajectories.

        Runs of one name that share ``buffer.payload_directory`` do not share their journals.
        """
        if config.buffer.payload_directory is None:
            return self.path / "payload" / name
        return Path(config.buffer.payload_directory) / self._own_name(config) / name

    def _own_name(self, config: Config) -> str:
        """Of this run among all that share a directory outside their own, also those of the same name.

        The same for all spellings of the run's place; links stay as they are, which nodes may see differently.
        """
        place = zlib.crc32(os.path.abspath(self.path).encode())
        return f"{config.run.name}-{place:08x}"

    def published(self, config: Config) -> Path:
        """Versions of the weights that the trainer's ranks write, where they travel by disk.

        Runs of one name that share ``weights.directory`` do not share their versions.
        """
        if config.weights.directory is None:
            return self.path / "weights" / "published"
        return Path(config.weights.directory) / self._own_name(config)

    def node_weights(self, config: Config, name: str) -> Path:
        """Where each node of the SGLang server ``name`` keeps weights itself; no other run has this directory."""
        return Path(config.weights.node_directory) / self._own_name(config) / name

    def node_marker(self, role: str) -> Path:
        """Which versions the node of ``role`` has there."""
        return self.path / "weights" / "nodes" / f"{role}.json"

    @property
    def keys(self) -> Path:
        """CURVE keys of this run, readable by its owner only."""
        return self.path / "keys"

    @property
    def sft(self) -> Path:
        """Hugging Face checkpoint that fine-tuning wrote; complete once it holds a file ``COMPLETE``."""
        return self.path / "sft"

    @property
    def value(self) -> Path:
        """The critic that value pretraining wrote, as a model checkpoint; complete with a file ``COMPLETE``."""
        return self.path / "value"

    @property
    def final_policy(self) -> Path:
        """Hugging Face checkpoint of the actor at the end of the run."""
        return self.path / "policy"

    def policy_path(self, config: Config) -> Path:
        """The checkpoint that RL starts from (version 0): fine-tuning's result, or ``model.path``."""
        return self.sft if config.sft is not None else Path(config.model.path)

    def critic_path(self, config: Config) -> Path | None:
        """The pretrained critic that RL starts from; None: the policy's checkpoint with a new value head."""
        if config.value_pretraining is not None:
            return self.value
        return Path(config.critic.path) if config.critic is not None and config.critic.path is not None else None

    def create(self) -> None:
        """Make the directory tree."""
        for directory in (
            self.path,
            self.journal,
            self.checkpoints,
            self.metrics,
            self.tensorboard,
            self.examples,
            self.logs,
        ):
            directory.mkdir(parents=True, exist_ok=True)

    def write_endpoints(self, endpoints: Endpoints) -> None:
        """Record the addresses."""
        write_atomically(self.path / "endpoints.json", json.dumps(asdict(endpoints), indent=2))

    def read_endpoints(self) -> Endpoints:
        """The recorded addresses. FileNotFoundError if the run was never launched, ValueError if they are damaged."""
        path = self.path / "endpoints.json"
        try:
            return Endpoints(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} has no addresses of a run ({error}); a launch with --resume writes it") from error

    def change_engines(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Record other SGLang servers, made by ``change`` of those that are recorded; one process at a time does so.

        ValueError where another one takes longer than CHANGE_WAIT_S.
        """
        with exclusive(self.path / "endpoints.lock", "process that changes the servers", wait_s=CHANGE_WAIT_S):
            endpoints = self.read_endpoints()
            self.write_endpoints(replace(endpoints, engines=change(dict(endpoints.engines))))

    def controller_address(self) -> str | None:
        """The controller's recorded address; None if the run was never launched."""
        try:
            return self.read_endpoints().controller
        except FileNotFoundError:
            return None

    def taken_over_by(self, address: str) -> str | None:
        """The recorded address of another controller than that at ``address``; None if it cannot be read now, too."""
        try:
            current = self.controller_address()
        except (OSError, ValueError):
            return None
        return current if current != address else None
