"""One trainer rank as a process: world, roles, client, publisher; then the loop."""

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
from megasao.training.estimator import Estimator
from megasao.training.loop import Trainer
from megasao.training.publishing import make_publishing
from megasao.training.source import BatchSource
from megasao.training.world import trainer_world
from megasao.transport.client import ControllerClient
from megasao.transport.keys import load_keys
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


def build_trainer(run: RunDirectory, config: Config, topology: Topology, asked_to_leave: Callable[[], bool]) -> Trainer:
    """The roles, both from the same checkpoint, and this rank's connections."""
    endpoints = run.read_endpoints()
    keys = load_keys(run.keys) if config.transport.curve else None
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
        if config.critic is not None
        else None,
        estimator=Estimator(config.algorithm, topology.all_reduce_data),
        source=BatchSource(client, topology, config, lifesign, routing, asked_to_leave),
        client=client,
        codec=TokenizerCodec.from_directory(path),
        publishing=make_publishing(run, config, topology, publisher),
        writer=writer,
    )
