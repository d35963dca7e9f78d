"""One rollout process: engines, weight receiver and service, put together and taken apart.

Invariants: the process ends with status 0 only when the controller said stop; an error of the receiver, of an engine
or of the service ends all of them, and the process with an error.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq.asyncio

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory, engine_names, training_servers
from megasao.environments.benchmarks.background import background_benchmarks
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.rollout.engines.base import Engine
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.link import ControllerLink
from megasao.rollout.payload import PayloadService, own_host
from megasao.rollout.service import RolloutService
from megasao.trajectories.hosted import PayloadJournal
from megasao.transport.endpoints import connect_dealer
from megasao.transport.keys import CurveKeys, keys_of, load_server_key
from megasao.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    from megasao.rollout.engines.sglang import SGLangEngine
    from megasao.rollout.members import FleetMembers

logger = logging.getLogger(__name__)

PAYLOAD_LOCK_WAIT_S = 10.0
"""Longer than the system takes to end a worker that was killed."""


def run(run: RunDirectory, config: Config, index: int) -> None:
    """Roll out until the controller says stop. Raises when it, or the trainer's weights, stay away too long."""
    asyncio.run(_run(run, config, index))


async def _run(run: RunDirectory, config: Config, index: int) -> None:
    keys = keys_of(run, config)
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
        training, evaluation = servers_at_start(run, config, index), engine_names(config, index)[1]
        return (
            sglang_engine(
                run,
                config,
                training,
                staging=f"rollout-{index}",
                seed=seeds[0],
                router=config.rollout.sglang.router,
            ),
            sglang_engine(run, config, [evaluation], staging=evaluation, seed=seeds[1]),
        )
    path, tokens = run.policy_path(config), config.environment.max_tokens
    one, other = (EmbeddedEngine(path, config.rollout.embedded, max_total_tokens=tokens, seed=seed) for seed in seeds)
    return one, other


def servers_at_start(run: RunDirectory, config: Config, index: int) -> list[str]:
    """Roles of the servers that a worker waits for. Those that the launcher keeps alive, if there is one left: nobody
    starts an added one again, and the controller names it as soon as it is up."""
    recorded, kept = training_servers(run.read_endpoints(), index), engine_names(config, index)[0]
    return [name for name in recorded if name in kept] or recorded


def sglang_engine(
    run: RunDirectory, config: Config, names: Sequence[str], *, staging: str, seed: int, router: str | None = None
) -> Engine:
    """The SGLang servers ``names`` as one engine; weights go through the run directory, requests through ``router``."""
    from megasao.rollout.fleet import Fleet

    make = server_maker(run, config, staging=staging, seed=seed, router=router)
    addresses = run.read_endpoints().engines
    retries, patience = config.rollout.sglang.retries, config.supervision.start_timeout_s
    return Fleet(
        [make(addresses[name]) for name in names],
        run.policy_path(config),
        staging=run.staging(staging).resolve() / "fleet",
        retries=retries,
        patience_s=patience,
        fp8=config.weights.dtype == "fp8_block",
    )


def server_maker(
    run: RunDirectory, config: Config, *, staging: str, seed: int, router: str | None
) -> "Callable[[str], SGLangEngine]":
    """What makes the engine for a server's address."""
    from megasao.rollout.engines.sglang import SGLangEngine
    from megasao.rollout.server_weights import server_nodes

    path, directory, key = run.policy_path(config), run.staging(staging).resolve(), load_server_key(run.keys)

    def make(url: str) -> SGLangEngine:
        return SGLangEngine(
            url,
            path,
            config.rollout.sglang,
            staging=directory / url.rpartition(":")[2],
            max_total_tokens=config.environment.max_tokens,
            seed=seed,
            start_timeout_s=config.supervision.start_timeout_s,
            update_timeout_s=config.transport.weights_timeout_s,
            key=key,
            router=router,
            fp8=config.weights.dtype == "fp8_block",
            nodes=server_nodes(run, config, url),
        )

    return make


def fleet_members(run: RunDirectory, config: Config, index: int, training: Engine) -> "FleetMembers | None":
    """What changes the servers of the training engine while the run goes on; None where it has none."""
    if config.rollout.engine != "sglang":
        return None
    from megasao.rollout.fleet import Fleet
    from megasao.rollout.members import FleetMembers

    assert isinstance(training, Fleet)
    router, seed = config.rollout.sglang.router, config.run.seed * 2**20 + 2 * index
    make = server_maker(run, config, staging=f"rollout-{index}", seed=seed, router=router)
    return FleetMembers(training, make)


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
    hosted = payload_service(run, config, peer, keys)
    link = ControllerLink(
        socket,
        endpoints.controller,
        peer,
        heartbeat_s=config.transport.heartbeat_s,
        give_up_after_s=config.supervision.start_timeout_s,
        payload=hosted.address if hosted is not None else "",
    )
    benchmarks = {
        name: EpisodeRunner.build(benchmark.environment, evaluation, codec, benchmark.limits)
        for name, benchmark in background_benchmarks(config).items()
    }
    members = fleet_members(run, config, index, training)
    lifesign, kept = LifeSign(run.heartbeat(peer)), hosted.journal if hosted is not None else None
    service = RolloutService(config, link, train, evaluate, receiver, lifesign, benchmarks, members, kept)
    try:
        await _together(service, receiver, config.supervision.start_timeout_s)
    finally:
        if members is not None:
            await members.close()
        socket.close()
        context.term()
        if hosted is not None:
            hosted.close()
        for one in (environment, *(runner.environment for runner in benchmarks.values())):
            await one.close()


def payload_service(run: RunDirectory, config: Config, name: str, keys: CurveKeys | None) -> PayloadService | None:
    """The worker's own journal, served to the trainer's ranks; None where the controller has the payload."""
    if config.buffer.payload == "controller":
        return None
    journal = PayloadJournal(run.payload(config, name), lock_wait_s=PAYLOAD_LOCK_WAIT_S)
    if journal.discarded_bytes:
        logger.warning("cut off %d bytes of a torn write at the end of the journal", journal.discarded_bytes)
    for damage in journal.damage:
        logger.error("payload is lost: %s", damage)
    return PayloadService(journal, own_host(run.read_endpoints().controller), keys=keys)


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
