"""Measuring a checkpoint on benchmarks, with the embedded engine or an SGLang server.

Invariants:
- a response is a function of (weights, problem, sample, seed), whichever responses were there before: a resumed
  evaluation ends as an uninterrupted one (with SGLang up to the rounding of other batches);
- what the verifier cannot grade is excluded with its reason; a failure of the engine, or of the verifiers as a whole,
  ends the evaluation, which can be resumed.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from megasao.config import Config
from megasao.config.architecture import existing_file
from megasao.environments.answers import find_answer
from megasao.environments.base import EnvironmentFailure
from megasao.environments.benchmarks.background import (
    BenchmarkEnvironment,
    benchmark_environment,
    benchmark_limits,
    check_settings,
)
from megasao.environments.benchmarks.sources import fingerprint, locate
from megasao.environments.benchmarks.table import Benchmark
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.mathematics import GRADERS
from megasao.environments.splits import text_hash
from megasao.environments.verifiers.pool import VerifierPool
from megasao.evaluation.engine import measuring_engine
from megasao.evaluation.records import Manifest, Record, ResultDirectory
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.service import failure_reason
from megasao.storage.documents import read_object
from megasao.trajectories.schema import Trajectory
from megasao.transport.messages import Lease

_FILE_ROWS = 64
"""Responses after which a file is written: what an interruption may cost."""

_EDGE = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """The weights that are measured: a Hugging Face directory, and which version of a run they are."""

    checkpoint: Path
    weight_version: int


@dataclass(frozen=True)
class Task:
    """One benchmark to run."""

    benchmark: Benchmark
    environment: BenchmarkEnvironment
    directory: ResultDirectory
    samples: int


def evaluate(config: Config, subject: Subject, benchmarks: list[Benchmark], out: Path, say: Say) -> None:
    """Measure, into one directory a benchmark under ``out``; goes on where an earlier call stopped.

    UserError or ValueError for data, checkpoints or settings that cannot be used, before anything is generated.
    """
    check_settings(config)
    pool = VerifierPool(GRADERS)
    tasks = [_prepare(config, subject, benchmark, out, pool) for benchmark in benchmarks]
    asyncio.run(_evaluate(config, subject, tasks, say))


def _prepare(config: Config, subject: Subject, benchmark: Benchmark, out: Path, pool: VerifierPool) -> Task:
    settings = config.benchmarks
    environment = benchmark_environment(config, benchmark, pool)
    manifest = Manifest(
        benchmark=benchmark.name,
        data_sha256=fingerprint(locate(benchmark.name, settings.data, settings.sources)),
        problems=environment.size("eval"),
        checkpoint=str(subject.checkpoint),
        checkpoint_id=checkpoint_id(subject.checkpoint),
        weight_version=subject.weight_version,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        chat=settings.chat,
        template=benchmark.template,
        answer=benchmark.answer,
        seed=config.run.seed,
        template_variables=config.environment.template_variables if settings.chat else {},
    )
    directory = ResultDirectory(out / benchmark.name)
    directory.begin(manifest)
    return Task(benchmark, environment, directory, settings.samples or benchmark.samples)


async def _evaluate(config: Config, subject: Subject, tasks: list[Task], say: Say) -> None:
    codec = TokenizerCodec.from_directory(subject.checkpoint, config.environment.template_variables)
    try:
        async with measuring_engine(config, subject.checkpoint) as engine:
            for task in tasks:
                limits = benchmark_limits(config, task.benchmark)
                runner = EpisodeRunner.build(task.environment, engine, codec, limits)
                await _Run(config, subject, task, runner, say).all()
    finally:
        for task in tasks:
            await task.environment.close()


class _Run:
    """One benchmark being run."""

    def __init__(self, config: Config, subject: Subject, task: Task, runner: EpisodeRunner, say: Say) -> None:
        self._config, self._subject, self._task, self._runner, self._say = config, subject, task, runner, say
        self._places = asyncio.Semaphore(config.rollout.concurrency)
        self._fresh: list[Record] = []

    async def all(self) -> None:
        """Every response that is not there yet."""
        task, name = self._task, self._task.benchmark.name
        prompts = [task.environment.prompt("eval", index) for index in range(task.environment.size("eval"))]
        there = {(record.problem_id, record.sample) for record in task.directory.read()}
        wanted = [
            (index, sample)
            for sample in range(task.samples)
            for index, prompt in enumerate(prompts)
            if (prompt.prompt_id, sample) not in there
        ]
        self._say(f"{name}: {len(prompts)} problems, {len(wanted)} responses to go ({len(there)} are there)")
        try:
            async with asyncio.TaskGroup() as group:
                for index, sample in wanted:
                    group.create_task(self._one(index, sample))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._write()

    async def _one(self, index: int, sample: int) -> None:
        async with self._places:
            lease = self._lease(index, sample)
            identity = (lease.prompt_id, sample, self._subject.weight_version, lease.seed)
            try:
                async with asyncio.timeout(self._config.benchmarks.response_timeout_s):
                    trajectory = await self._runner.run(lease)
            except (EnvironmentFailure, TimeoutError, ValueError) as error:
                reason = failure_reason(error)
                if reason == "verifier_pool":  # not this sample's fault: none can be graded
                    raise
                record = Record(*identity, excluded=reason)
            else:
                record = self._record(identity, trajectory)
        self._fresh.append(record)
        if len(self._fresh) >= _FILE_ROWS:
            self._write()

    def _lease(self, index: int, sample: int) -> Lease:
        prompt = self._task.environment.prompt("eval", index)
        return Lease(
            lease_id=f"{self._task.benchmark.name}/{index}/{sample}",
            prompt_id=prompt.prompt_id,
            group_id=prompt.prompt_id,
            split="eval",
            prompt_index=index,
            task=prompt.task,
            seed=text_hash("benchmark", self._config.run.seed, prompt.prompt_id, sample) >> 1,
            temperature=self._config.benchmarks.temperature,
            min_version=0,
            want_logprobs=False,
            want_versions=True,
        )

    def _record(self, identity: tuple[str, int, int, int], trajectory: Trajectory) -> Record:
        said = [token for token, acted in zip(trajectory.tokens, trajectory.action_mask, strict=True) if acted]
        text = self._runner.codec.decode(said)
        return Record(
            *identity,
            reward=sum(trajectory.rewards),
            answer=None if self._task.benchmark.answer == "tests" else find_answer(text, self._task.benchmark.answer),
            response=text,
            tokens=len(said),
            finish_reason=trajectory.finish_reason,
        )

    def _write(self) -> None:
        fresh, self._fresh = self._fresh, []
        if fresh:
            self._task.directory.append(fresh)


def checkpoint_id(directory: Path) -> str:
    """Tells checkpoints apart without reading all of them: config, and size and both ends of each file of tensors.

    ValueError if it is no Hugging Face directory with safetensors.
    """
    config = existing_file(directory)
    read_object(config)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory}: no Hugging Face checkpoint (config.json and *.safetensors)")
    digest = sha256(config.read_bytes())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as tensors:
            digest.update(json.dumps([file.name, size]).encode() + tensors.read(_EDGE))
            tensors.seek(max(0, size - _EDGE))
            digest.update(tensors.read(_EDGE))
    return digest.hexdigest()
