"""The messages between controller, rollout workers and trainer: msgpack structs, never pickle.

A message on the wire is two frames: a tagged struct, and a payload (Arrow IPC bytes, or empty).

Invariants:
- every message from a worker that must not be lost carries a sequence number and is answered by an ``Ack``;
- an ``Ack`` for trajectories is sent only after they are in the journal, or what is known of them in the ledger where
  their payload is in the worker's own journal;
- a message that cannot be decoded or that breaks a rule is answered by ``Refused`` with the reason.
"""

from typing import Any

import msgspec

from megasao.trajectories.buffer import Summary


class Lease(msgspec.Struct, frozen=True):
    """Permission, and duty, to run one episode."""

    lease_id: str
    prompt_id: str
    group_id: str
    split: str
    """``train`` or ``eval``: which stream of the environment ``prompt_index`` counts in."""
    prompt_index: int
    task: str
    seed: int
    temperature: float
    """Sampling temperature; 0 is greedy."""
    min_version: int
    """Generation must not start with older weights than this."""
    evaluation_id: str | None = None
    """Set for evaluation episodes; their result is an ``EvaluationResult``, never a trajectory."""
    want_logprobs: bool = True
    want_versions: bool = True
    """Whether the trajectory is to say which weights produced each token."""
    want_routed_experts: bool = False


SAY_HELLO = "say Hello first"
"""Reason in ``Refused`` to a worker that the controller does not know (it restarted, or gave the worker up)."""

# worker -> controller


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message of a worker, repeated after a reconnection."""

    peer: str
    active_leases: list[str] = []
    payload: str = ""
    """Where this worker is asked for the payload that it keeps itself; empty where it keeps none."""


class Credit(msgspec.Struct, tag=True, frozen=True):
    """``free``: how many more rollouts this worker can take now (absolute, not an increment); ``evaluation_free``: how
    many more evaluation episodes, on its other engine."""

    free: int
    weight_version: int
    evaluation_free: int


class Trajectories(msgspec.Struct, tag=True, frozen=True):
    """Finished training episodes; the payload is one Arrow IPC stream of the trajectory schema."""

    seq: int
    lease_ids: list[str]


class Stored(msgspec.Struct, tag=True, frozen=True):
    """Finished training episodes whose payload is in this worker's own journal, and stays there.

    Also said again of all that it holds, to a controller that is new.
    """

    seq: int
    summaries: list[Summary]


class WorkerLacksPayload(msgspec.Struct, tag=True, frozen=True):
    """Payload that this worker was asked for and does not have, whatever it once said: its disk is another one.

    Not acknowledged: who needs it asks again, and so it is said again.
    """

    trajectory_ids: list[str]


class EvaluationResult(msgspec.Struct, tag=True, frozen=True):
    """One finished evaluation episode."""

    seq: int
    lease_id: str
    evaluation_id: str
    prompt_id: str
    reward: float
    action_tokens: int
    total_tokens: int
    truncated: bool
    oldest_version: int
    newest_version: int
    task: str


class Failure(msgspec.Struct, tag=True, frozen=True):
    """An episode that failed for a reason outside the policy: never a reward of 0."""

    seq: int
    lease_id: str
    reason: str
    detail: str = ""


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Sign of life with counters of this worker (monotone totals, or gauges named so).

    ``servers``: addresses of the SGLang servers that its rollouts use. ``active_leases``: those that it works on, or
    whose result is not acknowledged yet; None says nothing of them.
    """

    stats: dict[str, float]
    servers: list[str] = []
    active_leases: list[str] | None = None


# controller -> worker


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Hello`` and to every ``Heartbeat``; the names the receiver must forget are ``unknown_leases``.

    ``incarnation`` differs after each start of the controller, and each time that it gave the receiver up. A worker
    that sees it change resends what has not been acked, and says again what payload it holds. One that is answered
    ``Refused`` with ``SAY_HELLO`` says ``Hello`` again, then ``Credit``.
    A ``Welcome`` may also come unasked, to take leases back. ``servers``: addresses of the SGLang servers that are up
    for this worker; ``leaving``: those that it is to use no more.
    """

    unknown_leases: list[str] = []
    incarnation: str = ""
    servers: list[str] = []
    leaving: list[str] = []


class Leases(msgspec.Struct, tag=True, frozen=True):
    """Granted leases."""

    leases: list[Lease]


class Ack(msgspec.Struct, tag=True, frozen=True):
    """``seq`` is durable. ``refused`` names rows that were not accepted, with reasons; ``forget`` those of ``Stored``
    whose payload nobody will ask for."""

    seq: int
    refused: dict[str, str] = {}
    forget: list[str] = []


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Nobody will ask for the payload of these again."""

    trajectory_ids: list[str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The last message was not understood or not allowed; the sender goes on."""

    reason: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The run is over: finish nothing, exit cleanly."""

    reason: str


# SGLang server -> controller (strict request / reply)


class ServerUp(msgspec.Struct, tag=True, frozen=True):
    """The SGLang server ``name`` of rollout worker ``worker`` is up at ``url``; said again with every sign of life.

    Answered by ``ServerWanted``.
    """

    name: str
    worker: str
    url: str
    leaving: bool = False
    """It was told that it is not wanted; a controller that was restarted hears it so."""


class ServerWanted(msgspec.Struct, tag=True, frozen=True):
    """``wanted``: whether the server is to stay; ``used``: whether its worker still sends requests to it."""

    wanted: bool
    used: bool


class RemoveServer(msgspec.Struct, tag=True, frozen=True):
    """Let go of a server: its worker drains it, and it ends. Answered by ``ServerWanted``, or ``Refused``."""

    name: str


# trainer -> controller (strict request / reply)


class BatchRequest(msgspec.Struct, tag=True, frozen=True):
    """The trainer at weight ``version`` wants the batch of training ``step`` (from 0).

    Repeating a request for the same step returns the same batch.
    """

    step: int
    version: int


class FetchRequest(msgspec.Struct, tag=True, frozen=True):
    """Payload of trajectories by id; answered by ``Fetched`` with an Arrow IPC stream in this order."""

    trajectory_ids: list[str]


class StateRequest(msgspec.Struct, tag=True, frozen=True):
    """The controller's part of the checkpoint taken after ``step`` finished steps."""

    step: int


class EvaluateRequest(msgspec.Struct, tag=True, frozen=True):
    """Start evaluations (greedy, and sampled if configured) with at least this version, in the background."""

    step: int
    version: int


class StatusRequest(msgspec.Struct, tag=True, frozen=True):
    """Ask for counters and unfinished evaluations."""


class CheckpointSaved(msgspec.Struct, tag=True, frozen=True):
    """The checkpoint after ``step`` is complete on disk: earlier rollback points may be forgotten."""

    step: int


class FinishRequest(msgspec.Struct, tag=True, frozen=True):
    """Training is over: stop the workers and exit."""

    reason: str


# controller -> trainer


class ManifestEntry(msgspec.Struct, frozen=True):
    """What the trainer must know of a trajectory to plan a step without its payload."""

    trajectory_id: str
    tokens: int
    action_tokens: int
    oldest_version: int
    newest_version: int | None
    """None where the rollout side recorded no versions; ``oldest_version`` is then a bound from below."""
    reward: float
    truncated: bool = False
    """The episode ran out of turns or tokens."""
    prompt_id: str = ""
    group_id: str = ""
    task: str = ""
    nbytes: int = 0
    """Size of its payload, where a rollout host has it."""
    payload: str = ""
    """The rollout host that has its payload, by address; empty: the controller has it."""


class Manifest(msgspec.Struct, tag=True, frozen=True):
    """The batch of ``step``. ``rollout`` holds metrics of the rollout side since the last manifest."""

    step: int
    entries: list[ManifestEntry]
    rollout: dict[str, float]


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """The batch is not complete yet; ask again."""

    have: int
    need: int
    detail: str


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``FetchRequest``."""

    count: int


class State(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``StateRequest``: plain data for the checkpoint's controller.json."""

    state: dict[str, Any]


class Status(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``StatusRequest``, ``EvaluateRequest``, ``CheckpointSaved`` and ``FinishRequest``."""

    counters: dict[str, float]
    open_evaluations: list[str]


FromWorker = Hello | Credit | Trajectories | Stored | WorkerLacksPayload | EvaluationResult | Failure | Heartbeat
ToWorker = Welcome | Leases | Ack | Forget | Refused | Stop
FromTrainer = (
    BatchRequest | FetchRequest | StateRequest | EvaluateRequest | StatusRequest | CheckpointSaved | FinishRequest
)
FromServer = ServerUp | RemoveServer
ToTrainer = Manifest | Waiting | Fetched | State | Status | Refused
ToServer = ServerWanted | Refused
FromPayloadHost = Fetched | Refused
"""What a rollout host answers to ``FetchRequest``."""
