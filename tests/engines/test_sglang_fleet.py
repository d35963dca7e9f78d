"""Two real SGLang servers as one engine: where episodes go, and what becomes of them when a server is killed, hangs,
or is drained."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from expert_contract import chosen_by_transformers
from sglang_server import RunningServer, imports, needs_sglang, routing, sglang_config

from megasao.rollout.engines.base import EngineError, GenerateRequest, GenerateResult, SamplingParams
from megasao.rollout.engines.parts import joined, rest_of
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.engines.sglang_weights import read_layout
from megasao.rollout.fleet import Fleet, preference
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
        RunningServer(checkpoint, tmp_path_factory.mktemp("server"), CONFIG, max_tokens=MAX_TOTAL, routed_experts=True)
        for _ in range(2)
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

    def engine(self, server: RunningServer, router: str | None = None) -> SGLangEngine:
        return SGLangEngine(
            server.url,
            self.checkpoint,
            CONFIG,
            staging=self.directory / str(server.port),
            max_total_tokens=MAX_TOTAL,
            seed=1,
            start_timeout_s=240.0,
            update_timeout_s=30.0,
            router=router,
        )

    def run(self, body: Callable[[Fleet], Awaitable[Any]], *, count: int = 2, router: str | None = None) -> Any:
        async def whole() -> Any:
            engines = [self.engine(server, router) for server in self.servers[:count]]
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


def make_request(
    session: str, *, ids: list[int] = PROMPT, tokens: int = LONG, experts: bool = False
) -> GenerateRequest:
    sampling = SamplingParams(1.0, tokens, seed=5, return_routed_experts=experts)
    return GenerateRequest(f"{session}/{len(ids)}", session, ids, sampling)


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


@needs_sglang
def test_experts_of_a_turn_are_whole_whatever_cuts_it(world: World) -> None:
    """An update with requests in flight, then a drained server: every token has the experts it was sampled with."""

    async def body(fleet: Fleet) -> list[GenerateResult]:
        whole = await fleet.generate(make_request("whole", experts=True))
        running = asyncio.create_task(fleet.generate(make_request("updated", experts=True)))
        await until_generated(fleet, 20)
        await load(fleet, 2, load_tensors(world.checkpoint))
        updated = await running
        running = asyncio.create_task(fleet.generate(make_request("drained", experts=True)))
        await until_generated(fleet, 20)
        await fleet.drain(fleet._placed["drained"].url)
        return [whole, updated, await running]

    whole, updated, drained = world.run(body)
    assert updated.weight_versions[-1][1] == 2 and len(updated.weight_versions) == 2
    expected = chosen_by_transformers(world.checkpoint, [*PROMPT, *whole.output_ids])[:-1]
    for result in (whole, updated, drained):
        assert (result.finish_reason, result.output_ids) == ("length", whole.output_ids)
        assert result.routed_experts is not None and len(result.routed_experts) == len(PROMPT) + LONG - 1
        assert (np.sort(result.routed_experts) == expected).all()
    check(world.checkpoint, updated)


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
@pytest.mark.full
@pytest.mark.skipif(not imports("sglang_router"), reason="SGLang's environment has no sglang-router")
def test_a_router_may_choose_the_servers(world: World) -> None:
    """Episodes stay where it puts them; weights and health are still those of each server."""
    changed = perturb(load_tensors(world.checkpoint), 6)
    names = [f"episode-{index}" for index in range(6)]

    async def two_turns(fleet: Fleet, name: str, index: int) -> GenerateResult:
        first = await fleet.generate(make_request(name, ids=[index, *PROMPT], tokens=20))
        second = await fleet.generate(make_request(name, ids=[index, *PROMPT, *first.output_ids, 7], tokens=2))
        assert second.metrics["cached_tokens"] >= len(PROMPT) + 20, "another server has not these keys and values"
        return first

    async def body(fleet: Fleet) -> list[GenerateResult]:
        found = await asyncio.gather(*(two_turns(fleet, name, index) for index, name in enumerate(names)))
        assert all(result.weight_versions == [(0, 1)] for result in found)
        stopped = make_request("stopped")
        running = asyncio.create_task(fleet.generate(stopped))
        await until_generated(fleet, 10)
        await fleet.abort(stopped.request_id)
        assert (await running).finish_reason == "abort", "whichever server has it"
        await load(fleet, 2, changed)
        before = [await fleet.generate(make_request(f"before-{index}", tokens=8)) for index in range(4)]
        # One of them has other weights, as after a restart that nobody saw.
        stranger = fleet._replicas[world.servers[1].url].engine
        body = {"model_path": str(world.checkpoint), "load_format": "safetensors", "weight_version": "3.stranger"}
        await stranger._client.call("/update_weights_from_disk", body, 60.0)  # type: ignore[union-attr]
        after = await asyncio.gather(
            *(fleet.generate(make_request(f"after-{index}", tokens=8)) for index in range(8)),
        )
        assert fleet.stats()["continued_requests"] > 0, "no request came to the stranger"
        return [*before, *after]

    workers = ["--worker-urls", *(server.url for server in world.servers), "--policy", "manual"]
    with routing([*workers, "--assignment-mode", "min_load"], world.directory / "router.log") as router:
        found = world.run(body, router=router)
    assert all(result.weight_versions == [(0, 2)] for result in found)
    path = save_tensors(world.checkpoint, world.directory / "routed", changed)
    for result in found:
        check(path, result)


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
def test_an_episode_outlives_an_abort_that_its_worker_did_not_ask_for(world: World) -> None:
    """Somebody ends all requests of the server; one that the worker gives up itself stays ended."""

    async def body(fleet: Fleet) -> tuple[list[GenerateResult], GenerateResult]:
        found = [await fleet.generate(make_request("whole"))]
        while not fleet.stats()["continued_requests"]:  # on a busy machine a request may have ended before
            running, server = await stopped_in_the_middle(fleet, world)
            client = fleet._replicas[server.url].engine._client
            assert client is not None
            aborting = asyncio.create_task(client.call("/abort_request", {"rid": "", "abort_all": True}, 60.0))
            await asyncio.sleep(0.1)
            server.signal(signal.SIGCONT)
            await aborting
            found.append(await running)
        while True:
            given_up = make_request("given up")
            running = asyncio.create_task(fleet.generate(given_up))
            await until_generated(fleet, 5)
            await fleet.abort(given_up.request_id)
            if (result := await running).finish_reason == "abort":
                return found, result

    found, given_up = world.run(body)
    for result in found:
        assert (result.finish_reason, result.output_ids) == ("length", found[0].output_ids)
        check(world.checkpoint, result)
    assert given_up.output_ids == found[0].output_ids[: len(given_up.output_ids)] and len(given_up.output_ids) < LONG


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


def idle_fleet(make: Callable[[str], SGLangEngine], checkpoint: Path, directory: Path, count: int) -> Fleet:
    """A fleet that was not started, for what it decides without asking a server."""
    engines = [make(f"http://server-{index}") for index in range(count)]
    fleet = Fleet(engines, checkpoint, staging=directory, retries=0, patience_s=1.0)
    for replica in fleet._replicas.values():
        replica.usable = True
    return fleet


@pytest.fixture
def idle(checkpoint: Path, tmp_path: Path) -> Callable[[int], Fleet]:
    """Makes a fleet of so many servers that was not started."""

    def make(url: str) -> SGLangEngine:
        return SGLangEngine(
            url,
            checkpoint,
            CONFIG,
            staging=tmp_path / "weights",
            max_total_tokens=MAX_TOTAL,
            seed=1,
            start_timeout_s=1.0,
            update_timeout_s=1.0,
        )

    return lambda count: idle_fleet(make, checkpoint, tmp_path, count)


async def places(fleet: Fleet, names: Sequence[str]) -> list[str]:
    return [(await fleet._place(name)).url for name in names]


def test_a_server_that_would_hold_too_many_gets_no_new_episodes(
    idle: Callable[[int], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these want the same one, and get it as long as it holds no more than 1.25 times its share."""
    first, *others = (f"http://server-{index}" for index in range(4))
    wanted = [
        name
        for name in (f"episode-{index}" for index in range(400))
        if all(preference(name, first) > preference(name, other) for other in others)
    ]
    found = asyncio.run(places(idle(4), wanted))
    assert len(wanted) > 60 and found.count(first) == pytest.approx(1.25 * len(wanted) / 4, abs=1)
    assert min(found.count(other) for other in others) > 0.1 * len(wanted)
    monkeypatch.setattr("megasao.rollout.fleet.OVERLOAD", 100.0)
    assert set(asyncio.run(places(idle(4), wanted))) == {first}


def test_episodes_of_a_server_that_died_spread_and_the_others_stay(idle: Callable[[int], Fleet]) -> None:
    names = [f"episode-{index}" for index in range(120)]

    async def body() -> tuple[list[str], list[str], list[str]]:
        fleet = idle(3)
        before = await places(fleet, names)
        lost = fleet._replicas["http://server-0"]
        lost.usable = False
        after = await places(fleet, names)
        lost.usable = True
        return before, after, await places(fleet, names)

    before, after, later = asyncio.run(body())
    assert {one for one, two in zip(before, after, strict=True) if one != two} == {"http://server-0"}
    assert set(after) == {"http://server-1", "http://server-2"} and set(later) == set(before)
    moved = [two for one, two in zip(before, after, strict=True) if one == "http://server-0"]
    assert min(moved.count(url) for url in set(after)) > len(moved) / 5


def test_episodes_leave_a_server_that_holds_far_more_than_its_share(idle: Callable[[int], Fleet]) -> None:
    """As when the others come back: at their next turns they go, until the rest is no more than 1.5 times its share."""
    names = [f"episode-{index}" for index in range(120)]

    async def body() -> tuple[list[str], list[str]]:
        fleet = idle(2)
        other = list(fleet._replicas.values())[1]
        other.usable = False
        alone = await places(fleet, names)
        other.usable = True
        first = await places(fleet, names)
        assert await places(fleet, names) == first, "balanced enough: nobody moves again"
        return alone, first

    alone, after = asyncio.run(body())
    assert set(alone) == {"http://server-0"}
    assert after.count("http://server-0") == 90 and after.count("http://server-1") == 30
    assert after[30:] == alone[30:], "the first that came by moved, and the others kept their cache"


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
    rows = np.arange(6, dtype=np.uint8).reshape(6, 1, 1)
    first, second = replace(first, routed_experts=rows[:3]), replace(second, routed_experts=rows[3:])
    sampling = SamplingParams(1.0, 5, return_routed_experts=True)
    rest = rest_of(GenerateRequest("turn", "episode", [8, 9], sampling), first)
    assert (rest.input_ids, rest.sampling.max_new_tokens) == ([8, 9, 1, 2], 3)
    assert rest.sampling.routed_experts_from == 3, "the last of four tokens was not computed yet"
    whole = joined(first, second)
    assert (whole.output_ids, whole.logprobs) == ([1, 2, 3, 4, 5], [-1.0, -2.0, -3.0, -4.0, -5.0])
    assert whole.weight_versions == [(0, 4), (3, 5)]
    assert whole.routed_experts is not None and (whole.routed_experts == rows).all()
    assert (whole.finish_reason, whole.metrics) == ("length", {"seconds": 3.0})
