"""The weights of one node of an SGLang server: a thread of the server's role takes them from the trainer's ranks.

Invariants, asserted by the tests: it runs only where weights travel as ``distributed``; its end ends the role; the
directory is this process's own, and goes with the role.
"""

import asyncio
import threading
from contextlib import suppress

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.rollout.engines.base import EngineError
from megasao.rollout.engines.sglang_weights import read_layout
from megasao.transport.keys import keys_of
from megasao.weights.nodes import NodeDirectory, ServerNodes
from megasao.weights.ownership import Ownership
from megasao.weights.receiver import WeightReceiver

_GRACE_S = 10.0


class NodeReceiver:
    """Keeps the newest versions in the directory of server ``name`` on this node, whose role is ``role``."""

    def __init__(self, run: RunDirectory, config: Config, name: str, role: str) -> None:
        """OSError if the directory cannot be made, ValueError if another process keeps weights in it."""
        keys, directory = keys_of(run, config), run.node_weights(config, name)
        layout = read_layout(run.policy_path(config), fp8=config.weights.dtype == "fp8_block")
        self._ownership = Ownership(directory)
        self._versions = NodeDirectory(directory, run.node_marker(role), layout, file_bytes=config.weights.shard_bytes)
        self._receiver = WeightReceiver(
            run.read_endpoints().weights, self._versions, identity=role.encode(), config=config.transport, keys=keys
        )
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._receiver.run())
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="node-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except Exception as error:  # told to the role at its next look
            self._error = error

    def check(self) -> None:
        """RuntimeError if weights are not received any more."""
        if self._error is not None:
            raise RuntimeError(f"the weights of this node are not received any more: {self._error}") from self._error

    def close(self) -> None:
        """Stop, and leave no version behind."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._versions.clear()
        self._ownership.release()


def server_nodes(run: RunDirectory, config: Config, url: str) -> ServerNodes | None:
    """Where the nodes of the server at ``url`` keep their weights; None where they do not. EngineError for an address
    that is not in the run's."""
    if config.weight_transport != "distributed":
        return None
    endpoints = run.read_endpoints()
    names = {address: name for name, address in endpoints.engines.items()}
    if url not in names:
        raise EngineError(f"{url} is none of the run's servers: {', '.join(names) or 'there are none'}")
    name = names[url]
    followers = endpoints.followers.get(name, [])
    roles = [name, *(f"{name}.{rank}" for rank in range(1, len(followers) + 1))]
    return ServerNodes(run.node_weights(config, name), [run.node_marker(role) for role in roles])
