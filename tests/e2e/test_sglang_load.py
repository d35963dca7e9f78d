"""256 episodes at a time on two SGLang servers that are killed again and again: none is lost, and none comes twice."""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.launch.local import LocalRun
from megasao.launch.prepare import prepared_run
from megasao.launch.process import Guardian
from megasao.launch.roles import RoleCommand, megasao_command
from megasao.launch.supervisor import StopSignals
from megasao.trajectories.ledger import Batch, Dropped
from tests.e2e import runs
from tests.engines.sglang_server import PYTHON, needs_sglang

pytestmark = [pytest.mark.e2e, needs_sglang]

CONCURRENCY, BATCH = 256, 64
SERVERS = ("engine-0-0", "engine-0-1")
DRIVER = Path(__file__).with_name("load_trainer.py")
SECONDS = float(os.environ.get("MEGASAO_LOAD_SECONDS", 600))
"""Of the long version."""
KILL_EVERY_S = 60.0
PATIENCE_S = 1200.0
"""For whatever hangs: no machine is that slow."""
GROWTH, ROOM = 0.03, 8 * 2**20
"""A process is growing that has more than this share, and more than these bytes, beyond what it had: medians of the
last third of its measurements and of the first. The index of the journal's newest segment takes less than that room."""


@dataclass
class Load:
    """What is left of a load run."""

    run: RunDirectory
    report: dict[str, Any]

    @property
    def counters(self) -> dict[str, float]:
        return self.report["counters"]


def load(directory: Path, **options: float) -> Load:
    """The whole run as its launcher would make it, with another trainer."""
    model = runs.write_model(directory / "model")
    path = runs.write_config(
        directory / "config.yaml",
        model,
        loop={"steps": 10**6, "batch_size": BATCH, "max_lag": 50},
        environment={"max_turns": 8, "max_tokens": 110, "max_turn_tokens": 16, "episode_timeout_s": 300.0},
        buffer={"max_trajectories": 2 * CONCURRENCY, "lease_timeout_s": 600.0},
        rollout={"engine": "sglang", "concurrency": CONCURRENCY, "sglang": {"python": str(PYTHON), "servers": 2}},
        supervision={"max_restarts": 100, "start_timeout_s": PATIENCE_S, "hang_timeout_s": PATIENCE_S},
        evaluation={"problems": 1, "every": 0},
    )

    def command(run: RunDirectory) -> RoleCommand:
        ours = megasao_command(run)
        driver = [sys.executable, str(DRIVER), str(run.path), json.dumps(options)]
        return lambda role, index: driver if role == "trainer" else ours(role, index)

    config = load_config(path, [])
    with prepared_run(config, resume=False) as run, StopSignals().installed() as signals, Guardian() as guardian:
        outcome = LocalRun(run, config, command(run), guardian, signals, lambda _: None).train()
    assert outcome == "finished"
    return Load(run, json.loads((run.path / "load.json").read_text(encoding="utf-8")))


def check_leases(counters: Mapping[str, float]) -> None:
    """Every lease has ended: as a trajectory, as a failure with a reason, or because it came back."""
    ends = sum(number for name, number in counters.items() if name.startswith(("accepted/", "failures/", "returned/")))
    assert counters["leases"] == 0
    assert counters["leased"] == ends - counters.get("late", 0) + counters.get("superseded", 0)


def check_trajectories(counters: Mapping[str, float], trained: Sequence[str], dropped: Sequence[str]) -> None:
    """Each that was accepted was handed out once, dropped once, or waits; and no prompt came twice."""
    accepted = sum(number for name, number in counters.items() if name.startswith("accepted/"))
    assert accepted == len(trained) + len(dropped) + counters["buffer"]
    gone = [*trained, *dropped]
    assert len({name.rsplit("-", 1)[0] for name in gone}) == len(set(gone)) == len(gone)


def check_memory(memory: Sequence[int]) -> None:
    third = len(memory) // 3
    before, after = statistics.median(memory[:third]), statistics.median(memory[-third:])
    assert after - before < max(GROWTH * before, ROOM), f"it grew from {before} to {after} bytes"


def check_kills(kills: Sequence[Mapping[str, Any]], nobody_up: Sequence[float], times: int) -> None:
    """One was due in each ``KILL_EVERY_S``, and went to a server that was up, wherever one was."""
    assert len(kills) + len(nobody_up) == times and all(kill["away_s"] is not None for kill in kills)
    absences = {name: [(k["at"], k["at"] + k["away_s"]) for k in kills if k["server"] == name] for name in SERVERS}
    for one in absences.values():
        assert all(back <= killed for (_, back), (killed, _) in pairwise(one)), "a server was killed that was away"
    for at in nobody_up:
        assert all(any(killed < at < back for killed, back in one) for one in absences.values()), "one was up"


def check(found: Load, kill_times: int) -> None:
    print(json.dumps({**found.report, "memory": found.report["memory"][:: max(1, len(found.report["memory"]) // 12)]}))
    kills, launcher = found.report["kills"], (found.run.logs / "launcher.log").read_text(encoding="utf-8")
    check_kills(kills, found.report["nobody_up"], kill_times)
    assert launcher.count("restarting engine-0-") == len(kills) and "restarting trainer" not in launcher, launcher
    worker = (found.run.logs / "rollout-0.log").read_text(encoding="utf-8")
    assert worker.count("is not used until it is back") >= len(kills), "no request noticed"
    assert sorted(found.run.read_endpoints().engines) == ["engine-0-0", "engine-0-evaluation"], "one came and one went"
    assert found.report["versions"] > len(kills), "new weights came all the time"
    check_leases(found.counters)
    records = runs.read_ledger(found.run)
    trained = [name for record in records if isinstance(record, Batch) for name in record.trajectory_ids]
    dropped = [name for record in records if isinstance(record, Dropped) for name in record.trajectory_ids]
    assert len(trained) == BATCH * found.report["steps"]
    check_trajectories(found.counters, trained, dropped)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_servers_are_killed_and_no_lease_is_lost(tmp_path: Path) -> None:
    """A minute of the test below. While one server is away another is added, and the second one is removed."""
    check(load(tmp_path, seconds=10, kill_every_s=10, warm=128, change_at_s=0), kill_times=1)


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 2 * PATIENCE_S)
def test_ten_minutes_with_a_server_killed_every_minute(tmp_path: Path) -> None:
    """Then one comes and one goes: until then there are two to kill."""
    found = load(tmp_path, seconds=SECONDS, kill_every_s=KILL_EVERY_S, warm=512, change_at_s=SECONDS)
    check(found, kill_times=round(SECONDS / KILL_EVERY_S))
    assert {kill["server"] for kill in found.report["kills"]} == set(SERVERS)
    for role in ("rollout", "controller"):
        check_memory([sample[role] for sample in found.report["memory"]])


BOOKS = {"leased": 12, "leases": 0, "accepted/a": 8, "failures/engine_error": 3, "returned/lost_worker": 1, "buffer": 2}


@pytest.mark.parametrize("wrong", [{"leased": 13}, {"leases": 1}, {"failures/engine_error": 2}])
def test_a_lost_lease_is_noticed(wrong: dict[str, float]) -> None:
    check_leases(BOOKS)
    with pytest.raises(AssertionError):
        check_leases({**BOOKS, **wrong})


def test_a_lost_or_doubled_trajectory_is_noticed() -> None:
    names = [f"train-{index}-1" for index in range(6)]
    check_trajectories(BOOKS, names[:5], names[5:])
    for trained in (names[:4], [*names[:4], names[3]], [*names[:4], "train-3-2"]):
        with pytest.raises(AssertionError):
            check_trajectories(BOOKS, trained, names[5:])


def test_memory_that_grows_is_noticed() -> None:
    base = 400 * 2**20
    check_memory([base + 2**20 * (number % 5) for number in range(300)])
    with pytest.raises(AssertionError, match="it grew"):
        check_memory([base + 1000 * 70 * number for number in range(300)])


def test_a_kill_that_was_left_out_is_noticed() -> None:
    first, second = ({"server": name, "at": at, "away_s": 50.0} for name, at in zip(SERVERS, (30.0, 60.0), strict=True))
    check_kills([first, second], [70.0], 3)
    for kills, nobody_up, times in (
        ([first, second], [], 3),
        ([first, second], [90.0], 3),
        ([first, {**second, "away_s": None}], [70.0], 3),
        ([first, {**second, "server": SERVERS[0]}], [], 2),
    ):
        with pytest.raises(AssertionError):
            check_kills(kills, nobody_up, times)
