"""Demonstrations as trajectories for fine-tuning.

Invariants: pieces are tokenised one by one, exactly as a rollout does, so fine-tuning and rollouts see the same ids;
only what the demonstrator says is an action; none is longer than ``max_tokens``.
"""

from megasao.environments.base import DemonstrationTurn, Environment
from megasao.environments.encoding import TokenizerCodec
from megasao.trajectories.schema import Trajectory


def demonstration_trajectories(
    environment: Environment, codec: TokenizerCodec, count: int, seed: int, *, max_tokens: int
) -> list[Trajectory]:
    """``count`` demonstrations, a pure function of (environment options, seed); too long ones are passed over.

    Only ``tokens``, ``action_mask`` and ``turn_starts`` mean something in them. ValueError if more than half of
    them are longer than ``max_tokens``.
    """
    found: list[Trajectory] = []
    index = 0
    while len(found) < count:
        demonstration = encode_demonstration(environment.demonstration(index, seed), codec, f"demonstration/{index}")
        index += 1
        if len(demonstration.tokens) <= max_tokens:
            found.append(demonstration)
        elif index - len(found) > max(16, index // 2):
            raise ValueError(
                f"environment.max_tokens = {max_tokens}: {index - len(found)} of {index} demonstrations of "
                f"{environment.name!r} are longer; raise environment.max_tokens"
            )
    return found


def encode_demonstration(turns: list[DemonstrationTurn], codec: TokenizerCodec, name: str) -> Trajectory:
    """Token ids, action mask and turn starts of one demonstration."""
    tokens: list[int] = []
    action_mask: list[bool] = []
    turn_starts: list[int] = []
    for turn in turns:
        ids = codec.encode(turn.text)
        if turn.is_action:
            turn_starts.append(len(tokens))
        tokens += ids
        action_mask += [turn.is_action] * len(ids)
    return Trajectory(
        trajectory_id=name,
        prompt_id=name,
        group_id=name,
        task="demonstration",
        tokens=tokens,
        action_mask=action_mask,
        rewards=[0.0] * len(tokens),
        weight_versions=[(0, 0)],
        turn_starts=turn_starts,
        finish_reason="done",
    )
