"""Ranks whose payload is with rollout hosts: one that does not get its own makes all ask again, for a bounded time."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megasao.rollout.payload import PayloadService
from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.schema import Trajectory, to_batch
from tests.megatron.world import run_world

pytestmark = pytest.mark.world
NAMES = ["a", "b"]


def row(name: str) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        prompt_id="prompt",
        group_id="group",
        task="task",
        tokens=[1, 2, 3],
        action_mask=[False, True, True],
        rewards=[0.0, 0.0, 1.0],
        weight_versions=[(0, 0)],
        turn_starts=[1],
        finish_reason="done",
        rollout_logprobs=[0.0, -0.5, -0.25],
    )


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[dict[str, PayloadJournal]]:
    """A host for each trajectory, with nothing yet."""
    found = {name: PayloadJournal(tmp_path / name) for name in NAMES}
    services = {name: PayloadService(journal, "127.0.0.1") for name, journal in found.items()}
    addresses.clear()
    addresses.update({name: service.address for name, service in services.items()})
    yield found
    for service in services.values():
        service.close()


addresses: dict[str, str] = {}


def load(directory: Path, batch_timeout_s: float) -> list[Any]:
    entries = [
        {
            "trajectory_id": name,
            "tokens": 3,
            "action_tokens": 2,
            "oldest_version": 0,
            "newest_version": 0,
            "reward": 1.0,
            "payload": addresses[name],
        }
        for name in NAMES
    ]
    payload = {"entries": entries, "directory": str(directory), "batch_timeout_s": batch_timeout_s}
    return run_world(2, "tests.training.payload_cases:load", payload)


def test_all_ranks_ask_again_until_every_one_has_its_rows(journals: dict[str, PayloadJournal], tmp_path: Path) -> None:
    asked: list[str] = []
    fetch = journals["a"].fetch

    def noting(names: list[str]) -> Any:
        asked.extend(names)
        return fetch(names)

    journals["a"].fetch = noting  # type: ignore[method-assign]
    journals["a"].keep(to_batch([row("a")]))

    def later() -> None:
        deadline = time.monotonic() + 60
        while len(asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        journals["b"].keep(to_batch([row("b")]))

    thread = threading.Thread(target=later)
    thread.start()
    assert sorted(load(tmp_path, 120.0)) == [["a"], ["b"]], "each rank has its own"
    thread.join()
    assert len(asked) >= 2, "the rank that had its rows asked with the other"


def test_payload_that_nobody_has_ends_the_wait_on_every_rank(
    journals: dict[str, PayloadJournal], tmp_path: Path
) -> None:
    journals["a"].keep(to_batch([row("a")]))
    reasons = load(tmp_path, 1.0)
    assert sum(f"payload at {addresses['b']}" in reason and "'b'" in reason for reason in reasons) == 1
    assert all(reason.startswith("step 0: ") for reason in reasons), reasons
