"""Demonstrations as token ids for fine-tuning.

Invariants: pieces are tokenised one by one, exactly as a rollout does, so fine-tuning and rollouts see the same ids;
only what the demonstrator says is an action; none is longer than ``max_tokens``.
"""

from typing import NamedTuple

from megasao.environments.base import DemonstrationTurn, Environment
from megasao.environments.encoding import TokenizerCodec


class Demonstration(NamedTuple):
    """``tokens`` [T] and ``action_mask`` [T]: True where the model learns to produce the token."""

    tokens: list[int]
    action_mask: list[bool]


def demonstration_trajectories(
    environment: Environment, codec: TokenizerCodec, count: int, seed: int, *, max_tokens: int
) -> list[Demonstration]:
    """``count`` demonstrations, a pure function of (environment options, seed); too long ones are passed over.

    ValueError if more than half of them are longer than ``max_tokens``.
    """
    found: list[Demonstration] = []
    index = 0
    while len(found) < count:
        demonstration = encode_demonstration(environment.demonstration(index, seed), codec)
        index += 1
        if len(demonstration.tokens) <= max_tokens:
            found.append(demonstration)
        elif index - len(found) > max(64, index // 2):
            raise ValueError(
                f"environment.max_tokens = {max_tokens}: {index - len(found)} of {index} demonstrations of "
                f"{environment.name!r} are longer; raise environment.max_tokens"
            )
    return found


def encode_demonstration(turns: list[DemonstrationTurn], codec: TokenizerCodec) -> Demonstration:
    """Token ids and action mask of one demonstration."""
    tokens: list[int] = []
    action_mask: list[bool] = []
    for turn in turns:
        ids = codec.encode(turn.text)
        tokens += ids
        action_mask += [turn.is_action] * len(ids)
    return Demonstration(tokens, action_mask)
