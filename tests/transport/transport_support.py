"""What transport tests share."""

from contextlib import contextmanager

import zmq

from megasao.launch.ports import free_ports


def free_address() -> str:
    """A loopback address that nobody is bound to."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


@contextmanager
def zmq_context():
    """A context whose end does not wait for sockets that a failed test left open."""
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
