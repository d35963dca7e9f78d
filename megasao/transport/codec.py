"""Messages to frames and back: two frames, a msgpack struct and an opaque payload.

Invariants:
- ``decode`` of any bytes whatever either returns a message of the expected union or raises MalformedMessage with a
  reason that can be sent back to the sender; nothing in it is ever executed (msgpack, never pickle);
- both frames are bounded, when they are made and when they are read.
"""

from functools import lru_cache
from typing import Any

import msgspec

MAX_HEAD_BYTES = 8 * 2**20
MAX_PAYLOAD_BYTES = 256 * 2**20

_encoder = msgspec.msgpack.Encoder()


class MalformedMessage(ValueError):
    """The frames are not a message of the expected kind; the text says why."""


@lru_cache(maxsize=64)
def _decoder(union: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(union)


def encode(message: msgspec.Struct, payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """The two frames of ``message``. Raises ValueError when one is larger than a receiver accepts."""
    head = _encoder.encode(message)
    name = type(message).__name__
    if len(head) > MAX_HEAD_BYTES:
        raise ValueError(f"{name}: {len(head)} bytes of message, at most {MAX_HEAD_BYTES} are sent; send less at once")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"{name}: {len(payload)} bytes of payload, at most {MAX_PAYLOAD_BYTES} are sent; send fewer rows at once"
        )
    return [head, payload]


def decode(frames: list[bytes], union: Any) -> tuple[Any, bytes]:
    """The message and its payload. ``union`` is a union of tagged structs. Raises MalformedMessage(reason)."""
    if len(frames) != 2:
        raise MalformedMessage(f"expected 2 frames (message, payload), got {len(frames)}")
    head, payload = frames
    if len(head) > MAX_HEAD_BYTES:
        raise MalformedMessage(f"message frame of {len(head)} bytes; at most {MAX_HEAD_BYTES}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"payload frame of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
    try:
        return _decoder(union).decode(head), payload
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"not a message of the protocol: {error}") from error
