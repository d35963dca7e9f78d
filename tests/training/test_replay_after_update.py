"""Routing replay where new weights come in the middle of episodes: what it is right for, and what it is not.

The trainer repeats for each token the experts that it went to first. An engine that keeps its cache goes on from just
those; one that computes the cache anew chooses experts by the new weights, which sample the tokens that follow.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.rollout.episode import Transcript
from tests.megatron.tiny import random_sequences, write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world
EPISODES, TURNS, NEW_FROM = 24, 4, 2
UPDATE = 1e-3
"""Of each tensor's standard deviation: an update of many steps at once."""
OLD, NEW = 0, 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The weights before and after the update."""
    directory = tmp_path_factory.mktemp("checkpoints")
    before = write_tiny_checkpoint(directory / "before", num_hidden_layers=4)
    shutil.copytree(before, directory / "after")
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(before / "model.safetensors")
    moved = {
        name: tensor + UPDATE * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }
    save_file(moved, directory / "after" / "model.safetensors", metadata={"format": "pt"})
    return before, directory / "after"


async def play(checkpoints: tuple[Path, Path], kv_after_update: Any) -> list[Transcript]:
    """Episodes of four turns; the new weights come after the second."""
    before, after = checkpoints
    config = EmbeddedEngineConfig(slots=EPISODES, kv_after_update=kv_after_update)
    engine = EmbeddedEngine(before, config, max_total_tokens=96, seed=0)
    await engine.start()
    episodes = [Transcript() for _ in range(EPISODES)]

    async def act(number: int, turn: int) -> None:
        episode = episodes[number]
        episode.observe(random_sequences(TURNS, seed=number, low=2, high=8)[turn])
        options: dict[str, Any] = {"return_routed_experts": True, "routed_experts_from": episode.routed}
        sampling = SamplingParams(1.0, max_new_tokens=10, seed=100 * number + turn, **options)
        request = GenerateRequest(f"{number}/{turn}", str(number), tuple(episode.tokens), sampling)
        episode.act(await engine.generate(request))

    for turn in range(TURNS):
        if turn == NEW_FROM:
            await engine.prepare_weights(1, load_file(after / "model.safetensors"))
            await engine.commit_weights(1)
        await asyncio.gather(*(act(number, turn) for number in range(EPISODES)))
    await engine.close()
    return episodes


def differences(path: Path, episodes: list[Transcript], *, replay: bool) -> list[np.ndarray]:
    """|log p of the trainer at ``path`` - log p of the engine| of the tokens that old weights sampled, and new ones."""
    payload: dict[str, Any] = {
        "path": str(path),
        "sequences": [episode.tokens for episode in episodes],
        "temperatures": [1.0] * len(episodes),
    }
    if replay:
        ids = [np.frombuffer(each.routing(), np.uint8).reshape(len(each.tokens), 4, 2) for each in episodes]
        payload["routed_experts"] = np.concatenate(ids).tolist()
        payload["actor"] = {"optimizer": {"lr": 1e-3}, "router_replay": True}
    ((trainer,),) = run_world(1, "tests.megatron.cases:outputs", payload)
    engine = np.concatenate([episode.logprobs for episode in episodes])
    sampled = np.concatenate([episode.action_mask for episode in episodes])
    versions = np.concatenate([versions_of(episode) for episode in episodes])
    off = np.abs(np.array(trainer[: len(engine)]) - engine)
    return [off[sampled & (versions == version)] for version in (OLD, NEW)]


def versions_of(episode: Transcript) -> np.ndarray:
    starts, versions = zip(*episode.weight_versions, strict=True)
    return np.repeat(versions, np.diff([*starts, len(episode.tokens)]))


def test_an_engine_that_keeps_its_cache_is_followed(checkpoints: tuple[Path, Path]) -> None:
    """What is left is the update itself: for old tokens new weights, for new tokens old keys and values."""
    episodes = asyncio.run(play(checkpoints, "keep"))
    free, replayed = (differences(checkpoints[1], episodes, replay=each) for each in (False, True))
    assert min(map(len, free)) > 400
    for version in (OLD, NEW):
        assert replayed[version].mean() < free[version].mean() / 2, version
        assert replayed[version].max() < free[version].max() / 4, version


def test_after_a_recompute_replay_is_right_for_old_tokens_and_not_for_new_ones(
    checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = asyncio.run(play(checkpoints, "recompute"))
    free, replayed = (differences(checkpoints[1], episodes, replay=each) for each in (False, True))
    with capsys.disabled():
        for name, found in (("free", free), ("replayed", replayed)):
            shown = ", ".join(f"{each.mean():.1e} (largest {each.max():.1e})" for each in found)
            print(f"\n{name}: old tokens, new tokens: {shown}", end="")
    assert replayed[OLD].mean() < free[OLD].mean() / 2
    near_ties = 5
    assert (free[NEW] > 1e-5).sum() <= near_ties, "the trainer alone does what the engine did"
    assert (replayed[NEW] > 1e-5).sum() > 10 * near_ties and replayed[NEW].max() > 0.05, "older experts in the prefix"
