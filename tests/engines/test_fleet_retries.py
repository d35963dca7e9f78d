"""How often a request may lose its server, and how long it waits in between: with servers that cut every stream."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_checkpoints import load_tensors, make_checkpoint, moe_config
from misbehaving_server import Misbehaving, make_engine, piece, with_fleet

from megasao.rollout.engines.base import EngineError, GenerateRequest, GenerateResult, SamplingParams
from megasao.rollout.fleet import Fleet

REQUEST = GenerateRequest("request", "session", [1, 2], SamplingParams(1.0, 6, stop_token_ids=(9,), seed=1))
TOKENS = [3, 4, 5, 6, 7, 8]


class Cutting(Misbehaving):
    """Cuts the first ``cuts`` streams, each after one more of ``TOKENS`` if ``gives``, or before any.

    With ``aborts`` it says then that somebody has ended the request.
    """

    def __init__(self, cuts: int, *, gives: bool = False, aborts: bool = False) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._cuts, self._gives, self._aborts = cuts, gives, aborts

    async def _generate(self, request: Any) -> Any:
        known = len((await request.json())["input_ids"]) - 2
        self.asked.append(known)
        rest = TOKENS[known:]
        if len(self.asked) <= self._cuts:
            self.pieces, self.then = [piece(rest[:1])] if self._gives else [], "drop"
            if self._aborts:
                self.pieces, self.then = [piece(rest[:1], finish="abort", spans=[(self.label, 0, 1)])], "end"
        else:
            self.pieces = [piece(rest, finish="length", spans=[(self.label, 0, len(rest))])]
            self.then = "end"
        return await super()._generate(request)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What the fleet's tasks wait, by their first word, and do not wait here."""
    found: dict[str, list[float]] = {"request": [], "recover": []}
    sleep = asyncio.sleep

    async def recorded(delay: float, result: Any = None) -> Any:
        if sys._getframe(1).f_globals["__name__"] != "megasao.rollout.fleet":
            return await sleep(delay, result)
        task = asyncio.current_task()
        assert task is not None
        found[task.get_name().split()[0]].append(delay)
        return await sleep(0.001, result)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


def play(checkpoint: Path, directory: Path, servers: list[Cutting], retries: int, *, routed: bool = False) -> Any:
    async def request(fleet: Fleet) -> GenerateResult:
        return await asyncio.create_task(fleet.generate(REQUEST), name="request")

    return with_fleet(checkpoint, directory, servers, retries, request, routed=routed)


@pytest.mark.parametrize("retries", [0, 1, 3, 8])
def test_a_request_fails_with_its_last_retry_and_waits_longer_each_time(
    checkpoint: Path, tmp_path: Path, pauses: dict[str, list[float]], retries: int
) -> None:
    server = Cutting(10**6)
    with pytest.raises(EngineError, match=rf"'request' lost its server {retries + 1} times"):
        play(checkpoint, tmp_path, [server], retries)
    assert server.asked == [0] * (retries + 1)
    assert pauses["request"] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0][: max(0, retries - 1)]


@pytest.mark.parametrize("aborts", [False, True])
def test_losses_up_to_the_limit_cost_nothing_but_time(
    checkpoint: Path, tmp_path: Path, pauses: dict[str, list[float]], aborts: bool
) -> None:
    """Each time the request goes on from one token more; with one retry less it fails."""
    server = Cutting(3, gives=True, aborts=aborts)
    result = play(checkpoint, tmp_path / "three", [server], 3)
    assert (result.output_ids, result.weight_versions) == (TOKENS, [(0, 0)])
    assert server.asked == [0, 1, 2, 3] and pauses["request"] == [0.5, 1.0]
    with pytest.raises(EngineError, match="lost its server 3 times"):
        play(checkpoint, tmp_path / "two", [Cutting(3, gives=True, aborts=aborts)], 2)


def test_another_server_goes_on_at_once(checkpoint: Path, tmp_path: Path, pauses: dict[str, list[float]]) -> None:
    """The first time; a second loss in a row is no accident of one server."""
    servers = [Cutting(1), Cutting(1)]
    assert play(checkpoint, tmp_path, servers, 3).output_ids == TOKENS
    assert pauses["request"] == [0.5] and {len(server.asked) for server in servers} <= {1, 2}


def test_behind_a_router_already_the_first_loss_waits(
    checkpoint: Path, tmp_path: Path, pauses: dict[str, list[float]]
) -> None:
    """Nobody knows which server it was."""
    server = Cutting(3)
    assert play(checkpoint, tmp_path, [server], 3, routed=True).output_ids == TOKENS
    assert pauses["request"] == [0.25, 0.5, 1.0]


def test_a_server_that_is_away_is_looked_for_less_and_less_often(
    checkpoint: Path, tmp_path: Path, pauses: dict[str, list[float]]
) -> None:
    """And is used again when it takes the weights."""
    servers = [Cutting(0), Cutting(0)]

    async def body(fleet: Fleet) -> list[str]:
        before = len(fleet.usable)
        servers[1].update = {"success": False, "message": "not now"}
        await fleet.prepare_weights(1, load_tensors(checkpoint))
        await fleet.commit_weights(1)
        assert len(fleet.usable) == before - 1
        while len(pauses["recover"]) < 8:
            await asyncio.sleep(0.01)
        servers[1].update = {"success": True}
        while len(fleet.usable) < before:
            await asyncio.sleep(0.01)
        return [server.label for server in servers]

    labels = with_fleet(checkpoint, tmp_path, servers, 0, body)
    assert pauses["recover"][:8] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert labels[0] == labels[1] and labels[0].startswith("1.")


def test_a_server_that_is_lost_again_while_it_comes_back_is_not_given_up(
    checkpoint: Path, tmp_path: Path, pauses: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was sent before may say so at any moment, also between the join and the end of the recovery."""
    join, joins = Fleet._join, []

    async def lost_at_once(self: Fleet, replica: Any) -> None:
        await join(self, replica)
        joins.append(replica.url)
        if len(joins) == 1:
            self._lose(replica, "an earlier request")

    async def body(fleet: Fleet) -> list[str]:
        monkeypatch.setattr(Fleet, "_join", lost_at_once)
        [replica] = fleet._replicas.values()
        fleet._lose(replica, "the first time")
        assert replica.recovery is not None
        await replica.recovery
        return fleet.usable

    usable = with_fleet(checkpoint, tmp_path, [Cutting(0)], 1, body)
    assert usable == joins[:1] and len(joins) == 2


def test_busy_seconds_grow_and_never_jump_when_servers_come_and_go(checkpoint: Path, tmp_path: Path) -> None:
    servers = [Cutting(0), Cutting(0)]

    async def body(fleet: Fleet) -> list[float]:
        await fleet.generate(REQUEST)
        busy = {replica.url: replica.engine.stats()["busy_seconds"] for replica in fleet._replicas.values()}
        found = [fleet.stats()["busy_seconds"]]
        await fleet.remove(max(busy, key=busy.__getitem__))
        found.append(fleet.stats()["busy_seconds"])
        async with Cutting(0).running() as url:
            await fleet.add(make_engine(url, checkpoint, tmp_path / "added"))
            found.append(fleet.stats()["busy_seconds"])
            await fleet.generate(REQUEST)
            return [*found, fleet.stats()["busy_seconds"]]

    first, removed, added, later = with_fleet(checkpoint, tmp_path, servers, 1, body)
    assert first > 0 and [removed, added] == pytest.approx([first, first]) and later > added
