"""Episodes that an engine plays, and the trainer's log-probabilities of the same tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megasao.config.architecture import read_hf_config
from megasao.families.routing import Routing
from megasao.rollout.engines.base import Engine, GenerateRequest, SamplingParams
from megasao.rollout.episode import Transcript
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
    experts: bytes = b""
    """[T, M, K], see ``megasao.families.routing``; empty where they were not asked for."""


class Differences(NamedTuple):
    """Largest |engine - trainer| and number of tokens, off router near-ties and on them."""

    off: float
    on: float
    tokens: int
    ties: int


async def play(engine: Engine, count: int, *, experts: bool = False) -> list[Episode]:
    """Episodes of four turns, with observations between them, all at once; with the ``experts`` of their tokens."""

    async def episode(number: int) -> Episode:
        transcript, temperature = Transcript(), TEMPERATURES[number % 2]
        for turn, observation in enumerate(random_sequences(4, seed=number, low=2, high=8)):
            transcript.observe(observation)
            sampling = SamplingParams(
                temperature,
                max_new_tokens=10,
                seed=100 * number + turn,
                return_routed_experts=experts,
                routed_experts_from=transcript.routed,
            )
            request = GenerateRequest(f"{number}/{turn}", str(number), tuple(transcript.tokens), sampling)
            turn_result = await engine.generate(request)
            assert turn_result.logprobs is not None
            transcript.act(turn_result)
        await engine.end_session(str(number))
        sampled = {int(place): transcript.logprobs[place] for place in np.flatnonzero(transcript.action_mask)}
        return Episode(transcript.tokens, sampled, temperature, transcript.routing() if experts else b"")

    return await asyncio.gather(*map(episode, range(count)))


def compare(
    episodes: Sequence[Episode],
    engine_path: Path,
    trainer_path: Path,
    *,
    near_tie: float = NEAR_TIE,
    replay: bool = False,
) -> Differences:
    """Episodes of the weights at ``engine_path`` against a trainer with those at ``trainer_path``.

    ``replay``: the trainer's tokens go to the experts that the engine's went to.
    """
    payload: dict[str, Any] = {
        "path": str(trainer_path),
        "sequences": [episode.tokens for episode in episodes],
        "temperatures": [episode.temperature for episode in episodes],
    }
    if replay:
        ids = [decode_experts(trainer_path, episode) for episode in episodes]
        payload |= {
            "actor": {"optimizer": {"lr": 1e-3}, "router_replay": True},
            "routed_experts": np.concatenate(ids).tolist(),
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


def decode_experts(path: Path, episode: Episode) -> np.ndarray:
    """int64 [T, M, K]: the experts of an episode of the model at ``path``."""
    routing = Routing.of(read_hf_config(path))
    assert routing is not None
    return routing.decode(episode.experts, len(episode.tokens))


def chosen_by_trainer(path: Path, episodes: Sequence[Episode]) -> list[np.ndarray]:
    """int64 [T, M, K] of each episode, as the trainer's own routers choose."""
    payload = {
        "path": str(path),
        "sequences": [episode.tokens for episode in episodes],
        "temperatures": [episode.temperature for episode in episodes],
    }
    (chosen,) = run_world(1, "tests.megatron.cases:chosen_experts", payload)
    return np.split(np.array(chosen), np.cumsum([len(episode.tokens) for episode in episodes])[:-1])
