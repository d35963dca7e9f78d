"""What one rank of a pipeline keeps for its backward passes at the worst time, by the order in which passes come.

Megatron's schedules: a rank runs some forward passes ahead, then one forward and one backward pass in turn. With a
virtual pipeline it has several model chunks; P rows (P stages) go through one before the same rows go through the next.
"""

from collections.abc import Sequence


def most_kept(kept: Sequence[float], stage: int, stages: int) -> float:
    """Bytes that stage ``stage`` (from 0) of ``stages`` keeps when most rows are under way, of which there are enough.

    Args:
        kept: bytes that one row's forward pass through each of the stage's model chunks leaves, in their order.
    """
    chunks = len(kept)
    # The first stages start again before the others are through; each rank needs all chunks but one filled before.
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    held = most = 0.0
    for number in range(ahead + 2 * chunks * stages):
        held += kept[number // stages % chunks]
        most = max(most, held)
        if number >= ahead:
            held -= kept[chunks - 1 - (number - ahead) // stages % chunks]
    return most
