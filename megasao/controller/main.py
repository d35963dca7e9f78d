"""The controller as a process."""

import logging
import signal
import sys

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.controller.recovery import Opened
from megasao.controller.server import ControllerServer
from megasao.environments.benchmarks.background import background_benchmarks
from megasao.environments.registry import make_environment
from megasao.transport.keys import keys_of

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0
"""Longer than a controller that is not the run's any more takes to notice that, and to end."""


def run(run: RunDirectory, config: Config) -> None:
    """Serve the run until its trainer says that it is finished. Continues from what is on disk.

    SIGTERM ends it too, with that exit status: whoever sent it, the run is not finished, and a launcher that goes on
    must not take this for a controller that ended on purpose.
    """
    keys = keys_of(run, config)
    environment = make_environment(config.environment)
    opened = Opened(run, lock_wait_s=LOCK_WAIT_S)
    server = ControllerServer(
        run,
        config,
        environment,
        opened,
        address=run.read_endpoints().controller,
        keys=keys,
        benchmarks=background_benchmarks(config),
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    if opened.journal.discarded_bytes:
        logger.warning("cut off %d bytes of a torn write at the end of the journal", opened.journal.discarded_bytes)
    try:
        server.run()
    finally:
        server.close()
    if server.was_stopped:
        sys.exit(128 + signal.SIGTERM)
