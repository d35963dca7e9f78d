"""The engine that an evaluation asks: the embedded one, or an SGLang server that lives as long as the evaluation.

Invariants:
- a server that does not come up, or a model that it would serve as another one, ends the evaluation before it begins;
- the server is gone when the evaluation is, however that ends; it answers to a key that only this evaluation has.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from megasao.config import Config
from megasao.config.architecture import read_served_config
from megasao.config.errors import UserError
from megasao.launch.ports import free_ports
from megasao.launch.process import Guardian, Role, RoleProcess, describe_exit, tail
from megasao.rollout.engines.base import Engine
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.rollout.engines.sglang_arguments import (
    make_served_directory,
    model_problem,
    server_arguments,
    server_command,
    server_environment,
)
from megasao.transport.keys import make_server_key, server_key_path

_WATCH_S = 0.5
_LOG_LINES = 15


@asynccontextmanager
async def measuring_engine(config: Config, checkpoint: Path) -> AsyncIterator[Engine]:
    """A started engine with the weights of ``checkpoint``, for ``benchmarks.max_tokens``; closed at the end.

    UserError if the server does not come up; ValueError for a model that SGLang would not serve.
    """
    if config.rollout.engine == "sglang":
        async with _served(config, checkpoint) as engine:
            yield engine
        return
    longest = config.benchmarks.max_tokens
    engine = EmbeddedEngine(checkpoint, config.rollout.embedded, max_total_tokens=longest, seed=config.run.seed)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _served(config: Config, checkpoint: Path) -> AsyncIterator[Engine]:
    from megasao.rollout.engines.sglang import SGLangEngine

    options, longest = config.rollout.sglang, config.benchmarks.max_tokens
    if config.slurm is not None and config.slurm.nodes_per_server > 1:
        raise ValueError(
            f"slurm.nodes_per_server: {config.slurm.nodes_per_server}, and an evaluation has one node; choose "
            "rollout.sglang.server_args that fit one, and slurm.nodes_per_server=1"
        )
    problem = model_problem(options, read_served_config(checkpoint), max_tokens=longest)
    if problem is not None:
        raise ValueError(f"rollout.engine: {problem}")
    with tempfile.TemporaryDirectory(prefix="megasao-eval-") as name, Guardian() as guardian:
        directory, port = Path(name), free_ports(1)[0]
        key = make_server_key(directory / "keys")
        engine = SGLangEngine(
            f"http://127.0.0.1:{port}",
            checkpoint,
            options,
            staging=directory / "weights",
            max_total_tokens=longest,
            seed=config.run.seed,
            start_timeout_s=config.supervision.start_timeout_s,
            update_timeout_s=config.transport.weights_timeout_s,
            key=key,
        )
        server = RoleProcess(_server_role(config, checkpoint, directory, port), guardian)
        try:
            await _started(engine, server)
            yield engine
        finally:
            await engine.close()
            server.kill()


def _server_role(config: Config, checkpoint: Path, directory: Path, port: int) -> Role:
    options = config.rollout.sglang
    architecture = make_served_directory(options, checkpoint, directory / "model")
    arguments = server_arguments(
        options, served=directory / "model", host="127.0.0.1", port=port, max_tokens=config.benchmarks.max_tokens
    )
    file = directory / "args.json"
    file.write_text(json.dumps(arguments), encoding="utf-8")
    command = server_command(options, "serve", file, key=server_key_path(directory / "keys"))
    return Role("server", command, directory / "server.log", server_environment(options, architecture))


async def _started(engine: Engine, server: RoleProcess) -> None:
    """Wait for the server; UserError with its last words if it ends instead."""
    starting = asyncio.create_task(engine.start())
    try:
        while not (await asyncio.wait([starting], timeout=_WATCH_S))[0]:
            code = server.poll()
            if code is not None:
                words = tail(server.role.log, _LOG_LINES)
                raise UserError(f"rollout.engine: the SGLang server ended ({describe_exit(code)}):\n{words}")
        await starting
    finally:
        starting.cancel()
