"""Free TCP ports for a run's endpoints.

Ports are taken outside the kernel's range for outgoing connections: an address must stay free while a role that died
is being restarted, and any outgoing connection could land on a port inside that range.
"""

import random
import socket
from collections.abc import Container, Iterable
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
_HIGHEST = 65_000
_TRIES = 2000


def free_ports(count: int, host: str = "127.0.0.1", *, promised: Container[int] = ()) -> list[int]:
    """``count`` different ports that can be bound on ``host`` now, none that is ``promised`` to somebody who does not
    use it yet; OSError if they cannot be found."""
    low, high = _outgoing_range()
    candidates = [port for port in range(_LOWEST, _HIGHEST) if not low <= port <= high] or list(range(low, high))
    candidates = [port for port in candidates if port not in promised]
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, min(_TRIES, len(candidates))):
        if len(found) == count:
            break
        if _can_bind(host, port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} free ports found on {host}; is the address one of this machine?")
    return found


def taken_ports(ports: Iterable[int], host: str = "127.0.0.1") -> list[int]:
    """Those of ``ports`` on which somebody listens on ``host``. What a server that ended left behind does not count."""
    return [port for port in ports if not _can_bind(host, port, again=True)]


def _can_bind(host: str, port: int, *, again: bool = False) -> bool:
    """``again``: also where connections of a server that ended still wait for their end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(again))
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _outgoing_range() -> tuple[int, int]:
    if not _RANGE_FILE.exists():
        return 32768, 60999
    low, high = _RANGE_FILE.read_text().split()
    return int(low), int(high)
