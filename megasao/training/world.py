"""The trainer's process world, brought up and torn down."""

from collections.abc import Iterator
from contextlib import contextmanager

from megasao.config import Config
from megasao.megatron.runtime import Topology, initialize_world, set_layout, shutdown_world
from megasao.ops.backend import configure


@contextmanager
def trainer_world(config: Config) -> Iterator[Topology]:
    """Join the world named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, in the configured layout.

    ValueError if ``ops.backend`` cannot be had.
    """
    configure(config.ops)
    initialize_world(config.parallel.timeout_s)
    topology = set_layout(config.parallel, config.run.seed)
    yield topology
    shutdown_world()
