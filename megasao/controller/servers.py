"""The SGLang servers that have registered: which worker each is for, and which are to go. Pure.

Invariants:
- a server that is silent for ``dead_after_s`` is no longer told to anybody; its worker may still wait for it;
- a worker's last server is never let go of.
"""

from dataclasses import dataclass


@dataclass
class Server:
    """One server. ``leaving``: its worker is told to use it no more."""

    name: str
    worker: str
    url: str
    last_heard: float
    leaving: bool = False


class ServerBook:
    """All servers that were ever heard, by name."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._servers: dict[str, Server] = {}
        self._used: dict[str, set[str]] = {}

    def up(self, name: str, worker: str, url: str, now: float, *, leaving: bool = False) -> Server:
        """A server is up. One that comes back under its name stays what it was, also if it was leaving."""
        server = self._servers.setdefault(name, Server(name, worker, url, now))
        server.worker, server.url, server.last_heard = worker, url, now
        server.leaving |= leaving
        return server

    def uses(self, worker: str, urls: list[str]) -> None:
        """What a worker has in its fleet."""
        self._used[worker] = set(urls)

    def is_used(self, server: Server) -> bool:
        """Whether its worker still has it."""
        return server.url in self._used.get(server.worker, ())

    def remove(self, name: str, now: float) -> Server:
        """A server is to go. ValueError if it is not here, or its worker would have none left."""
        server = self._servers.get(name)
        if server is None:
            known = ", ".join(sorted(self._servers)) or "none"
            raise ValueError(f"no SGLang server {name!r} has registered; registered are {known}")
        others = [url for url in self.of(server.worker, now) if url != server.url]
        if not server.leaving and not others:
            raise ValueError(f"{name} is the last server of {server.worker}; add another one first")
        server.leaving = True
        return server

    def of(self, worker: str, now: float) -> list[str]:
        """Addresses of the servers that a worker may use."""
        return [server.url for server in self._alive(now) if server.worker == worker and not server.leaving]

    def leaving(self, worker: str) -> list[str]:
        """Addresses that a worker must not use, but those that another server has now."""
        taken = {server.url for server in self._servers.values() if not server.leaving}
        gone = (server for server in self._servers.values() if server.worker == worker and server.leaving)
        return [server.url for server in gone if server.url not in taken]

    def count(self, now: float) -> int:
        """How many are up."""
        return len(self._alive(now))

    def _alive(self, now: float) -> list[Server]:
        return [server for server in self._servers.values() if now - server.last_heard <= self._dead_after_s]
