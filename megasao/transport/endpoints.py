"""ZeroMQ sockets as every role opens them: a ROUTER that binds, DEALERs that connect.

Invariants:
- a ROUTER never binds beyond loopback without CURVE keys;
- a message that cannot be routed is an error to the sender, never dropped in silence (ROUTER_MANDATORY);
- a peer that comes back under its old identity takes it over (ROUTER_HANDOVER);
- closing a socket waits a bounded time for what it still has to send.
"""

import ipaddress
from typing import Any

import zmq

from megasao.transport.codec import MAX_PAYLOAD_BYTES
from megasao.transport.keys import CurveKeys
from megasao.transport.zap import allow_client

LINGER_MS = 2000
# Above what the codec refuses politely: a frame this large is cut off before it fills the memory.
_HARD_LIMIT_BYTES = 2 * MAX_PAYLOAD_BYTES
_KEEPALIVE_MS = 5000


def is_loopback(address: str) -> bool:
    """Whether ``address`` can only be reached from this machine."""
    scheme, _, rest = address.partition("://")
    if scheme in ("inproc", "ipc"):
        return True
    host = rest.rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    # As an IPv6 socket names an IPv4 address that it is bound to.
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def bind_router(context: Any, address: str, *, high_water_mark: int, keys: CurveKeys | None = None) -> Any:
    """A bound ROUTER; its kind (blocking or asyncio) is that of ``context``.

    ValueError: beyond loopback without keys, or an address that cannot be bound.
    """
    if keys is None and not is_loopback(address):
        raise ValueError(
            f"{address} can be reached from other machines; that needs CURVE keys: "
            "set transport.curve = true, or bind to 127.0.0.1"
        )
    socket = context.socket(zmq.ROUTER)
    _common_options(socket, high_water_mark)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if keys is not None:
        allow_client(context, keys.client_public)
        socket.curve_server = True
        socket.curve_publickey = keys.server_public.encode()
        socket.curve_secretkey = keys.server_secret.encode()
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ValueError(f"cannot bind to {address}: {error}; is another process of this run still there?") from error
    return socket


def connect_dealer(
    context: Any, address: str, *, identity: bytes, high_water_mark: int, keys: CurveKeys | None = None
) -> Any:
    """A DEALER that connects, and reconnects by itself for as long as it lives. It does not wait for the other side."""
    if not 1 <= len(identity) <= 255 or identity[0] == 0:
        raise ValueError(f"identity must have 1 to 255 bytes and not start with a zero byte, got {identity!r}")
    socket = context.socket(zmq.DEALER)
    _common_options(socket, high_water_mark)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    socket.connect(address)
    return socket


def _common_options(socket: Any, high_water_mark: int) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _KEEPALIVE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * _KEEPALIVE_MS)
