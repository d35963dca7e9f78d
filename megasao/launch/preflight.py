"""What must hold before a run may start, beyond the config by itself: its model, environment and optional packages."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megasao.config import Config
from megasao.config.architecture import read_hf_config
from megasao.config.document import Document, KeyPath
from megasao.config.errors import ConfigError, Problem
from megasao.config.megatron import NEED_CUDA, Kind
from megasao.config.model_check import check_model
from megasao.config.suggest import nearest
from megasao.launch.roles import has_nvidia_device

if TYPE_CHECKING:
    from megasao.environments.base import Prompt
    from megasao.environments.encoding import TokenizerCodec

_SAMPLE_PROMPTS = 32
"""Enough for every character that prompts are made of to appear."""


def preflight(config: Config, document: Document, *, on_cluster: bool = False, ask_sglang: bool = True) -> bool:
    """Check everything at once; ConfigError with places from ``document``. False if the model is not there yet.

    ``on_cluster``: the servers run on nodes as section slurm says, not on this machine. ``ask_sglang``: its server
    arguments are checked here; otherwise the nodes that have it do so themselves.
    """
    problems = [
        *_environment(config),
        *_benchmarks(config),
        *_buffer(config),
        *_packages(config),
        *([] if on_cluster else _gpu_options(config)),
        *_operators(config),
        *_value_model(config),
        *(_server_args(config) if ask_sglang else []),
    ]
    model_there = False
    try:
        model_there = check_model(config)
        if model_there:
            problems.extend(_served_model(config, on_cluster=on_cluster))
        if model_there and not problems:
            problems.extend(_tokenizer(config))
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(document.source, [_placed(problem, document) for problem in problems])
    return model_there


def _placed(problem: Problem, document: Document) -> Problem:
    path: KeyPath = tuple(problem.path.split("."))
    return Problem(problem.path, problem.reason, document.where(path))


def _environment(config: Config) -> list[Problem]:
    """An unknown environment, an option it does not have, or fine-tuning on demonstrations that it does not have."""
    from megasao.environments.registry import make_environment

    try:
        environment = make_environment(config.environment)
    except ValueError as error:
        return [_under_its_path(error, ("environment.",), "environment.options")]
    try:
        if config.sft is not None:
            environment.demonstration(0, config.run.seed)
    except ValueError as error:
        return [_under_its_path(error, ("environment.",), "sft")]
    return []


def _under_its_path(error: ValueError, sections: tuple[str, ...], otherwise: str) -> Problem:
    """Under the path that the error begins with, if it is one of these sections."""
    path, colon, reason = str(error).partition(": ")
    if colon and path.startswith(sections) and " " not in path:
        return Problem(path, reason)
    return Problem(otherwise, str(error))


def _benchmarks(config: Config) -> list[Problem]:
    """A benchmark of the run that is not known, or whose file cannot be had."""
    from megasao.environments.benchmarks.background import background_benchmarks

    try:
        background_benchmarks(config)
    except ValueError as error:
        return [_under_its_path(error, ("evaluation.", "benchmarks."), "evaluation.benchmarks")]
    return []


def _tokenizer(config: Config) -> list[Problem]:
    """A tokenizer that cannot be read, does not belong to the model, or cannot write the environment's prompts."""
    from megasao.environments.encoding import TokenizerCodec
    from megasao.environments.registry import make_environment

    environment, path = make_environment(config.environment), Path(config.model.path)
    try:
        codec = TokenizerCodec.from_directory(path, config.environment.template_variables)
        codec.stop_ids(environment)
        prompts = [environment.prompt("train", index) for index in range(_SAMPLE_PROMPTS)]
        shortest = min(len(codec.encode_prompt(prompt)) for prompt in prompts)
    except ValueError as error:
        return [Problem("model.path", str(error))]
    entries = read_hf_config(path)["vocab_size"]
    if codec.vocab_size > entries:
        reason = f"{path} has a tokenizer of {codec.vocab_size} tokens, but config.json says vocab_size = {entries}"
        return [Problem("model.path", reason)]
    if shortest >= (window := config.environment.max_tokens):
        reason = f"the shortest of the first {len(prompts)} prompts has {shortest} tokens, and {window} leaves no room"
        return [Problem("environment.max_tokens", reason)]
    return _compaction(config, prompts[0], codec)


def _compaction(config: Config, prompt: "Prompt", codec: "TokenizerCodec") -> list[Problem]:
    """A request for summaries that the tokenizer cannot write, or that leaves no room for work."""
    from megasao.environments.base import StepResult
    from megasao.rollout.compaction import Compaction

    if config.environment.compaction is None:
        return []
    compaction, path = Compaction(config.environment.compaction, codec), "environment.compaction"
    try:
        reserve = compaction.reserve(prompt)
        needed = max(len(codec.encode_prompt(prompt)), len(compaction.resume(prompt, [], StepResult("", 0.0, False))))
    except ValueError as error:
        return [Problem(path, str(error))]
    if needed + reserve >= (window := config.environment.max_tokens):
        reason = f"the prompt of {needed} tokens, the request and a summary need {needed + reserve} tokens and more"
        return [Problem(path, f"{reason}; environment.max_tokens = {window}")]
    return []


def _buffer(config: Config) -> list[Problem]:
    """A batch that the buffer's bytes cannot hold."""
    from megasao.controller.admission import Admission

    try:
        Admission.from_config(config)
    except ValueError as error:
        return [Problem("buffer.max_bytes", str(error).removeprefix("buffer.max_bytes = "))]
    return []


def _operators(config: Config) -> list[Problem]:
    """Compiled operators that are asked for and not there."""
    if config.ops.backend != "fused":
        return []
    from megasao.ops.backend import configure

    try:
        configure(config.ops)
    except ValueError as error:
        return [Problem("ops.backend", str(error).removeprefix("ops.backend: "))]
    return []


def _value_model(config: Config) -> list[Problem]:
    """Trajectories to pretrain on that are not there, or a value model that cannot be started from."""
    from megasao.trajectories.files import trajectory_files

    problems = []
    if config.value_pretraining is not None:
        try:
            trajectory_files(config.value_pretraining.trajectories)
        except ValueError as error:
            problems.append(Problem("value_pretraining.trajectories", str(error)))
    if config.critic is not None and config.critic.path is not None:
        reason = _no_value_model(Path(config.critic.path))
        problems += [Problem("critic.path", reason)] if reason else []
    return problems


def _no_value_model(directory: Path) -> str | None:
    """Why no critic can start from ``directory``."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        role = manifest["role"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{directory} is no value model that pretrain-value wrote (no manifest.json that can be read: {error})"
    return None if role == "critic" else f"{directory} is a checkpoint of the {role}, not of a value model"


def _server_args(config: Config) -> list[Problem]:
    """No SGLang, or arguments that the installed one does not take."""
    if config.rollout.engine != "sglang":
        return []
    from megasao.rollout.engines.sglang_arguments import check_server_args

    options, section = config.rollout.sglang, "rollout.sglang.server_args"
    try:
        answer = check_server_args(options)
    except ValueError as error:
        return [Problem("rollout.sglang.python", str(error))]
    if answer["error"] is not None:
        return [Problem(section, f"SGLang does not take this: {answer['error']}")]
    return [Problem(f"{section}.{name}", _unknown_argument(name, answer["known"])) for name in answer["unknown"]]


def _served_model(config: Config, *, on_cluster: bool) -> list[Problem]:
    """A model that SGLang does not serve as it is."""
    if config.rollout.engine != "sglang":
        return []
    from megasao.rollout.engines.sglang_arguments import model_problem

    longest, hf_config = config.environment.max_tokens, read_hf_config(Path(config.model.path))
    on_cpu = config.slurm.gpus_per_node == 0 if on_cluster and config.slurm is not None else None
    fp8 = config.weights.dtype == "fp8_block"
    reason = model_problem(config.rollout.sglang, hf_config, max_tokens=longest, on_cpu=on_cpu, fp8=fp8)
    return [Problem("rollout.engine", reason)] if reason else []


def _unknown_argument(name: str, known: list[str]) -> str:
    names = nearest(name, known)
    hint = f"did you mean {' or '.join(names)}?" if names else "see `python -m sglang.launch_server --help`"
    return f"the installed SGLang has no such server argument; {hint}"


def _gpu_options(config: Config) -> list[Problem]:
    """Options that only a GPU can do, on a machine without one; a rank would say so after its start."""
    if has_nvidia_device():
        return []
    kinds: tuple[Kind, ...] = ("model", "optimizer", "gradients")
    chosen = [
        (f"megatron.{kind}.{name}", value) for kind in kinds for name, value in getattr(config.megatron, kind).items()
    ]
    worlds = [("parallel", config.parallel)]
    if config.critic is not None and config.critic.parallel is not None:
        worlds.append(("critic.parallel", config.critic.parallel))
    problems = [
        Problem(path, f"{value!r} needs a GPU, and this machine has none; leave it out")
        for path, value in chosen
        if value and path.rpartition(".")[2] in NEED_CUDA
    ]
    problems += [
        Problem(f"{path}.dispatcher", "flex needs a GPU, and this machine has none; use alltoall or allgather")
        for path, parallel in worlds
        if parallel.dispatcher == "flex"
    ]
    return problems


def _packages(config: Config) -> list[Problem]:
    """Options that need a package which is not installed."""
    problems = []
    if config.observability.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        reason = "the package wandb is not installed; `pip install 'megasao[wandb]'`, or set it to null"
        problems.append(Problem("observability.wandb_project", reason))
    needs_te = config.model.transformer_impl == "transformer_engine"
    if needs_te and importlib.util.find_spec("transformer_engine") is None:
        reason = "the package transformer_engine is not installed (it needs CUDA); use auto or local"
        problems.append(Problem("model.transformer_impl", reason))
    return problems
