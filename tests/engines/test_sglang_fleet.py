"""Two real SGLang servers as one engine: where episodes go, and what becomes of them when a server is killed, hangs,
or is drained."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_checkpoints import (
    MAX_TOTAL,
    Reference,
    load_tensors,
    make_checkpoint,
    moe_config,
    perturb,
    save_tensors,
)
from sglang_server import RunningServer, needs_sglang, sglang_config

from megasao.rollout.engines.base import EngineError, GenerateRequest, GenerateResult, SamplingParams
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.engines.sglang_weights import read_layout
from megasao.rollout.fleet import Fleet, joined, preference
from megasao.weights.directory import prune
from megasao.weights.nodes import NodeDirectory, NodeWeights, ServerNodes
from megasao.weights.shared import ShareTensors
from tests.weights.share_world import cut_in_two
from tests.weights.weight_world import Disk, opened, write_version

CONFIG = sglang_config(stream_interval=1, silence_timeout_s=5.0)
LONG = 180
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    running = [
        RunningServer(checkpoint, tmp_path_factory.mktemp("server"), CONFIG, max_tokens=MAX_TOTAL) for _ in range(2)
    ]
    try:
        yield [server.wait() for server in running]
    finally:
        for server in running:
            server.kill()


class World:
    """A fleet on the servers, for one test."""

    def __init__(self, checkpoint: Path, servers: list[RunningServer], directory: Path) -> None:
        self.checkpoint, self.servers, self.directory = checkpoint, servers, directory

    def engine(self, server: RunningServer) -> SGLangEngine:
        return SGLangEngine(
            server.url,
            self.checkpoint,
            CONFIG,
            staging=self.directory / str(server.port),
            max_total_tokens=MAX_TOTAL,
            seed=1,
            start_timeout_s=240.0,
            update_timeout_s=30.0,
        )

    def run(self, body: Callable[[Fleet], Awaitable[Any]], *, count: int = 2) -> Any:
        async def whole() -> Any:
            engines = [self.engine(server) for server in self.servers[:count]]
            fleet = Fleet(engines, self.checkpoint, staging=self.directory / "fleet", retries=3, patience_s=60.0)
            await fleet.start()
            try:
                await load(fleet, 1, load_tensors(self.checkpoint))
                return await asyncio.wait_for(body(fleet), 280)
            finally:
                await fleet.close()

        return asyncio.run(whole())

    def server(self, url: str) -> RunningServer:
        return next(server for server in self.servers if server.url == url)


@pytest.fixture
def world(checkpoint: Path, servers: list[RunningServer], tmp_path: Path) -> World:
    return World(checkpoint, servers, tmp_path)


async def load(fleet: Fleet, version: int, tensors: Any) -> None:
    await fleet.prepare_weights(version, tensors)
    await fleet.commit_weights(version)


def make_request(session: str, *, ids: list[int] = PROMPT, tokens: int = LONG) -> GenerateRequest:
    return GenerateRequest(f"{session}/{len(ids)}", session, ids, SamplingParams(1.0, tokens, seed=5))


async def until_generated(fleet: Fleet, more: int) -> None:
    goal = fleet.stats()["generated_tokens"] + more
    async with asyncio.timeout(60):
        while fleet.stats()["generated_tokens"] < goal:
            await asyncio.sleep(0.001)


def check(checkpoint: Path, result: GenerateResult) -> None:
    expected = Reference(checkpoint).logprobs(PROMPT, result.output_ids, 1.0).tolist()
    assert result.logprobs == pytest.approx(expected, abs=5e-5), "rounding of long contexts; other weights are far off"


@needs_sglang
def test_an_episode_stays_on_its_server_and_uses_its_cache_again(world: World) -> None:
    async def body(fleet: Fleet) -> None:
        places = {}
        for index in range(16):
            name = f"episode-{index}"
            first = await fleet.generate(make_request(name, ids=[index, *PROMPT], tokens=20))
            places[name] = fleet._placed[name].url
            second = await fleet.generate(make_request(name, ids=[index, *PROMPT, *first.output_ids, 7], tokens=2))
            assert fleet._placed[name].url == places[name]
            assert second.metrics["cached_tokens"] >= len(PROMPT) + 20
        assert set(places.values()) == {server.url for server in world.servers}
        assert all(list(places.values()).count(url) <= 10 for url in set(places.values())), "none holds nearly all"
        for name in places:
            await fleet.end_session(name)
        assert not fleet._placed

    world.run(body)


async def stopped_in_the_middle(fleet: Fleet, world: World) -> tuple[asyncio.Task[GenerateResult], RunningServer]:
    """A request with less than half of its tokens, and its server, stopped. On a busy machine it may be too late."""
    for number in range(20):
        name, before = f"episode-{number}", fleet.stats()["generated_tokens"]
        running = asyncio.create_task(fleet.generate(make_request(name)))
        await until_generated(fleet, 10)
        server = world.server(fleet._placed[name].url)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what was under way arrives
        if fleet.stats()["generated_tokens"] - before < LONG // 2:
            return running, server
        server.signal(signal.SIGCONT)
        await running
    raise AssertionError("no request was stopped in time")


@needs_sglang
@pytest.mark.parametrize("how", ["drain", "hang", "kill"])
def test_an_episode_outlives_its_server(world: World, how: str) -> None:
    """The last case kills for good; a new process takes the place, and is used once it has the weights."""

    async def body(fleet: Fleet) -> tuple[GenerateResult, GenerateResult]:
        whole = await fleet.generate(make_request("whole"))
        running, lost = await stopped_in_the_middle(fleet, world)
        if how == "drain":
            draining = asyncio.create_task(fleet.drain(lost.url))
            await asyncio.sleep(0.1)
            lost.signal(signal.SIGCONT)
            await draining
        elif how == "kill":
            lost.signal(signal.SIGKILL)
        result = await running
        assert lost.url not in fleet.usable
        assert fleet.stats()["continued_requests"] == 1
        await back(fleet, lost)
        return whole, result

    async def back(fleet: Fleet, lost: RunningServer) -> None:
        """What was missed meanwhile must be there before the server is used again, though its directory is gone."""
        changed = perturb(load_tensors(world.checkpoint), 3)
        disk = Disk(world.directory / "published")
        await load(fleet, 2, opened(write_version(disk.root, 2, "life", changed)))
        prune(disk.root, [])
        if how == "drain":
            await fleet.remove(lost.url)
            assert len(fleet.stats()) and fleet.usable != []
            await fleet.add(world.engine(lost))
        elif how == "hang":
            lost.signal(signal.SIGCONT)
        else:
            lost.process.wait(30)
            again = RunningServer(world.checkpoint, world.directory, CONFIG, max_tokens=MAX_TOTAL, port=lost.port)
            lost.process = again.process
        async with asyncio.timeout(270):
            while lost.url not in fleet.usable:
                await asyncio.sleep(0.05)
        fleet._forget("after")
        fleet._placed["after"] = fleet._replicas[lost.url]
        after = await fleet.generate(make_request("after", tokens=20))
        assert after.weight_versions == [(0, 2)]
        check(save_tensors(world.checkpoint, world.directory / "changed", changed), after)
        with pytest.raises(AssertionError, match="far off"):
            check(world.checkpoint, after)

    whole, result = world.run(body)
    assert (result.finish_reason, result.weight_versions) == ("length", [(0, 1)])
    assert result.output_ids == whole.output_ids, "with a seed an interruption changes nothing"
    check(world.checkpoint, result)


@needs_sglang
def test_with_no_server_left_an_episode_fails_in_time(world: World) -> None:
    async def body(fleet: Fleet) -> None:
        fleet._patience_s = 0.5
        (url,) = fleet.usable
        await fleet.drain(url)
        with pytest.raises(EngineError, match=f"no server of {url} was usable for 0.5 s"):
            await fleet.generate(make_request("episode"))

    world.run(body, count=1)


@needs_sglang
def test_a_server_is_not_used_while_one_of_its_nodes_lacks_the_weights(world: World) -> None:
    """Versions that the nodes take from the trainer's ranks themselves: the second server has two, and one is late."""
    tensors, layout = perturb(load_tensors(world.checkpoint), 6), read_layout(world.checkpoint)

    def node(name: str) -> NodeDirectory:
        return NodeDirectory(world.directory / name, world.directory / f"{name}.json", layout, file_bytes=2**16)

    async def take(one: NodeDirectory) -> None:
        await one.prepare_weights(2, ShareTensors(cut_in_two(tensors), "2.life"))

    async def body(fleet: Fleet) -> list[GenerateResult]:
        first, second, late = (node(name) for name in ("first", "second", "late"))
        for server, names in zip(world.servers, (["first"], ["second", "late"]), strict=True):
            markers = [world.directory / f"{name}.json" for name in names]
            fleet._replicas[server.url].engine._nodes = ServerNodes(world.directory / names[0], markers)
        await take(first)
        await take(second)
        await load(fleet, 2, NodeWeights("2.life"))
        assert fleet.usable == [world.servers[0].url] and fleet.weight_version == 2
        results = [await fleet.generate(make_request("before", tokens=20))]
        await take(late)
        async with asyncio.timeout(60):
            while len(fleet.usable) < 2:
                await asyncio.sleep(0.05)
        for number, server in enumerate(world.servers):
            fleet._placed[str(number)] = fleet._replicas[server.url]
            results.append(await fleet.generate(make_request(str(number), tokens=20)))
        return results

    changed = save_tensors(world.checkpoint, world.directory / "changed", tensors)
    for result in world.run(body):
        assert result.weight_versions == [(0, 2)]
        check(changed, result)


@needs_sglang
def test_a_server_that_dies_during_an_update_leaves_it_to_the_others(world: World) -> None:
    """Last of all: the second server does not come back."""
    tensors, disk = perturb(load_tensors(world.checkpoint), 4), Disk(world.directory / "published")
    weights = opened(write_version(disk.root, 2, "life", tensors))

    async def body(fleet: Fleet) -> GenerateResult:
        await fleet.prepare_weights(2, weights)
        committing = asyncio.create_task(fleet.commit_weights(2))
        await asyncio.sleep(0.01)
        world.servers[1].signal(signal.SIGKILL)
        await committing
        assert fleet.weight_version == 2 and fleet.usable[0] == world.servers[0].url
        fleet._placed["after"] = fleet._replicas[world.servers[0].url]
        return await fleet.generate(make_request("after", tokens=20))

    result = world.run(body)
    assert result.weight_versions == [(0, 2)]
    check(save_tensors(world.checkpoint, world.directory / "changed", tensors), result)


def test_a_server_that_goes_moves_only_its_own_episodes() -> None:
    urls, names = [f"http://server-{index}" for index in range(5)], [f"episode-{index}" for index in range(2000)]
    before = {name: max(urls, key=lambda url: preference(name, url)) for name in names}
    after = {name: max(urls[1:], key=lambda url: preference(name, url)) for name in names}
    assert all(after[name] == place for name, place in before.items() if place != urls[0])
    counts = [list(before.values()).count(url) for url in urls]
    assert min(counts) > 300 and max(counts) < 500


def test_two_parts_of_a_turn_are_one() -> None:
    first = GenerateResult([1, 2], [-1.0, -2.0], [(0, 4)], "abort", {"seconds": 1.0})
    second = GenerateResult([3, 4, 5], [-3.0, -4.0, -5.0], [(0, 4), (1, 5)], "length", {"seconds": 2.0})
    whole = joined(first, second)
    assert (whole.output_ids, whole.logprobs) == ([1, 2, 3, 4, 5], [-1.0, -2.0, -3.0, -4.0, -5.0])
    assert whole.weight_versions == [(0, 4), (3, 5)]
    assert (whole.finish_reason, whole.metrics) == ("length", {"seconds": 3.0})
