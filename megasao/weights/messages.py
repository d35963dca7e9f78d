"""The messages between the weight publisher (trainer) and its receivers (rollout workers).

The receiver drives the transfer: it is told what there is, fetches it (bucket by bucket, from the announced directory,
or from every rank of the trainer), and says when it is ready. Every message may be sent twice or be lost without harm,
because the receiver repeats its state with each heartbeat.

``epoch`` is a random name of one life of the publisher: after its restart the same version number may mean other
weights, so nothing of an older epoch is ever mixed with it.
"""

from typing import Literal

import msgspec

Place = tuple[str, int]
"""Host and port of a rank."""

Carrier = Literal["tcp", "gloo"]
"""What takes a share from a rank to a receiver: a connection, or a process group for each pipeline stage."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor inside the flat buffer: ``dtype`` as in ``float32``, ``offset`` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


# receiver -> publisher


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message and heartbeat. ``version`` is what the engines run, ``loading`` what is being fetched or staged;
    both in the life ``epoch`` of the publisher (null before the first contact)."""

    epoch: str | None
    version: int | None
    loading: int | None


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Please send this bucket."""

    epoch: str
    version: int
    bucket: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """All of it is here and intact, and every engine has staged it."""

    epoch: str
    version: int


class Committed(msgspec.Struct, tag=True, frozen=True):
    """Every engine runs this version now."""

    epoch: str
    version: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """This receiver cannot take this version now; it starts again with its next heartbeat."""

    epoch: str
    version: int
    reason: str


# publisher -> receiver


class Current(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Hello``: the newest committed version, null before the first."""

    epoch: str
    version: int | None


class Announce(msgspec.Struct, tag=True, frozen=True):
    """This version can be fetched: ``total_bytes`` in buckets of ``bucket_bytes`` (the last one may be shorter)."""

    epoch: str
    version: int
    tensors: list[TensorSpec]
    total_bytes: int
    bucket_bytes: int


class AnnounceDirectory(msgspec.Struct, tag=True, frozen=True):
    """This version lies complete in the directory ``path``, whose manifest has this CRC-32."""

    epoch: str
    version: int
    path: str
    total_bytes: int
    manifest_crc32: int


class Share(msgspec.Struct, frozen=True):
    """What one rank of the trainer holds of a version: at ``host``:``port``, with the CRC-32 of its manifest.

    ``stage``: of the pipeline, in which the rank is."""

    rank: int
    host: str
    port: int
    total_bytes: int
    manifest_crc32: int
    stage: int = 0

    @property
    def place(self) -> Place:
        """Where the rank is reached."""
        return self.host, self.port


class AnnounceShares(msgspec.Struct, tag=True, frozen=True):
    """This version lies in the memory of the trainer's ranks, which give it by ``carrier`` to who knows ``secret``."""

    epoch: str
    version: int
    shares: list[Share]
    secret: bytes
    carrier: Carrier = "tcp"


class Mapped(msgspec.Struct, frozen=True):
    """What one rank of the trainer holds of a version: in the memory behind descriptor ``fd`` of process ``pid``,
    ``total_bytes`` and then its manifest, of which this is the length and the CRC-32."""

    rank: int
    pid: int
    fd: int
    total_bytes: int
    manifest_bytes: int
    manifest_crc32: int


class AnnounceMapped(msgspec.Struct, tag=True, frozen=True):
    """This version lies in memory that the trainer's ranks share with processes of their ``machine``."""

    epoch: str
    version: int
    machine: str
    memories: list[Mapped]


class Bucket(msgspec.Struct, tag=True, frozen=True):
    """One piece of the flat buffer (the payload), with the CRC-32 of its bytes."""

    epoch: str
    version: int
    bucket: int
    crc32: int


class Commit(msgspec.Struct, tag=True, frozen=True):
    """Make the staged version current."""

    epoch: str
    version: int


class Quarantine(msgspec.Struct, tag=True, frozen=True):
    """The others went on to this version without you: do not count as in sync until you have committed it."""

    epoch: str
    version: int
    reason: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The last message was not understood; the publisher goes on."""

    reason: str


FromReceiver = Hello | Fetch | Ready | Committed | Failed
AnyAnnounce = Announce | AnnounceDirectory | AnnounceShares | AnnounceMapped
ToReceiver = Current | AnyAnnounce | Bucket | Commit | Quarantine | Refused
