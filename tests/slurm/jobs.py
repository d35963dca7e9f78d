"""Jobs of a scaled-down GLM on the test's Slurm, by the script that users submit."""

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file, save_file

from megasao.config.rundir import RunDirectory
from megasao.controller.state import parse_lease_id
from megasao.observability.history import Event, read_history
from megasao.observability.jsonl import read_metrics
from megasao.studies.tiny_model import write_tokenizer
from tests.e2e import runs
from tests.megatron.tiny_families import write_tiny_family
from tests.slurm.cluster import Cluster, wait_until

ROOT = Path(__file__).resolve().parents[2]
JOB_S = 240.0
STEPS = 8
MAX_TOKENS = 96
SETTLE_S = 5.0
QUEUE_S = 15.0
"""Slurm's own time to start and end a job, generously."""


def write_model(directory: Path) -> Path:
    """GLM-5.2 with few numbers: latent attention on a quarter of an episode's keys, shared over layers; experts, dense
    layers, and a layer of multi-token prediction, which is carried along."""
    write_tiny_family(directory, "glm_moe_dsa", index_topk=MAX_TOKENS // 4)
    write_tokenizer(directory)
    return directory


def write_sparse_model(directory: Path) -> Path:
    """The same without multi-token prediction, selecting all keys of an episode."""
    write_tiny_family(directory, "glm_moe_dsa", mtp=False, num_nextn_predict_layers=0, index_topk=MAX_TOKENS)
    write_tokenizer(directory)
    return directory


def write_steady_model(directory: Path) -> Path:
    """The same, whose routers choose by their bias alone, an expert of either rank."""
    write_sparse_model(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = torch.tensor([20.0, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 18.0])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_config(path: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """Two trainer nodes of one rank each, two rollout workers on one node; ``sections`` are merged into it."""
    config: dict[str, Any] = {
        "run": {"name": "run", "directory": str(path.parent)},
        "model": {"path": str(model)},
        "environment": {"max_turns": 3, "max_tokens": MAX_TOKENS, "max_turn_tokens": 16},
        "algorithm": {"objective": {"name": "dis", "eps_low": 0.8, "eps_high": 3.0}},
        "actor": {"optimizer": {"lr": 1e-3}},
        "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 1, "head_bias": 0.5},
        "loop": {"steps": STEPS, "batch_size": 24, "mode": "sync"},
        "parallel": {"ranks": 2, "expert": 2},
        "rollout": {"workers": 2, "concurrency": 12, "embedded": {"slots": 12}},
        "evaluation": {"problems": 4, "every": 0, "sampled": False},
        "checkpoint": {"every": 0, "keep": 1000},
        "transport": {"heartbeat_s": 0.5, "dead_after_s": 5.0},
        "supervision": {"start_timeout_s": 90.0},
        "observability": {"examples_every": 100},
        "slurm": {
            "gpus_per_node": 0,
            "cpus_per_rank": 1,
            "cpus_per_worker": 1,
            "controller_cpus": 2,
            "controller_memory": "1G",
            "memory": "2G",
            "time_limit_minutes": 10,
            "leave_before_limit_s": 60,
        },
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def write_site(path: Path, **changes: str) -> Path:
    """A site.env of this machine; ``changes`` are set last."""
    values = {
        "PYTHON": sys.executable,
        "INTERFACE": "lo",
        "SBATCH_ARGS": f"--output={path.parent}/%j.out",
        **changes,
    }
    path.write_text("".join(f"MEGASAO_{name}='{value}'\n" for name, value in values.items()), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Job:
    """A submitted job and its run."""

    cluster: Cluster
    number: str
    directory: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory / "run")

    @property
    def output(self) -> str:
        """What the job has written so far."""
        file = self.directory / f"{self.number}.out"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def events(self) -> list[str]:
        return [event.event for event in read_history(self.run)]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The trainer's line of each step."""
        return read_metrics(self.run.metrics / "trainer.jsonl")

    @property
    def history(self) -> list[Event]:
        """What happened, over all starts."""
        return read_history(self.run)

    def left_over(self, except_on: str | None = None) -> list[psutil.Process]:
        """Processes of this job that are alive; those on one node may be left out."""
        return [process for process in self.processes() if _variable(process, "SLURMD_NODENAME") != except_on]

    def wait_until_gone(self, except_on: str | None = None) -> None:
        """Nothing of the job is alive."""
        wait_until(lambda: self.left_over(except_on) == [], 120, lambda: f"left: {self.left_over(except_on)}")

    def processes(self) -> list[psutil.Process]:
        """What Slurm has started for this job, on any node, the launcher and its srun among them."""
        return [process for process in psutil.process_iter() if _variable(process, "SLURM_JOB_ID") == self.number]

    def task(self, *words: str, **variables: str) -> psutil.Process:
        """The task of one step whose command line has ``words``."""
        for process in self.processes():
            command = process.cmdline()
            fits = all(_variable(process, name) == value for name, value in variables.items())
            if fits and "srun" not in command and all(word in command for word in words):
                return process
        raise AssertionError(f"no task {words}; {self.explain()}")

    def node(self, role: str) -> str:
        """The node of a role's first task."""
        name = _variable(self.task(role), "SLURMD_NODENAME")
        assert name is not None
        return name

    def explain(self) -> str:
        """Everything that helps to understand a failure."""
        logs = [f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in self.run.logs.glob("*.log")]
        return "\n".join([f"job {self.number}: {self.state}", self.output[-4000:], *sorted(logs)])

    @property
    def state(self) -> str:
        return self.cluster.state(self.number)

    def wait_for(self, *states: str, seconds: float = JOB_S) -> None:
        """Until the job is in one of the states."""
        wait_until(lambda: self.state in states, seconds, self.explain)

    def wait_for_steps(self, count: int) -> None:
        """Until so many steps are trained."""
        wait_until(lambda: len(self.steps) >= count, JOB_S, self.explain)

    def start_again_now(self, components: int = 3) -> None:
        """Spare the test the two minutes that Slurm lets a requeued job wait; too early it would fail to start."""
        time.sleep(SETTLE_S)
        for component in range(components):
            self.cluster.call("scontrol", "update", f"jobid={self.number}+{component}", "StartTime=now")


def batches(job: Job) -> dict[int, set[int]]:
    """Which problems each step was trained on."""
    found = {}
    for record in runs.read_ledger(job.run):
        if isinstance(record, runs.Batch):
            found[record.step] = {key.index for name in record.trajectory_ids if (key := parse_lease_id(name))}
    return found


def results(line: dict[str, Any]) -> dict[str, float]:
    """What a step computed, without times and speeds."""
    kept = ("actor/", "critic/", "reward/", "data/")
    return {name: value for name, value in line.items() if name.startswith(kept) and value is not None}


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


def command(cluster: Cluster, site: Path, config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`slurm/glm_scale.sh` as a user calls it."""
    return script(cluster, site, "glm_scale.sh", *words, str(config))


def script(cluster: Cluster, site: Path, name: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """One of the scripts of `slurm` as a user calls it."""
    return subprocess.run(
        [str(ROOT / "slurm" / name), *words],
        cwd=cwd,
        env=_environment(cluster, site),
        capture_output=True,
        text=True,
        timeout=240,
    )


def _environment(cluster: Cluster, site: Path) -> dict[str, str]:
    return cluster.environment | {"MEGASAO_SITE": str(site), "PYTHONPATH": str(ROOT)}


def submit_with(cluster: Cluster, site: Path, config: Path, arguments: list[str]) -> Job:
    """Submit the script by sbatch itself, with other arguments than it would choose."""
    words = ["sbatch", "--parsable", f"--output={config.parent}/%j.out", *arguments, "slurm/glm_scale.sh", str(config)]
    number = cluster.call(*words, env=_environment(cluster, site)).strip()
    return Job(cluster, number, config.parent)


def submit(cluster: Cluster, site: Path, config: Path, *words: str) -> Job:
    """Submit a run."""
    return submitted(cluster, command(cluster, site, config, *words), config.parent)


def submitted(cluster: Cluster, done: subprocess.CompletedProcess[str], directory: Path) -> Job:
    """The job that a script has submitted; its output goes to ``directory``."""
    found = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert found, f"{done.stdout}{done.stderr}"
    return Job(cluster, found.group(1), directory)
