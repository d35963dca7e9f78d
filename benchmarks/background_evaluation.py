"""What a background evaluation costs the rollouts: ``python benchmarks/background_evaluation.py [--seconds 10]``.

A real controller process and a real worker's service, on engines that take the same time for a turn however much the
other has to do, as two GPUs would. Rollouts a second that the trainer's side gets, with evaluations going on all the
time and without any, alternating. What the worker and the controller themselves cost is in both. ``--json FILE`` also
writes the numbers.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq.asyncio
from safetensors.torch import load_file

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.load import dump_config
from megasao.config.rundir import Endpoints, RunDirectory
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.launch.ports import free_ports
from megasao.rollout.engines.base import Engine, GenerateRequest, GenerateResult
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.rollout.engines.embedded_model import EmbeddedModel
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.link import ControllerLink
from megasao.rollout.service import RolloutService
from megasao.studies.tiny_model import write_model, write_tokenizer
from megasao.transport.client import ControllerClient
from megasao.transport.endpoints import connect_dealer
from megasao.transport.messages import BatchRequest, EvaluateRequest, FinishRequest, Manifest, Status, StatusRequest

PATIENCE_S = 60.0
BATCH = 16
LAPTOP_MODEL = {"seed": 0, "hidden": 128, "layers": 2, "experts": 8, "moe_hidden": 96}


class WaitingEngine(Engine):
    """Answers every request after the same time."""

    processor_seconds = 0.0

    def __init__(self, codec: TokenizerCodec, seconds: float) -> None:
        self._answer, self._seconds = codec.encode("<answer>7</answer>"), seconds
        self.turns = 0

    @property
    def weight_version(self) -> int:
        return 0

    async def start(self) -> None:
        """Nothing to bring up."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(self._seconds)
        self.turns += 1
        return GenerateResult(list(self._answer), [-0.5] * len(self._answer), [(0, 0)], "stop")

    async def abort(self, request_id: str) -> None:
        """Nothing runs on."""

    async def end_session(self, session_id: str) -> None:
        """Nothing is cached."""

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """There are none."""

    async def commit_weights(self, version: int) -> None:
        """There are none."""

    async def discard_weights(self, version: int) -> None:
        """There are none."""

    async def close(self) -> None:
        """Nothing to end."""

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": float(self.turns), "busy_seconds": 0.0}


class PinnedEngine(EmbeddedEngine):
    """Computes on one core, and counts the processor time of its thread."""

    def __init__(self, path: Path, config: Config, core: int) -> None:
        super().__init__(path, config.rollout.embedded, max_total_tokens=config.environment.max_tokens, seed=core)
        self._core, self.processor_seconds = core, 0.0

    def _load(self) -> EmbeddedModel:
        os.sched_setaffinity(0, {self._core})
        return super()._load()

    async def close(self) -> None:
        """As ever, once the processor time of the model thread is known."""
        assert self._thread is not None
        self.processor_seconds = await asyncio.get_running_loop().run_in_executor(self._thread, time.thread_time)
        await super().close()

    @property
    def turns(self) -> int:
        """Tokens here, since a turn has as many as the model writes."""
        return int(self.stats()["generated_tokens"])


class OneVersion:
    """The worker's weights: version 0, for ever."""

    quarantined: str | None = None
    version: int | None = 0

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def latest(self) -> tuple[int, Mapping[str, Any]] | None:
        return 0, self._tensors

    async def wait_for_version(self, version: int, timeout: float) -> int:
        return 0


def train(address: str, seconds: float, *, evaluating: bool) -> float:
    """The trainer's side: batches as fast as they come, and always an evaluation if ``evaluating``. Rollouts a second.

    The first three batches are not counted.
    """
    client = ControllerClient(address)
    step, started, counted = 0, 0.0, 0
    while not started or time.perf_counter() - started < seconds:
        if evaluating:
            status, _ = client.request(StatusRequest(), timeout_s=PATIENCE_S)
            if isinstance(status, Status) and not status.open_evaluations:
                client.request(EvaluateRequest(step=step, version=0), timeout_s=PATIENCE_S)
        reply, _ = client.request(BatchRequest(step, 0), timeout_s=PATIENCE_S)
        if isinstance(reply, Manifest):
            step += 1
            counted += started > 0
            started = started or (time.perf_counter() if step == 3 else 0.0)
    rate = counted * BATCH / (time.perf_counter() - started)
    client.request(FinishRequest("measured"), timeout_s=PATIENCE_S)
    client.close()
    return rate


def make_engines(config: Config, codec: TokenizerCodec, directory: Path, turn_s: float | None) -> list[Any]:
    """Of the rollouts and of the evaluations: those that wait, or embedded ones without ``turn_s``."""
    if turn_s is not None:
        return [WaitingEngine(codec, turn_s) for _ in range(2)]
    return [PinnedEngine(directory, config, core) for core in (0, 1)]


async def work(
    config: Config, address: str, directory: Path, seconds: float, turn_s: float | None, evaluating: bool
) -> Any:
    """One worker until the trainer's side is done; (rollouts a second, the two engines)."""
    codec, context = TokenizerCodec.from_directory(directory), zmq.asyncio.Context()
    engines = make_engines(config, codec, directory, turn_s)
    for engine in engines:
        await engine.start()
    environment = make_environment(config.environment)
    runners = [EpisodeRunner.build(environment, engine, codec, config.environment) for engine in engines]
    dealer = connect_dealer(context, address, identity=b"rollout-0", high_water_mark=1000)
    link = ControllerLink(dealer, address, "rollout-0", heartbeat_s=1.0, give_up_after_s=PATIENCE_S)
    weights = OneVersion(load_file(directory / "model.safetensors") if turn_s is None else {})
    service = RolloutService(config, link, *runners, weights, LifeSign(directory / "beat"))
    serving = asyncio.create_task(service.run())
    try:
        rate = await asyncio.to_thread(train, address, seconds, evaluating=evaluating)
        await asyncio.wait_for(serving, PATIENCE_S)
    finally:
        serving.cancel()
        for engine in engines:
            await engine.close()
        dealer.close(linger=0)
        context.term()
    return rate, engines


def measure(directory: Path, seconds: float, turn_s: float | None, *, evaluating: bool) -> Any:
    """One run with a controller of its own."""
    config = Config.model_validate(
        {
            "run": {"name": "run", "directory": str(directory)},
            "model": {"path": str(directory)},
            "actor": {"optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-3}},
            "loop": {"steps": 10**6, "batch_size": BATCH, "max_lag": 10**6},
            "buffer": {"max_trajectories": 128},
            "rollout": {"concurrency": 32},
            "evaluation": {"problems": 256, "sampled": False, "concurrency": 32},
        }
    )
    run = RunDirectory(directory / "run")
    run.create()
    run.config.write_text(dump_config(config))
    controller, weights, other = free_ports(3)
    address = f"tcp://127.0.0.1:{controller}"
    run.write_endpoints(Endpoints(address, f"tcp://127.0.0.1:{weights}", "127.0.0.1", other))
    process = subprocess.Popen([sys.executable, "-m", "megasao", "controller", "--run", str(run.path)])
    try:
        return asyncio.run(work(config, address, directory, seconds, turn_s, evaluating))
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--turn", type=float, default=0.5, help="seconds of a turn, on either engine")
    parser.add_argument("--embedded", action="store_true", help="embedded engines, on a core each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.embedded:
        os.sched_setaffinity(0, {0})  # of this thread, those that it starts, and the controller
    rates: dict[str, list[float]] = {"alone": [], "beside evaluations": []}
    turns = 0
    for _ in range(given.repeats):
        for name, evaluating in (("alone", False), ("beside evaluations", True)):
            with tempfile.TemporaryDirectory() as directory:
                write_tokenizer(Path(directory))
                if given.embedded:
                    write_model(Path(directory), **LAPTOP_MODEL)
                turn_s = None if given.embedded else given.turn
                rate, engines = measure(Path(directory), given.seconds, turn_s, evaluating=evaluating)
            rates[name].append(rate)
            turns += engines[1].turns
            done = [f"{engine.turns} {'tokens' if given.embedded else 'turns'}" for engine in engines]
            took = [f"{engine.processor_seconds:.1f} s of its core" for engine in engines]
            print(f"{name}: {rate:.1f} rollouts a second, rollouts {done[0]}, evaluations {done[1]}", end="")
            print(f", {' and '.join(took)}" if given.embedded else "", flush=True)
    best = {name: max(found) for name, found in rates.items()}
    ratio = best["beside evaluations"] / best["alone"]
    print(f"beside evaluations / alone = {ratio:.3f} (best of {given.repeats})")
    if given.json is not None:
        given.json.write_text(json.dumps({**rates, "ratio": ratio, "evaluation_turns": turns}))


if __name__ == "__main__":
    main()
