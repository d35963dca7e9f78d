"""One trainer rank as a process: world, roles, client, publisher; then the loop.

Also one rank of a critic in a world of its own.
"""

import signal
import threading
from collections.abc import Callable

from megasao.config import Config
from megasao.config.architecture import read_hf_config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory
from megasao.environments.encoding import TokenizerCodec
from megasao.families.routing import Routing
from megasao.megatron.runtime import Topology
from megasao.observability.metrics import MetricsWriter
from megasao.training.actor import Actor
from megasao.training.critic import Critic
from megasao.training.critic_world import CriticWorld
from megasao.training.estimator import Estimator
from megasao.training.loop import Trainer
from megasao.training.payload import PayloadReader
from megasao.training.publishing import make_publishing
from megasao.training.remote_critic import RemoteCritic, connect
from megasao.training.source import BatchSource
from megasao.training.value_service import ValueService
from megasao.training.world import trainer_world
from megasao.transport.client import ControllerClient
from megasao.transport.keys import CurveKeys, keys_of
from megasao.weights.publisher import WeightPublisher


def run(run: RunDirectory, config: Config) -> None:
    """Train until the configured steps are done; resumes from the run's latest checkpoint.

    SIGUSR1 to every rank: leave before the next step, with a checkpoint.
    """
    leave = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: leave.set())
    with trainer_world(config) as topology:
        trainer = build_trainer(run, config, topology, leave.is_set)
        trainer.train()
        trainer.close()


def run_critic(run: RunDirectory, config: Config) -> None:
    """Serve the actor's world as its critic until that says that the run is over; resumes as ``run`` does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the actor's world is asked to leave, and tells this one
    config = config.of_critic
    with trainer_world(config) as topology:
        critic = build_critic_world(run, config, topology)
        critic.serve()
        critic.close()


def build_critic_world(run: RunDirectory, config: Config, topology: Topology) -> CriticWorld:
    """The value model and this rank's connections. ``config`` is ``Config.of_critic``."""
    endpoints = run.read_endpoints()
    keys = keys_of(run, config)
    high_water_mark = config.transport.high_water_mark
    client = ControllerClient(
        endpoints.controller, identity=f"critic-{topology.rank}", keys=keys, high_water_mark=high_water_mark
    )
    service = None
    if topology.rank == 0:
        service = ValueService(endpoints.critic, high_water_mark=high_water_mark, keys=keys)
    lifesign = LifeSign(run.heartbeat(f"critic-{topology.rank}"))
    critic = Critic.build(run.policy_path(config), config, topology, start=run.critic_path(config))
    return CriticWorld(
        run=run,
        config=config,
        topology=topology,
        critic=critic,
        estimator=Estimator(config.algorithm, topology.all_reduce_data),
        source=BatchSource(client, topology, config, lifesign, payload_reader(client, topology, config, keys)),
        service=service,
        lifesign=lifesign,
        client=client,
    )


def build_trainer(run: RunDirectory, config: Config, topology: Topology, asked_to_leave: Callable[[], bool]) -> Trainer:
    """The roles, both from the same checkpoint, and this rank's connections."""
    endpoints = run.read_endpoints()
    keys = keys_of(run, config)
    path = run.policy_path(config)
    client = ControllerClient(
        endpoints.controller,
        identity=f"trainer-{topology.rank}",
        keys=keys,
        high_water_mark=config.transport.high_water_mark,
    )
    routing = Routing.of(read_hf_config(path)) if config.actor.router_replay else None
    lifesign = LifeSign(run.heartbeat(f"trainer-{topology.rank}"))
    publisher = None
    writer = None
    remote = None
    if config.critic_is_separate:
        high_water_mark = config.transport.high_water_mark
        asks = connect(endpoints.critic, high_water_mark=high_water_mark, keys=keys) if topology.rank == 0 else None
        remote = RemoteCritic(endpoints.critic, asks, topology, config.value_model.timeout_s, lifesign)
    if topology.rank == 0:
        publisher = WeightPublisher(
            endpoints.weights, keys=keys, config=config.transport, bucket_bytes=config.weights.bucket_bytes
        )
        writer = MetricsWriter(
            run,
            "trainer",
            tensorboard=True,
            wandb_project=config.observability.wandb_project,
            run_name=config.run.name,
            config=config.model_dump(),
        )
    return Trainer(
        run=run,
        config=config,
        topology=topology,
        actor=Actor.build(path, config, topology),
        critic=Critic.build(path, config, topology, start=run.critic_path(config))
        if config.critic is not None and not config.critic_is_separate
        else None,
        remote=remote,
        estimator=Estimator(config.algorithm, topology.all_reduce_data),
        source=BatchSource(
            client, topology, config, lifesign, payload_reader(client, topology, config, keys), routing, asked_to_leave
        ),
        client=client,
        codec=TokenizerCodec.from_directory(path),
        publishing=make_publishing(run, config, topology, publisher),
        writer=writer,
    )


def payload_reader(
    client: ControllerClient, topology: Topology, config: Config, keys: CurveKeys | None
) -> PayloadReader:
    """This rank's way to the payload: a host that is silent for as long as a dead one does not answer."""
    timeout_s = config.transport.dead_after_s
    return PayloadReader(client, identity=f"payload-{topology.rank}", keys=keys, timeout_s=timeout_s)
