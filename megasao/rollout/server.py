"""Role: one SGLang server, started, watched and ended with this process; on a cluster, one node of such a server.

Invariants, asserted by the tests:
- the server lives in this process's group, so that whoever ends the role ends the server;
- the role shows a sign of life only when the server has generated a token: a hung one falls silent, and is restarted;
- a server that dies ends the role with an error that says how;
- whoever does not show the run's key gets nothing from the server but its health;
- one that the controller does not want any more ends without an error, once nobody uses it.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import Endpoints, RunDirectory, all_engine_names
from megasao.rollout.engines.sglang_arguments import (
    make_served_directory,
    server_arguments,
    server_command,
    server_environment,
)
from megasao.rollout.registration import Registration
from megasao.transport.keys import load_server_key, server_key_path

if TYPE_CHECKING:
    from megasao.rollout.server_weights import NodeReceiver

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
CHECK_TIMEOUT_S = 30.0


class ServerDied(RuntimeError):
    """The server ended though nobody asked it to, or did not come up in its time."""


def run(run: RunDirectory, config: Config, name: str, *, added: bool = False) -> None:
    """Serve ``name`` until the process is ended, or the run does not want it any more; ``added``: it is none of the
    launcher's. ServerDied, or ValueError for a server that the run does not have."""
    endpoints = run.read_endpoints()
    if name in all_engine_names(config) and name not in endpoints.engines:
        logger.info("%s has left the run", name)
        return
    part = own_part(endpoints, name)
    lifesign = LifeSign(run.heartbeat(part.role))
    registration = Registration(run, config, name, added=added) if part.role == name else None
    process = start(run, config, part)
    weights = None
    try:
        if config.weight_transport == "distributed":
            from megasao.rollout.server_weights import NodeReceiver  # it needs torch

            signal.signal(signal.SIGTERM, _leave)
            weights = NodeReceiver(run, config, name, part.role)
        _until_ready(process, part.url, config.supervision.start_timeout_s, lifesign)
        logger.info("%s is ready at %s", part.role, part.url)
        _watch(process, part.url, lifesign, registration, weights)
    finally:
        if registration is not None:
            registration.close()
        process.kill()
        process.wait()
        if weights is not None:
            weights.close()


def _leave(*_: object) -> NoReturn:
    """Asked to end: not without the weights on this node being removed."""
    sys.exit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Part:
    """What one node has of a server: its role's name, its address, and how it finds the other nodes."""

    role: str
    url: str
    world: Mapping[str, Any]


def own_part(endpoints: Endpoints, name: str, environment: Mapping[str, str] = os.environ) -> Part:
    """This process's part of the server ``name``. ValueError for a server that the run does not have."""
    if name not in endpoints.engines:
        raise ValueError(f"the run has no server {name!r}; it has {', '.join(endpoints.engines) or 'none'}")
    followers = endpoints.followers.get(name)
    if not followers:
        return Part(name, endpoints.engines[name], {})
    rank = int(environment["SLURM_PROCID"])
    world = {"nnodes": 1 + len(followers), "node_rank": rank, "dist_init_addr": endpoints.meetings[name]}
    # The first node's sign of life is the server's: that of another says that it waits for the first.
    return Part(f"{name}.{rank}", followers[rank - 1], world) if rank else Part(name, endpoints.engines[name], world)


def training_server(role: str) -> int | None:
    """Which of its worker's training servers a role is; None for the one that evaluates."""
    which = role.split("-")[2].partition(".")[0]
    return int(which) if which.isdigit() else None


def start(run: RunDirectory, config: Config, part: Part) -> subprocess.Popen[bytes]:
    """Start the server of the run's first policy; the weights of later ones come from its rollout worker."""
    directory, address = run.engine(part.role), urlsplit(part.url)
    assert address.hostname is not None and address.port is not None
    options = config.rollout.sglang
    fp8 = config.weights.dtype == "fp8_block"
    architecture = make_served_directory(options, run.policy_path(config), directory / "model", fp8=fp8)
    arguments = server_arguments(
        options,
        served=(directory / "model").resolve(),
        host=address.hostname,
        port=address.port,
        max_tokens=config.environment.max_tokens,
        routed_experts=config.actor.router_replay,
        phase=options.phase_of(training_server(part.role), len(all_engine_names(config))),
        empty=fp8,
    )
    file = directory / "args.json"
    file.write_text(json.dumps({**arguments, **part.world}, indent=2), encoding="utf-8")
    load_server_key(run.keys)  # one that others can read is refused
    command = server_command(options, "serve", file, key=server_key_path(run.keys))
    return subprocess.Popen(command, env=server_environment(options, architecture))


def _until_ready(process: "subprocess.Popen[bytes]", url: str, timeout_s: float, lifesign: LifeSign) -> None:
    deadline = time.monotonic() + timeout_s
    while not _healthy(url):
        _check_alive(process)
        if time.monotonic() > deadline:
            raise ServerDied(f"{url} was not ready within supervision.start_timeout_s = {timeout_s:g}")
        time.sleep(0.25)
    lifesign.beat()


def _watch(
    process: "subprocess.Popen[bytes]",
    url: str,
    lifesign: LifeSign,
    registration: Registration | None,
    weights: "NodeReceiver | None",
) -> None:
    next_check = time.monotonic() + CHECK_EVERY_S
    while registration is None or not registration.is_over():
        _check_alive(process)
        if weights is not None:
            weights.check()
        if time.monotonic() >= next_check:
            if _healthy(url):
                lifesign.beat()
            next_check = time.monotonic() + CHECK_EVERY_S
        time.sleep(0.25)


def _check_alive(process: "subprocess.Popen[bytes]") -> None:
    code = process.poll()
    if code is not None:
        raise ServerDied(f"the SGLang server ended with code {code}; its last lines are above")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health_generate", timeout=CHECK_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
