"""Lets only the clients of a run through CURVE: a ZAP (ZeroMQ RFC 27) handler, one thread per ZeroMQ context.

CURVE alone proves the server to the client and encrypts; who may connect is decided here, by the client's public key.

Invariants:
- a client whose key is not allowed gets no message through, in either direction;
- the thread ends by itself when its context is terminated.
"""

import threading
from typing import Any

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"
_lock = threading.Lock()
_allowed: dict[int, set[bytes]] = {}


def allow_client(context: zmq.Context[Any], client_public: str) -> None:
    """Allow connections with this public key on every CURVE socket of ``context``."""
    with _lock:
        keys = _allowed.get(context.underlying)
        if keys is not None:
            keys.add(client_public.encode())
            return
        keys = _allowed[context.underlying] = {client_public.encode()}
        # A shadow: closing the sockets of the caller's context must not close this one under the thread.
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        socket = shadow.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ADDRESS)
    threading.Thread(target=_serve, args=(socket, context.underlying, keys), name="zap", daemon=True).start()


def _serve(socket: zmq.Socket[bytes], context_id: int, keys: set[bytes]) -> None:
    try:
        while True:
            socket.send_multipart(_answer(socket.recv_multipart(), keys))
    except zmq.ContextTerminated:
        pass
    finally:
        with _lock:
            _allowed.pop(context_id, None)
        socket.close(linger=0)


def _answer(request: list[bytes], keys: set[bytes]) -> list[bytes]:
    version, request_id = request[0], request[1]
    is_curve = len(request) == 7 and request[5] == b"CURVE"
    if is_curve and z85.encode(request[6]) in keys:
        return [version, request_id, b"200", b"OK", b"run", b""]
    return [version, request_id, b"400", b"this key may not connect to the run", b"", b""]
