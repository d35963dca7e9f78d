"""The messages between the actor's world and a critic in a world of its own: msgpack structs, never pickle.

The actor's rank 0 asks, the critic's rank 0 answers every message at once: with what was asked for, or with
``Working``. So the actor asks again until it is there, or its time is over. Every message may be sent more than once.
"""

import msgspec

from megasao.transport.messages import ManifestEntry, Refused

# actor -> critic


class Train(msgspec.Struct, tag=True, frozen=True):
    """The values of the trajectories of ``step``, please (answered by ``Values``); then learn from them.

    ``attempt`` counts from 0; there is a next one, maybe with other trajectories, only after ``CriticLacksPayload``.
    """

    step: int
    entries: list[ManifestEntry]
    attempt: int = 0


class LearnedRequest(msgspec.Struct, tag=True, frozen=True):
    """What came of the updates of ``step``; answered by ``Learned``, once they are done."""

    step: int


class Save(msgspec.Struct, tag=True, frozen=True):
    """Write the critic's part of the checkpoint after ``step`` steps; answered by ``Saved``, once it is written.

    The directory is there already. What is saved is the state between the step before and the next one.
    """

    step: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The run is over, or interrupted: answered by ``Leaving`` at once."""

    step: int


# critic -> actor


class Values(msgspec.Struct, tag=True, frozen=True):
    """Payload: the values of all tokens of these trajectories, one after another, float32, little endian.

    ``tokens``: how many each trajectory has.
    """

    step: int
    trajectory_ids: list[str]
    tokens: list[int]
    attempt: int = 0


class CriticLacksPayload(msgspec.Struct, tag=True, frozen=True):
    """The critic cannot have the payload of these trajectories where it is said to be, and has changed nothing."""

    step: int
    attempt: int
    reason: str


class Learned(msgspec.Struct, tag=True, frozen=True):
    """The metrics of the step's first update, and ``seconds`` of all of them."""

    step: int
    metrics: dict[str, float | None]
    seconds: float


class Saved(msgspec.Struct, tag=True, frozen=True):
    """The critic's part of the checkpoint is whole."""

    step: int


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """The critic's ranks end."""

    step: int


class Working(msgspec.Struct, tag=True, frozen=True):
    """Not yet; ask again."""


Command = Train | Save | Leave
ToCritic = Train | LearnedRequest | Save | Leave
FromCritic = Values | CriticLacksPayload | Learned | Saved | Leaving | Working | Refused
