"""One rollout process: engines, weight receiver and service, put together and taken apart.

Invariants: the process ends with status 0 only when the controller said stop; an error of the receiver, of an engine
or of the service ends all of them, and the process with an error.
"""

import asyncio
import logging
from collections.abc import Sequence

import zmq.asyncio

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory, engine_names
from megasao.environments.benchmarks.background import background_benchmarks, benchmark_limits
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.rollout.engines.base import Engine
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.link import ControllerLink
from megasao.rollout.service import RolloutService
from megasao.transport.endpoints import connect_dealer
from megasao.transport.keys import CurveKeys, load_keys, load_server_key
from megasao.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)


def run(run: RunDirectory, config: Config, index: int) -> None:
    """Roll out until the controller says stop. Raises when it, or the trainer's weights, stay away too long."""
    asyncio.run(_run(run, config, index))


async def _run(run: RunDirectory, config: Config, index: int) -> None:
    keys = load_keys(run.keys) if config.transport.curve else None
    training, evaluation = make_engines(run, config, index)
    await asyncio.gather(training.start(), evaluation.start())
    try:
        await _serve(run, config, index, training, evaluation, keys)
    finally:
        await training.close()
        await evaluation.close()


def make_engines(run: RunDirectory, config: Config, index: int) -> tuple[Engine, Engine]:
    """The training and the evaluation engine; each worker samples from a seed of its own."""
    seeds = [config.run.seed * 2**20 + 2 * index + role for role in (0, 1)]
    if config.rollout.engine == "sglang":
        training, evaluation = engine_names(config, index)
        return (
            sglang_engine(run, config, training, staging=f"rollout-{index}", seed=seeds[0]),
            sglang_engine(run, config, [evaluation], staging=evaluation, seed=seeds[1]),
        )
    path, tokens = run.policy_path(config), config.environment.max_tokens
    one, other = (EmbeddedEngine(path, config.rollout.embedded, max_total_tokens=tokens, seed=seed) for seed in seeds)
    return one, other


def sglang_engine(run: RunDirectory, config: Config, names: Sequence[str], *, staging: str, seed: int) -> Engine:
    """The SGLang servers ``names`` as one engine; weights go through the run directory."""
    from megasao.rollout.engines.sglang import SGLangEngine
    from megasao.rollout.fleet import Fleet
    from megasao.rollout.server_weights import server_nodes

    path, addresses, directory = run.policy_path(config), run.read_endpoints().engines, run.staging(staging).resolve()
    key, fp8 = load_server_key(run.keys), config.weights.dtype == "fp8_block"
    engines = [
        SGLangEngine(
            addresses[name],
            path,
            config.rollout.sglang,
            staging=directory / name,
            max_total_tokens=config.environment.max_tokens,
            seed=seed,
            start_timeout_s=config.supervision.start_timeout_s,
            update_timeout_s=config.transport.weights_timeout_s,
            key=key,
            nodes=server_nodes(run, config, name),
            fp8=fp8,
        )
        for name in names
    ]
    retries, patience = config.rollout.sglang.retries, config.supervision.start_timeout_s
    return Fleet(engines, path, staging=directory / "fleet", retries=retries, patience_s=patience, fp8=fp8)


async def _serve(
    run: RunDirectory,
    config: Config,
    index: int,
    training: Engine,
    evaluation: Engine,
    keys: CurveKeys | None,
) -> None:
    """Connect, wait for the first weights, and serve until the controller says stop."""
    environment = make_environment(config.environment)
    codec = TokenizerCodec.from_directory(run.policy_path(config), config.environment.template_variables)
    train, evaluate = (
        EpisodeRunner.build(environment, engine, codec, config.environment) for engine in (training, evaluation)
    )
    endpoints, peer = run.read_endpoints(), f"rollout-{index}"
    receiver = WeightReceiver(
        endpoints.weights,
        training,
        identity=peer.encode(),
        config=config.transport,
        keys=keys,
        on_nodes=config.rollout.engine == "sglang",
    )
    context = zmq.asyncio.Context()
    socket = connect_dealer(
        context,
        endpoints.controller,
        identity=peer.encode(),
        high_water_mark=config.transport.high_water_mark,
        keys=keys,
    )
    link = ControllerLink(
        socket,
        endpoints.controller,
        peer,
        heartbeat_s=config.transport.heartbeat_s,
        give_up_after_s=config.supervision.start_timeout_s,
    )
    benchmarks = {
        name: EpisodeRunner.build(benchmark.environment, evaluation, codec, benchmark_limits(config))
        for name, benchmark in background_benchmarks(config).items()
    }
    service = RolloutService(config, link, train, evaluate, receiver, LifeSign(run.heartbeat(peer)), benchmarks)
    try:
        await _together(service, receiver, config.supervision.start_timeout_s)
    finally:
        socket.close()
        context.term()
        for one in (environment, *(runner.environment for runner in benchmarks.values())):
            await one.close()


async def _together(service: RolloutService, receiver: WeightReceiver, first_weights_s: float) -> None:
    """Run until the service is told to stop; whatever fails first ends all."""
    serving = asyncio.create_task(service.run(), name="service")
    receiving = asyncio.create_task(receiver.run(), name="weights")
    first = asyncio.create_task(receiver.wait_for_version(0, first_weights_s), name="first weights")
    waiting = {serving, receiving, first}
    try:
        while not serving.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if receiving.done() and not serving.done():
                raise RuntimeError("the weight receiver ended though the run goes on")
        logger.info("stopped by the controller: %s", serving.result())
    finally:
        for task in (serving, receiving, first):
            task.cancel()
        await asyncio.gather(serving, receiving, first, return_exceptions=True)
