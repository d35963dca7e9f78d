"""Any bytes are either a message of the protocol or are refused with a reason."""

import contextlib
import pickle
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.transport import codec
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.messages import (
    Ack,
    FromTrainer,
    FromWorker,
    Heartbeat,
    Lease,
    Leases,
    ToTrainer,
    ToWorker,
)

LEASE = Lease("train-000001-1.1", "p", "g", "train", 1, "calc", 7, 1.0, 3)
UNIONS = [FromWorker, FromTrainer, ToWorker, ToTrainer]


def _example(kind: type) -> object:
    """An instance with a plausible value in every field."""
    values = {
        str: "x",
        int: 3,
        float: 0.5,
        bool: True,
        list[str]: ["a", "b"],
        dict[str, float]: {"a": 1.0},
        dict[str, str]: {"a": "b"},
    }
    fields = {}
    for field in msgspec.structs.fields(kind):
        if field.type in values:
            fields[field.name] = values[field.type]
        elif field.required:
            fields[field.name] = [] if "list" in str(field.type) else {}
    return kind(**fields)


@pytest.mark.parametrize("union", UNIONS, ids=["FromWorker", "FromTrainer", "ToWorker", "ToTrainer"])
def test_every_message_survives_the_wire(union):
    for kind in get_args(union):
        message = _example(kind)
        frames = [bytes(frame) for frame in encode(message, b"payload")]
        assert decode(frames, union) == (message, b"payload")


def test_nested_structs_survive_the_wire():
    assert decode(encode(Leases([LEASE])), ToWorker)[0].leases == [LEASE]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_never_raise_anything_else(frames):
    try:
        message, _ = decode(frames, FromWorker)
    except MalformedMessage as refused:
        assert str(refused)
    else:
        assert isinstance(message, get_args(FromWorker))


@settings(deadline=None)
@given(st.data())
def test_damaged_messages_never_raise_anything_else(data):
    head = bytearray(encode(Heartbeat({"tokens": 1.0, "busy": 2.0}))[0])
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        decode([bytes(head), b""], FromWorker)


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "expected 2 frames"),
        ([b"a"], "expected 2 frames"),
        ([b"a", b"b", b"c"], "expected 2 frames"),
        ([b"", b""], "not a message"),
        ([pickle.dumps(_Bomb()), b""], "not a message"),
        ([msgspec.msgpack.encode({"type": "Nonsense"}), b""], "Nonsense"),
        ([msgspec.msgpack.encode({"type": "Stop", "reason": "not for workers to say"}), b""], "Stop"),
        ([msgspec.msgpack.encode({"type": "Credit", "free": "4", "weight_version": 0}), b""], "free"),
        ([msgspec.msgpack.encode({"type": "Credit", "free": 4}), b""], "weight_version"),
        ([msgspec.msgpack.encode([1, 2, 3]), b""], "not a message"),
        ([b"\x91" * 100_000, b""], "not a message"),
        ([b"\xdd\xff\xff\xff\xff", b""], "not a message"),
        ([msgspec.msgpack.encode(Ack(1)) + b"trailing", b""], "not a message"),
    ],
)
def test_refusals_say_why(frames, reason):
    with pytest.raises(MalformedMessage, match=reason):
        decode(frames, FromWorker)


def test_oversized_frames_are_refused_on_both_sides(monkeypatch):
    monkeypatch.setattr(codec, "MAX_HEAD_BYTES", 100)
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(MalformedMessage, match="message frame of 101 bytes"):
        decode([bytes(101), b""], FromWorker)
    with pytest.raises(MalformedMessage, match="payload frame of 101 bytes"):
        decode([b"", bytes(101)], FromWorker)
    with pytest.raises(ValueError, match="send fewer rows"):
        encode(Ack(1), bytes(101))
    with pytest.raises(ValueError, match="send less at once"):
        encode(Ack(1, {"x": "y" * 101}))
