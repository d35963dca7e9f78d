"""HTTP calls to one SGLang server, each bounded in time.

Invariants, asserted by the tests:
- whatever goes wrong on the way is an EngineError that names the server, the call and the reason;
- a stream that is silent for ``silence_timeout_s`` ends with one;
- every call carries the run's key, where there is one; a server with another key answers nothing but its health.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec

from megasao.rollout.engines.base import EngineError

CONNECT_TIMEOUT_S = 10.0
MOST_CONNECTIONS = 512
"""Requests beyond wait here: a server on a laptop accepts no more open files than this by far."""
KEEP_ALIVE_S = 15.0
"""Longest time that a connection is kept idle; ``SERVER_KEEPS_ALIVE_S`` of the servers is longer."""
SERVER_KEEPS_ALIVE_S = 75
ROUTING_KEY = "X-SMG-Routing-Key"
"""The header that SGLang's router routes by (its policy ``manual``)."""
_NO_SERVER = (502, 503, 504)
"""What a router answers when its server has gone."""
_BUFFER_BYTES = 4 * 2**20


class ServerUnreachable(EngineError):
    """The server did not answer: it died, it hangs, or the way to it is broken."""


class VersionSpan(msgspec.Struct):
    """Output tokens ``start`` to ``end`` (exclusive) came from the weights labelled ``version``."""

    version: str
    start: int
    end: int


class FinishReason(msgspec.Struct):
    """Why a request ended."""

    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct):
    """What the server says beside the tokens. Log-probs: [log-prob, token id, text]; NaN arrives as null."""

    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[VersionSpan] = []
    routed_experts: bytes | None = None


class Piece(msgspec.Struct):
    """One message of a stream: the tokens since the message before it."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(Piece)


class ServerClient:
    """Calls to the server at ``url``, which asks for ``key``. Made and used inside one event loop.

    ``router``: where requests go instead, and nothing else; it passes the key on.
    """

    def __init__(
        self, url: str, *, silence_timeout_s: float, key: str | None = None, router: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._requests = (router or url).rstrip("/")
        self._silence_timeout_s = silence_timeout_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_timeout_s)
        # The server keeps idle ones much longer: a request sent while it closes them would be lost.
        connector = aiohttp.TCPConnector(limit=MOST_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            read_bufsize=_BUFFER_BYTES,
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        )

    async def stream(self, body: dict[str, Any], session: str) -> AsyncGenerator[Piece, None]:
        """POST /generate: messages until the last, or the one answer if ``body`` asks for no stream. ServerUnreachable,
        or EngineError for a refusal.

        ``session``: what a router may keep on one server.
        """
        headers = {ROUTING_KEY: session} if self._requests != self.url else None
        data = msgspec.json.encode(body)
        try:
            async with self._session.post(f"{self._requests}/generate", data=data, headers=headers) as response:
                if response.status != 200:
                    kind = ServerUnreachable if response.status in _NO_SERVER else EngineError
                    raise kind(f"{self._requests}/generate: status {response.status}: {await _reason(response)}")
                if not body["stream"]:
                    yield self._decode(await response.read())
                    return
                async with aclosing(_lines(response)) as lines:
                    async for line in lines:
                        if line.startswith(b"data: {"):
                            yield self._decode(line[6:])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable("/generate", error, self._silence_timeout_s) from error

    def _decode(self, line: bytes) -> Piece:
        try:
            piece = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url}/generate: an answer was not understood: {error}") from None
        if piece.error is not None:
            raise EngineError(f"{self.url}/generate: {piece.error.get('message', piece.error)}")
        return piece

    async def call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """POST ``body`` (GET without one) within ``timeout_s``; the JSON object of the answer, empty if it has none."""
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            data = None if body is None else msgspec.json.encode(body)
            async with self._session.request(method, self.url + path, data=data, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineError(f"{self.url}{path}: status {response.status}: {await _reason(response)}")
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(path, error, timeout_s) from error
        return dict(msgspec.json.decode(content)) if content.startswith(b"{") else {}

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Until the server has generated a token. ServerUnreachable after ``timeout_s``, with the last reason.

        A server that somebody paused, and then died, is let go on.
        """
        last = "nothing was tried"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self.call("/continue_generation", {}, timeout_s)
                        await self.call("/health_generate", None, timeout_s)
                        return
                    except EngineError as error:
                        last = str(error)
                    await asyncio.sleep(0.25)
        except TimeoutError:
            raise ServerUnreachable(f"{self.url} was not ready within {timeout_s:g} s; {last}") from None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._session.closed

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def _unreachable(self, path: str, error: Exception, timeout_s: float) -> ServerUnreachable:
        silent = isinstance(error, TimeoutError)
        reason = f"no answer for {timeout_s:g} s" if silent else f"{type(error).__name__}: {error}"
        return ServerUnreachable(f"{self.url}{path}: {reason}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Lines of any length: the experts of a long turn are one of many megabytes."""
    begun: list[bytes] = []
    async for chunk in response.content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun.clear()
        begun.append(rest)
    yield b"".join(begun)


async def _reason(response: aiohttp.ClientResponse) -> str:
    return (await response.text())[:500]
