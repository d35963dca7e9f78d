"""What must hold before a run may start, beyond the config by itself: its model, environment and optional packages."""

import importlib.util
from pathlib import Path

from megasao.config import Config
from megasao.config.architecture import read_hf_config
from megasao.config.document import Document, KeyPath
from megasao.config.errors import ConfigError, Problem
from megasao.config.model_check import check_model

_SAMPLE_PROMPTS = 32
"""Enough for every character that prompts are made of to appear."""


def preflight(config: Config, document: Document) -> bool:
    """Check everything at once; ConfigError with places from ``document``. False if the model is not there yet."""
    problems = [
        *_environment(config),
        *_buffer(config),
        *_packages(config),
        *_value_model(config),
        *_server_args(config),
    ]
    model_there = False
    try:
        model_there = check_model(config)
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
    """An unknown environment, or an option it does not have."""
    from megasao.environments.registry import make_environment

    try:
        make_environment(config.environment)
    except ValueError as error:
        path, colon, reason = str(error).partition(": ")
        if colon and path.startswith("environment."):
            return [Problem(path, reason)]
        return [Problem("environment.options", str(error))]
    return []


def _tokenizer(config: Config) -> list[Problem]:
    """A tokenizer that cannot be read, does not belong to the model, or cannot write the environment's prompts."""
    from megasao.environments.encoding import TokenizerCodec
    from megasao.environments.registry import make_environment

    environment, path = make_environment(config.environment), Path(config.model.path)
    try:
        codec = TokenizerCodec.from_directory(path)
        for text in environment.stop_strings:
            codec.single_token(text)
        for index in range(_SAMPLE_PROMPTS):
            codec.encode(environment.prompt("train", index).text)
    except ValueError as error:
        return [Problem("model.path", str(error))]
    entries = read_hf_config(path)["vocab_size"]
    if codec.vocab_size > entries:
        reason = f"{path} has a tokenizer of {codec.vocab_size} tokens, but config.json says vocab_size = {entries}"
        return [Problem("model.path", reason)]
    return []


def _buffer(config: Config) -> list[Problem]:
    """A batch that the buffer's bytes cannot hold."""
    from megasao.controller.admission import Admission

    try:
        Admission.from_config(config)
    except ValueError as error:
        return [Problem("buffer.max_bytes", str(error).removeprefix("buffer.max_bytes = "))]
    return []

    problems = [
        *_environment(config),
        *_buffer(config),
        *_packages(config),
        *_value_model(config),
        *_server_args(config),
    ]


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
