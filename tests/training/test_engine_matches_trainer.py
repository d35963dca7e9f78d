"""Log-probabilities that the engine records are the trainer's own at the same weights.

A router near-tie may send a token to another expert in another implementation, and both are right. Such tokens are
found by their router margin and counted; every other token agrees to 1e-5.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.embedded import EmbeddedEngine
from tests.megatron.tiny import random_sequences, write_tiny_checkpoint
from tests.megatron.world import run_world
from tests.training.router_margin import router_margins

pytestmark = pytest.mark.world
BOUND = 1e-5
NEAR_TIE = 1e-5
TEMPERATURES = (1.0, 0.7)


@dataclass
class Episode:
    tokens: list[int]
    logprobs: dict[int, float]
    """By position, for tokens that the engine sampled."""
    temperature: float


async def play(path: Path, count: int) -> list[Episode]:
    """Episodes of four turns, with observations between them, all at once."""
    engine = EmbeddedEngine(path, EmbeddedEngineConfig(slots=count), max_total_tokens=96, seed=0)
    await engine.start()

    async def episode(number: int) -> Episode:
        result = Episode([], {}, TEMPERATURES[number % 2])
        for turn, observation in enumerate(random_sequences(4, seed=number, low=2, high=8)):
            result.tokens += observation
            sampling = SamplingParams(result.temperature, max_new_tokens=10, seed=100 * number + turn)
            request = GenerateRequest(f"{number}/{turn}", str(number), tuple(result.tokens), sampling)
            turn_result = await engine.generate(request)
            assert turn_result.logprobs is not None
            start = len(result.tokens)
            result.logprobs |= {start + offset: value for offset, value in enumerate(turn_result.logprobs)}
            result.tokens += turn_result.output_ids
        return result

    try:
        return await asyncio.gather(*map(episode, range(count)))
    finally:
        await engine.close()


def compare(engine_path: Path, trainer_path: Path) -> tuple[float, float, int, int]:
    """(largest difference off near-ties, on near-ties, tokens off, tokens on)."""
    episodes = asyncio.run(play(engine_path, 24))
    payload = {
        "path": str(trainer_path),
        "sequences": [episode.tokens for episode in episodes],
        "temperatures": [episode.temperature for episode in episodes],
    }
    ((trainer,),) = run_world(1, "tests.megatron.cases:outputs", payload)
    worst, counts, start = {False: 0.0, True: 0.0}, {False: 0, True: 0}, 0
    for episode in episodes:
        margins = router_margins(engine_path, episode.tokens)
        for position, logprob in episode.logprobs.items():
            tie = bool(margins[position] < NEAR_TIE)
            worst[tie] = max(worst[tie], abs(trainer[start + position] - logprob))
            counts[tie] += 1
        start += len(episode.tokens)
    return worst[False], worst[True], counts[False], counts[True]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("engine") / "model")


def changed(checkpoint: Path, directory: Path, *, tie: bool = False, swap: bool = False) -> Path:
    """A copy in which the routers of experts 0 and 1 are tied, and the experts themselves exchanged."""
    shutil.copytree(checkpoint, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in list(tensors):
        if tie and name.endswith("mlp.gate.weight"):
            tensors[name][1] = tensors[name][0]
        if swap and ".experts.0." in name:
            other = name.replace(".experts.0.", ".experts.1.")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_engine_and_trainer_agree(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, on, tokens, ties = compare(checkpoint, checkpoint)
    with capsys.disabled():
        print(f"\nengine against trainer: {tokens} tokens within {off:.1e}; {ties} behind a router near-tie, {on:.1e}")
    assert tokens > 900
    assert off < BOUND


def test_other_weights_are_noticed(checkpoint: Path, tmp_path: Path) -> None:
    off, _, _, _ = compare(checkpoint, changed(checkpoint, tmp_path / "swapped", swap=True))
    assert off > BOUND


def test_a_tie_that_falls_the_other_way_is_found_by_its_margin(checkpoint: Path, tmp_path: Path) -> None:
    """With tied routers, exchanging the two experts changes only what a tie decides: just the tokens behind one."""
    engine = changed(checkpoint, tmp_path / "tied", tie=True)
    trainer = changed(engine, tmp_path / "exchanged", swap=True)
    off, on, tokens, ties = compare(engine, trainer)
    assert on > 100 * BOUND, "the tie makes a difference"
    assert off < BOUND, "and only where the margin says so"
    assert tokens > 20 and ties > 20
