"""What a rollout worker costs: ``python benchmarks/rollout_worker.py`` (``--episodes``, ``--concurrency``).

Tokens a second of one real SGLang server (`make setup-sglang`) on the tool task, twice in one run and alternating:
- through the whole worker: leases and trajectories over ZeroMQ, environment, tokeniser, fleet, engine, Arrow rows;
- the same requests, episode by episode in as many lanes, as bare HTTP posts without streaming.
The same seeds give the same tokens both ways, which is checked. ``--json FILE`` also writes the numbers.
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import zmq.asyncio

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.launch.ports import free_ports
from megasao.rollout.engines.base import GenerateRequest, GenerateResult
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.engines.sglang_arguments import (
    make_served_directory,
    server_arguments,
    server_command,
    server_environment,
)
from megasao.rollout.episode import EpisodeRunner
from megasao.rollout.fleet import Fleet
from megasao.rollout.link import ControllerLink
from megasao.rollout.service import RolloutService
from megasao.studies.tiny_model import write_model, write_tokenizer
from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import bind_router, connect_dealer
from megasao.transport.messages import (
    Ack,
    Credit,
    FromWorker,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    Stop,
    Trajectories,
    Welcome,
)

START_S = 300.0
Played = dict[str, list[tuple[GenerateRequest, list[int]]]]
"""Requests of each episode in their order, and the tokens that came back."""


class RecordingFleet(Fleet):
    """A fleet that keeps what it was asked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.played: Played = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        self.played.setdefault(request.session_id, []).append((request, result.output_ids))
        return result


class FirstWeights:
    """The worker's weights: those that the server started with."""

    quarantined: str | None = None
    version: int | None = 0

    def latest(self) -> tuple[int, Mapping[str, Any]] | None:
        return None

    async def wait_for_version(self, version: int, timeout: float) -> int:
        return 0


@contextmanager
def serving(config: Config, path: Path, directory: Path) -> Iterator[str]:
    """One server of the checkpoint at ``path``; its address."""
    options, (port,) = config.rollout.sglang, free_ports(1)
    architecture = make_served_directory(options, path, directory / "served")
    arguments = server_arguments(
        options, served=directory / "served", host="127.0.0.1", port=port, max_tokens=config.environment.max_tokens
    )
    file, environment = directory / "args.json", server_environment(options, architecture)
    file.write_text(json.dumps(arguments), encoding="utf-8")
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            server_command(options, "serve", file), env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


async def through_worker(config: Config, path: Path, url: str, directory: Path, episodes: int) -> tuple[Played, float]:
    """Play ``episodes`` through a worker's service; what was played, and seconds from the first lease on."""
    engine = SGLangEngine(
        url,
        path,
        config.rollout.sglang,
        staging=directory / "engine",
        max_total_tokens=config.environment.max_tokens,
        seed=0,
        start_timeout_s=START_S,
        update_timeout_s=60.0,
    )
    fleet = RecordingFleet([engine], path, staging=directory / "fleet", retries=0, patience_s=60.0)
    await fleet.start()
    codec, context = TokenizerCodec.from_directory(path), zmq.asyncio.Context()
    runner = EpisodeRunner.build(make_environment(config.environment), fleet, codec, config.environment)
    router = bind_router(context, "tcp://127.0.0.1:*", high_water_mark=1000)
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    dealer = connect_dealer(context, address, identity=b"rollout-0", high_water_mark=1000)
    link = ControllerLink(dealer, address, "rollout-0", heartbeat_s=1.0, give_up_after_s=60.0)
    service = RolloutService(config, link, runner, runner, FirstWeights(), LifeSign(directory / "beat"))
    serving = asyncio.create_task(service.run())
    try:
        seconds = await asyncio.wait_for(lease_out(router, episodes), 600)
        await asyncio.wait_for(serving, 60)
    finally:
        serving.cancel()
        router.close(linger=0)
        dealer.close(linger=0)
        context.term()
        await fleet.close()
    return fleet.played, seconds


async def lease_out(router: zmq.asyncio.Socket, episodes: int) -> float:
    """The controller's end: leases for free slots until all trajectories are there."""
    granted, returned, start = 0, 0, 0.0
    while returned < episodes:
        peer, *frames = await router.recv_multipart()
        message, _ = decode(frames, FromWorker)
        answer: Any = None
        if isinstance(message, Hello | Heartbeat):
            answer = Welcome([], "benchmark")
        elif isinstance(message, Credit) and granted < episodes and message.free:
            start = start or time.perf_counter()
            numbers = range(granted, min(granted + message.free, episodes))
            answer, granted = Leases([make_lease(number) for number in numbers]), numbers.stop
        elif isinstance(message, Trajectories):
            answer, returned = Ack(message.seq), returned + len(message.lease_ids)
        if answer is not None:
            await router.send_multipart([peer, *encode(answer)])
    seconds = time.perf_counter() - start
    await router.send_multipart([peer, *encode(Stop("done"))])
    return seconds


def make_lease(number: int) -> Lease:
    return Lease(
        lease_id=f"episode-{number}",
        prompt_id=f"prompt-{number}",
        group_id=f"prompt-{number}",
        split="train",
        prompt_index=number,
        task="calculator",
        seed=number,
        temperature=1.0,
        min_version=0,
    )


async def bare(played: Played, url: str, concurrency: int) -> tuple[int, float]:
    """The same requests as bare posts: ``concurrency`` lanes, an episode's one after the other. (Tokens, seconds)."""
    waiting, tokens, other = list(reversed(played.values())), 0, 0

    async def lane(session: aiohttp.ClientSession) -> None:
        nonlocal tokens, other
        while waiting:
            for request, expected in waiting.pop():
                async with session.post(f"{url}/generate", json=bare_request(request)) as response:
                    answer = await response.json()
                tokens += len(answer["output_ids"])
                other += answer["output_ids"] != expected

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        start = time.perf_counter()
        await asyncio.gather(*(lane(session) for _ in range(concurrency)))
        seconds = time.perf_counter() - start
    requests = sum(map(len, played.values()))
    if other > 0.01 * requests:
        raise SystemExit(f"{other} of {requests} requests gave other tokens: the two ways did different work")
    return tokens, seconds


def bare_request(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "input_ids": list(request.input_ids),
        "return_logprob": True,
        "logprob_start_len": -1,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "sampling_seed": (sampling.seed or 0) % 2**63,
        },
    }


async def forget(url: str) -> None:
    """Empty the prefix cache, so that both ways start from nothing."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache") as response:
        response.raise_for_status()


async def measure(config: Config, path: Path, url: str, directory: Path, episodes: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of both ways, for each repeat; the first one is not counted."""
    rates: dict[str, list[float]] = {"worker": [], "bare": []}
    for repeat in range(repeats + 1):
        home = directory / str(repeat)
        home.mkdir()
        played, seconds = await through_worker(config, path, url, home, episodes)
        tokens = sum(len(ids) for turns in played.values() for _, ids in turns)
        await forget(url)
        bare_tokens, bare_seconds = await bare(played, url, config.rollout.concurrency)
        await forget(url)
        print(f"{tokens} tokens: worker {tokens / seconds:.0f} a second, bare {bare_tokens / bare_seconds:.0f}")
        if repeat:
            rates["worker"].append(tokens / seconds)
            rates["bare"].append(bare_tokens / bare_seconds)
    ratios = sorted(ours / theirs for ours, theirs in zip(rates["worker"], rates["bare"], strict=True))
    return {**rates, "ratio": ratios[len(ratios) // 2]}


def config_of(model: Path, concurrency: int, **sglang: Any) -> Config:
    """A run with this much of a worker; ``sglang``: options of the servers."""
    return Config.model_validate(
        {
            "run": {"name": "benchmark"},
            "model": {"path": str(model)},
            "actor": {"optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-3}},
            "loop": {"steps": 100},
            "rollout": {"engine": "sglang", "concurrency": concurrency, "sglang": sglang},
        }
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        model.mkdir()
        write_tokenizer(model)
        write_model(model, seed=0, hidden=128, layers=2, experts=8, moe_hidden=96)
        config = config_of(model, given.concurrency)
        with serving(config, model, directory) as url:
            found = asyncio.run(measure(config, model, url, directory, given.episodes, given.repeats))
    print(f"worker / bare = {found['ratio']:.3f} at {given.concurrency} concurrent episodes (median)")
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
