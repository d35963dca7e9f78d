"""Where a study's rollouts come from: ages within the config's bounds, whole groups, no idle slot. Real engine."""

from pathlib import Path

import pytest

from megasao.config import Config
from megasao.config.load import load_config
from megasao.studies.fleet import SimulatedFleet
from megasao.studies.play import Player
from megasao.studies.staleness import BoundedStaleness
from megasao.studies.tiny_model import write_model, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    write_model(path, seed=1, hidden=16, layers=1, experts=0, moe_hidden=0)
    return path


def config_of(model: Path, *changes: str) -> Config:
    changes = (f"model.path={model}", "environment.options.operations=1", "environment.max_turn_tokens=3", *changes)
    return load_config("configs/studies/online.yaml", changes)


def weights(player: Player, model: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def batches(config: Config, model: Path, source, steps: int) -> list[list]:
    with Player(model, config) as player:
        rollouts, found = source(config, player), []
        tensors = weights(player, model)
        rollouts.published(0, tensors)
        for version in range(steps):
            found.append(rollouts.next_batch(version))
            rollouts.published(version + 1, tensors)
    return found


def lags(found: list[list]) -> list[set[int]]:
    return [{version - t.oldest_version for t in batch} for version, batch in enumerate(found)]


def test_without_a_stale_share_every_rollout_is_as_old_as_the_bound_permits(model):
    config = config_of(model, "loop.batch_size=8", "loop.max_lag=2")
    found = batches(config, model, BoundedStaleness, 7)
    assert lags(found) == [{0}, {0}, {1}, {1}, {2}, {2}, {2}]
    indices = [t.trajectory_id for batch in found for t in batch]
    assert len(set(indices)) == len(indices) == 7 * 8, "every rollout is used once"


def test_the_stale_share_is_a_share_of_groups_and_their_ages_vary(model):
    config = config_of(
        model,
        "configs/algorithms/grpo.yaml",
        "loop.batch_size=32",
        "loop.group_size=4",
        "loop.max_stale_share=0.5",
        "loop.max_lag=8",
    )
    found = batches(config, model, BoundedStaleness, 20)
    for version, batch in enumerate(found):
        stale = [t for t in batch if t.oldest_version < version]
        assert len(stale) == (16 if version >= 2 else 0)
        ages: dict[str, set[int]] = {}
        for t in batch:
            ages.setdefault(t.group_id, set()).add(version - t.oldest_version)
        assert all(len(age) == 1 for age in ages.values()), "a group has one age"
        assert len(ages) == 8
    assert set.union(*lags(found)) == set(range(9)), "every age up to the bound, and none beyond"


def test_a_fleet_never_idles_and_its_batches_hold_whole_groups_within_the_bound(model):
    config = config_of(
        model,
        "configs/algorithms/grpo.yaml",
        "loop.batch_size=16",
        "loop.group_size=4",
        "loop.max_lag=1",
        "rollout.concurrency=16",
    )
    with Player(model, config) as player:
        fleet, tensors = SimulatedFleet(config, player, sigma=1.5, training=0.5), weights(player, model)
        fleet.published(0, tensors)
        used: set[str] = set()
        for version in range(12):
            batch = fleet.next_batch(version)
            assert len(fleet._running) == 16, "every slot has an episode"
            assert max(version - t.oldest_version for t in batch) <= 1
            groups: dict[str, int] = {}
            for t in batch:
                groups[t.group_id] = groups.get(t.group_id, 0) + 1
                assert t.trajectory_id not in used
                used.add(t.trajectory_id)
            assert set(groups.values()) == {4}
            assert {t.prompt_id for t in batch if t.group_id == batch[0].group_id} == {batch[0].prompt_id}
            fleet.published(version + 1, tensors)
        notes = fleet.notes()
    assert notes["fleet/dropped"] > 0, "with a bound of one version the long tail costs rollouts"
    assert notes["fleet/begun"] >= 12 * 16 + notes["fleet/dropped"]


def test_a_lag_bound_that_never_binds_drops_nothing(model):
    config = config_of(model, "loop.batch_size=16", "loop.max_lag=50", "rollout.concurrency=16")
    with Player(model, config) as player:
        fleet, tensors = SimulatedFleet(config, player, sigma=0.5, training=0.5), weights(player, model)
        fleet.published(0, tensors)
        for version in range(6):
            fleet.next_batch(version)
            fleet.published(version + 1, tensors)
        assert fleet.notes()["fleet/dropped"] == 0
