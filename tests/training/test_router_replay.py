"""Routing replay: the actor sends tokens where the engine sent them, under any layout, and the mismatch goes away."""

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
from megasao.training.batch import pack_trajectories
from tests.megatron.tiny import random_sequences, write_tiny_checkpoint
from tests.megatron.world import run_world
from tests.training import cases
from tests.training.test_sao_step_layouts import Outcome, check_equal, run

pytestmark = pytest.mark.world
REPLAY = {"actor": {"optimizer": {"lr": 1e-3, "eps": 1e-4}, "router_replay": True}}
SP = {"tensor": 2, "sequence": True}

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 SP PP2 EP2": {"parallel": {"ranks": 4, **SP, "pipeline": 2, "expert": 2}},
    "PP2 VPP2 recomputed": {
        "parallel": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
        "trainer": {"recompute": "full"},
    },
    "CP2": {"parallel": {"ranks": 2, "context": 2}},
}


def run_replay(path: Path, out: Path, settings: dict[str, Any], **payload: Any) -> Outcome:
    return run(path, out, settings["parallel"], settings={**REPLAY, **settings}, steps=2, **payload)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 0 and 2 of 4 are dense: the number of a layer is not its place among those with experts."""
    path = tmp_path_factory.mktemp("checkpoint")
    return write_tiny_checkpoint(path, num_hidden_layers=4, mlp_only_layers=[0, 2])


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_replay(checkpoint, tmp_path_factory.mktemp("reference") / "out", {"parallel": {"ranks": 1}})


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_replay_the_same(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run_replay(checkpoint, tmp_path / "out", LAYOUTS[name]), reference)


def test_experts_of_other_tokens_are_noticed(checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    settings = {"parallel": {"ranks": 2, **SP, "expert": 2}}
    check_equal(run_replay(checkpoint, tmp_path / "right", settings), reference)
    wrong = run_replay(checkpoint, tmp_path / "wrong", settings, mutation="replay_of_rank_0")
    with pytest.raises(AssertionError):
        check_equal(wrong, reference)


def test_replay_is_the_actors_alone(checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    free = run(checkpoint, tmp_path / "out", {"ranks": 1}, steps=2)
    assert abs(free.metrics[0]["actor/loss"] - reference.metrics[0]["actor/loss"]) > 1e-3
    for name in ("critic/loss", "critic/value_mean", "critic/grad_norm"):
        assert free.metrics[0][name] == reference.metrics[0][name], name


def test_the_load_of_experts_is_that_of_all_tokens(checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    routing = cases.Routing(layers=2, top_k=2, experts=8)
    rows = cases.routed_anywhere(cases.grouped(cases.trajectories(0), 1), routing)
    ids = np.concatenate([routing.decode(row.routed_experts or b"", len(row.tokens)) for row in rows])
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=8) for layer in range(2)])
    expected = float((counts.max(1) / counts.mean(1)).mean())
    other = run_replay(checkpoint, tmp_path / "out", {"parallel": {"ranks": 4, "pipeline": 2, "expert": 2}})
    for outcome in (reference, other):
        assert outcome.metrics[0]["actor/expert_load_max"] == pytest.approx(expected)
        assert outcome.metrics[0]["actor/experts_unused"] == (counts == 0).mean()


# against the engine


async def play(path: Path, count: int) -> list[tuple[list[int], dict[int, float], np.ndarray]]:
    """Episodes of three turns: tokens, log-probabilities of the sampled ones by position, experts [T, M, K]."""
    engine = EmbeddedEngine(path, EmbeddedEngineConfig(slots=count), max_total_tokens=96, seed=0)
    await engine.start()

    async def episode(number: int) -> tuple[list[int], dict[int, float], np.ndarray]:
        transcript = Transcript()
        for turn, observation in enumerate(random_sequences(3, seed=number, low=2, high=8)):
            transcript.observe(observation)
            sampling = SamplingParams(1.0, max_new_tokens=10, seed=100 * number + turn, return_routed_experts=True)
            request = GenerateRequest(f"{number}/{turn}", str(number), tuple(transcript.tokens), sampling)
            transcript.act(await engine.generate(request))
        sampled = {place: transcript.logprobs[place] for place in np.flatnonzero(transcript.action_mask)}
        ids = np.frombuffer(transcript.routing(), np.uint8).reshape(len(transcript.tokens), 2, 2)
        return transcript.tokens, sampled, ids

    try:
        return await asyncio.gather(*map(episode, range(count)))
    finally:
        await engine.close()


def disturbed(checkpoint: Path, directory: Path) -> Path:
    """A copy whose routers differ a little, as another kernel's rounding would make them."""
    shutil.copytree(checkpoint, directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name] = tensors[name] + 2e-3 * tensors[name].std() * noise
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def mismatch(path: Path, episodes: list[Any], *, replay: bool) -> float:
    """Largest |log p of the trainer at ``path`` - log p of the engine| over the sampled tokens."""
    payload: dict[str, Any] = {
        "path": str(path),
        "sequences": [tokens for tokens, _, _ in episodes],
        "temperatures": [1.0] * len(episodes),
        **REPLAY,
    }
    if replay:
        payload["routed_experts"] = np.concatenate([ids for _, _, ids in episodes]).tolist()
    ((logprobs,),) = run_world(1, "tests.megatron.cases:outputs", payload)
    worst, start = 0.0, 0
    for tokens, sampled, _ in episodes:
        worst = max(worst, *(abs(logprobs[start + place] - logprob) for place, logprob in sampled.items()))
        start += len(tokens)
    return worst


def test_the_mismatch_of_a_disturbed_router_is_gone(checkpoint: Path, tmp_path: Path) -> None:
    """A near-tie that falls the other way changes a token's log-probability by far more than the disturbance does."""
    episodes = asyncio.run(play(checkpoint, 24))
    other = disturbed(checkpoint, tmp_path / "other")
    assert mismatch(checkpoint, episodes, replay=True) < 1e-5
    free, replayed = (mismatch(other, episodes, replay=replay) for replay in (False, True))
    assert replayed < free / 5, (free, replayed)
    late = [(tokens, sampled, np.roll(ids, 1, axis=0)) for tokens, sampled, ids in episodes]
    assert mismatch(checkpoint, late, replay=True) > 0.1, "the experts of the token before are not this token's"


# what is refused


def test_a_trajectory_without_its_experts_is_named() -> None:
    rows = cases.trajectories(0, 2)
    routing = cases.Routing(layers=2, top_k=2, experts=8)
    whole = cases.routed_anywhere(rows, routing)
    packed = pack_trajectories(whole, data_rank=0, data_size=1, token_budget=4096, routing=routing)
    ids = packed.rows[0].row.routed_experts
    assert ids is not None and ids.shape == (sum(len(row.tokens) for row in rows), 2, 2)
    with pytest.raises(ValueError, match=r"trajectory t1: routed_experts: expected \d+ bytes .* got 0"):
        pack_trajectories([whole[0], rows[1]], data_rank=0, data_size=1, token_budget=4096, routing=routing)
