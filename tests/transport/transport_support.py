"""What transport tests share."""

import socket
from contextlib import contextmanager

import zmq


def free_address() -> str:
    """A loopback address that nobody is bound to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def zmq_context():
    """A context whose end does not wait for sockets that a failed test left open."""
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
