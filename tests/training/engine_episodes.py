"""Episodes that an engine plays, and the trainer's log-probabilities of the same tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megasao.rollout.engines.base import Engine, GenerateRequest, SamplingParams
from tests.megatron.tiny import random_sequences
from tests.megatron.world import run_world
from tests.training.router_margin import router_margins

NEAR_TIE = 1e-5
TEMPERATURES = (1.0, 0.7)
MAX_TOKENS = 96


@dataclass
class Episode:
    tokens: list[int]
    logprobs: dict[int, float]
    """By position, for tokens that the engine sampled."""
    temperature: float


class Differences(NamedTuple):
    """Largest |engine - trainer| and number of tokens, off router near-ties and on them."""

    off: float
    on: float
    tokens: int
    ties: int


async def play(engine: Engine, count: int) -> list[Episode]:
    """Episodes of four turns, with observations between them, all at once."""

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
        await engine.end_session(str(number))
        return result

    return await asyncio.gather(*map(episode, range(count)))


def compare(
    episodes: Sequence[Episode], engine_path: Path, trainer_path: Path, *, near_tie: float = NEAR_TIE
) -> Differences:
    """Episodes of the weights at ``engine_path`` against a trainer with those at ``trainer_path``."""
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
            tie = bool(margins[position] < near_tie)
            worst[tie] = max(worst[tie], abs(trainer[start + position] - logprob))
            counts[tie] += 1
        start += len(episode.tokens)
    return Differences(worst[False], worst[True], counts[False], counts[True])
