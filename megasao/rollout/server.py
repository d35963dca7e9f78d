"""Role: one SGLang server, started, watched and ended with this process.

Invariants, asserted by the tests:
- the server lives in this process's group, so that whoever ends the role ends the server;
- the role shows a sign of life only when the server has generated a token: a hung one falls silent, and is restarted;
- a server that dies ends the role with an error that says how.
"""

import json
import logging
import subprocess
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory
from megasao.rollout.engines.sglang_arguments import (
    make_served_directory,
    server_arguments,
    server_command,
    server_environment,
)

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
CHECK_TIMEOUT_S = 30.0


class ServerDied(RuntimeError):
    """The server ended though nobody asked it to, or did not come up in its time."""


def run(run: RunDirectory, config: Config, name: str) -> None:
    """Serve ``name`` until the process is ended. ServerDied, or ValueError for a server that the run does not have."""
    engines = run.read_endpoints().engines
    if name not in engines:
        raise ValueError(f"the run has no server {name!r}; it has {', '.join(engines) or 'none'}")
    url, lifesign = engines[name], LifeSign(run.heartbeat(name))
    process = start(run, config, name, url)
    try:
        _until_ready(process, url, config.supervision.start_timeout_s, lifesign)
        logger.info("%s is ready at %s", name, url)
        _watch(process, url, lifesign)
    finally:
        process.kill()
        process.wait()


def start(run: RunDirectory, config: Config, name: str, url: str) -> subprocess.Popen[bytes]:
    """Start the server of the run's first policy; the weights of later ones come from its rollout worker."""
    directory, address = run.engine(name), urlsplit(url)
    assert address.hostname is not None and address.port is not None
    options = config.rollout.sglang
    architecture = make_served_directory(options, run.policy_path(config), directory / "model")
    arguments = server_arguments(
        options,
        served=(directory / "model").resolve(),
        host=address.hostname,
        port=address.port,
        max_tokens=config.environment.max_tokens,
    )
    file = directory / "args.json"
    file.write_text(json.dumps(arguments, indent=2), encoding="utf-8")
    return subprocess.Popen(server_command(options, "serve", file), env=server_environment(options, architecture))


def _until_ready(process: "subprocess.Popen[bytes]", url: str, timeout_s: float, lifesign: LifeSign) -> None:
    deadline = time.monotonic() + timeout_s
    while not _healthy(url):
        _check_alive(process)
        if time.monotonic() > deadline:
            raise ServerDied(f"{url} was not ready within supervision.start_timeout_s = {timeout_s:g}")
        time.sleep(0.25)
    lifesign.beat()


def _watch(process: "subprocess.Popen[bytes]", url: str, lifesign: LifeSign) -> None:
    next_check = time.monotonic() + CHECK_EVERY_S
    while True:
        _check_alive(process)
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
