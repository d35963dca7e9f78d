"""A real SGLang server on CPU for tests, started as the launcher's role starts it."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megasao.config.sglang import SGLangConfig
from megasao.launch.ports import free_ports
from megasao.rollout.engines.sglang_arguments import (
    make_served_directory,
    server_arguments,
    server_command,
    server_environment,
)

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
START_S = 240.0

needs_sglang = pytest.mark.skipif(
    not (ROOT / ".venv-sglang" / ".ready").exists(), reason="no .venv-sglang: `make setup-sglang` failed or was not run"
)
"""For tests that start SGLang, or ask it."""


def sglang_config(**options: Any) -> SGLangConfig:
    return SGLangConfig(python=str(PYTHON), **options)


def ask(url: str, path: str, key: str | None = None, *, post: bool = False) -> int:
    """The status that the server answers with; 0 if it does not answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key is not None else {})
    try:
        request = urllib.request.Request(url + path, headers=headers, data=b"{}" if post else None)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class RunningServer:
    """A server in its own process group."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        config: SGLangConfig,
        *,
        max_tokens: int,
        port: int | None = None,
        **options: Any,
    ) -> None:
        port = free_ports(1)[0] if port is None else port
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.log = directory / "server.log"
        architecture = make_served_directory(config, checkpoint, directory / "served")
        arguments = server_arguments(
            config, served=directory / "served", host="127.0.0.1", port=port, max_tokens=max_tokens, **options
        )
        file = directory / "args.json"
        file.write_text(json.dumps(arguments))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                server_command(config, "serve", file),
                env=server_environment(config, architecture),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> "RunningServer":
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health_generate", timeout=30) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                time.sleep(0.3)

    def signal(self, number: signal.Signals) -> None:
        """To every process of the server."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)


def imports(*modules: str) -> bool:
    """Whether SGLang's environment has all of these."""
    return (
        PYTHON.exists()
        and not subprocess.run([PYTHON, "-c", f"import {', '.join(modules)}"], capture_output=True).returncode
    )


@contextmanager
def routing(words: Sequence[str], log: Path, port: int | None = None) -> Iterator[str]:
    """SGLang's router with these arguments; its address."""
    own, metrics = free_ports(2)
    port = own if port is None else port
    command = [str(PYTHON), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), *words]
    command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(metrics)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while ask(f"http://127.0.0.1:{port}", "/health") != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)
