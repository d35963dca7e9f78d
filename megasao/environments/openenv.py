"""Text environments behind a running OpenEnv server, over its own protocol: a turn is one action, what is seen is text.

A problem is the seed of a reset (``POST /reset`` shows how it begins); an episode is a session of its own on ``/ws``.
The package openenv-core is not needed on this side.

Invariants:
- training problems have even seeds, held-out ones odd seeds; whether two seeds differ is the environment's own affair;
- a session begins as its prompt says, else it is a failure;
- an action that the server's schema refuses is told so, and earns 0; any other error, silence, a full or absent server
  is a failure, never a reward;
- every wait ends after ``timeout_s``.
"""

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from megasao.environments.answers import last_tagged
from megasao.environments.base import (
    EnvironmentFailure,
    Episode,
    Prompt,
    Split,
    StepResult,
    check_place,
    shown_to_model,
)
from megasao.environments.options import OptionsEnvironment
from megasao.environments.splits import text_hash

_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
_OWN = ("done", "reward", "metadata")
"""Fields of every observation; what is left is the environment's."""


@dataclass(frozen=True)
class OpenEnvOptions:
    """Options under ``environment.options``."""

    url: str = ""
    """Of the running server, such as ``http://127.0.0.1:8000``. It must allow a session for each episode at a time."""
    text_field: str = "message"
    """Field of the action that the model's text fills; empty: the text is the whole action, as a JSON object."""
    action: dict[str, Any] = field(default_factory=dict)
    """Other fields of every action."""
    shown: list[str] = field(default_factory=list)
    """Fields of the observation that the model sees; none: all of the environment's own. One is shown as it is, several
    as JSON."""
    instructions: str = ""
    """Said before the first observation."""
    chat: bool = True
    """Speak through the model's chat template; false: plain text."""
    stop: str = ""
    """Token that ends a turn; empty is the model's own end of turn."""
    seed: int = 0
    timeout_s: float = 30.0
    """For each answer of the server."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"environment.options.url: expected http://HOST:PORT, got {self.url!r}")
        if self.timeout_s <= 0:
            raise ValueError(f"environment.options.timeout_s: expected more than 0, got {self.timeout_s}")
        if self.text_field in self.action:
            raise ValueError(f"environment.options.action: {self.text_field} is the text_field, which the model fills")


class OpenEnvEpisode(Episode):
    """One session."""

    def __init__(self, environment: "OpenEnvEnvironment", seed: int, first: str) -> None:
        self._environment, self._seed, self._first = environment, seed, first
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def step(self, action_text: str) -> StepResult:
        """Do the action in ``<action>``. EnvironmentFailure if the server does not answer as it should."""
        owner = self._environment
        action = owner.read_action(action_text)
        if action is None:
            return owner.answer(f"error: {owner.legal}", 0.0, False, {"actions": 0.0, "illegal_actions": 1.0})
        try:
            async with asyncio.timeout(owner.options.timeout_s):
                if self._socket is None:
                    await self._begin()
                kind, data = await self._ask("step", action)
                seen = owner.see(data) if kind == "observation" else ""
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EnvironmentFailure(f"{owner.options.url}: {type(error).__name__}: {error}") from error
        if kind == "error":
            if data.get("code") not in _REFUSED:
                raise EnvironmentFailure(f"{owner.options.url}: {data.get('code')}: {data.get('message')}")
            wrong = json.dumps([problem.get("msg") for problem in data.get("errors", [])])
            return owner.answer(f"error: {wrong}", 0.0, False, {"actions": 0.0, "illegal_actions": 1.0})
        reward, done = float(data.get("reward") or 0.0), bool(data.get("done"))
        return owner.answer(seen, reward, done, {"actions": 1.0, "illegal_actions": 0.0})

    async def _begin(self) -> None:
        options = self._environment.options
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=options.timeout_s))
        self._socket = await self._http.ws_connect(f"{options.url.rstrip('/')}/ws")
        kind, data = await self._ask("reset", {"seed": self._seed})
        if kind != "observation":
            raise ValueError(f"reset: {data.get('code')}: {data.get('message')}")
        if (seen := self._environment.see(data)) != self._first:
            raise ValueError(
                f"reset with seed {self._seed} began with {seen[:200]!r}, and not with what the prompt says"
            )

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Type and data of the server's answer. ValueError for one that is none."""
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ValueError(f"the session was closed ({answer.type.name})")
        found = json.loads(answer.data)
        if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
            raise ValueError(f"expected type and data, got {answer.data[:200]!r}")
        return str(found.get("type")), found["data"]

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()
        if self._http is not None:
            await self._http.close()


class OpenEnvEnvironment(OptionsEnvironment[OpenEnvOptions]):
    """The environment of one server."""

    name = "openenv"
    options_type = OpenEnvOptions
    prompts_wait = True

    def __init__(self, options: OpenEnvOptions) -> None:
        """ValueError where no OpenEnv server answers."""
        super().__init__(options)
        content = "your action" if options.text_field else "your action as a JSON object"
        self.legal = f"write {content} between <action> and </action>."
        try:
            self._request("health")
        except (OSError, ValueError) as error:
            raise ValueError(f"environment.options.url: no OpenEnv server answers at {options.url}: {error}") from error

    def named(self, split: Split, index: int) -> tuple[str, str]:
        """Without a word with the server: a controller would wait for it, and end with its first error."""
        check_place(split, index)
        return f"{self.name}/{split}/{index}", self.name

    def prompt(self, split: Split, index: int) -> Prompt:
        """What is seen after a reset. ValueError below 0 or for an unknown split; EnvironmentFailure: no server."""
        check_place(split, index)
        seed = 2 * (text_hash("openenv", self.options.seed, split, index) >> 34) + (split == "eval")
        try:
            first = self.see(self._request("reset", {"seed": seed}))
        except (OSError, ValueError) as error:
            raise EnvironmentFailure(f"{self.options.url}/reset: {error}") from error
        parts = (self.options.instructions, first, f"In each turn, {self.legal}")
        text = "\n\n".join(part for part in parts if part)
        return Prompt(
            prompt_id=self.named(split, index)[0],
            task=self.name,
            text=f"{text}\n\n",
            payload={"seed": seed, "first": first},
            messages=({"role": "user", "content": text},) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> OpenEnvEpisode:
        """Begin an episode; what is random in it follows from the prompt's seed."""
        return OpenEnvEpisode(self, prompt.payload["seed"], prompt.payload["first"])

    def read_action(self, text: str) -> dict[str, Any] | None:
        """The action that a turn says; None if it says none."""
        said = last_tagged(text.rpartition("</think>")[2], "action")
        if said is None:
            return None
        if self.options.text_field:
            return {**self.options.action, self.options.text_field: said.strip()}
        try:
            found = json.loads(said)
        except ValueError:
            return None
        return {**found, **self.options.action} if isinstance(found, dict) else None

    def see(self, data: Mapping[str, Any]) -> str:
        """What the model is shown of an answer of the server."""
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise ValueError(f"expected an observation, got {str(data)[:200]}")
        names = self.options.shown or [name for name in observation if name not in _OWN]
        found = {name: observation.get(name) for name in names}
        if len(found) == 1:
            (value,) = found.values()
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps(found, ensure_ascii=False)

    def answer(self, text: str, reward: float, done: bool, metrics: dict[str, float]) -> StepResult:
        """The environment's answer to a turn."""
        if done:
            return StepResult("", reward, True, metrics)
        return replace(shown_to_model(text, metrics, chat=self.options.chat), reward=reward)

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A GET, or with a body a POST. OSError or ValueError."""
        data = json.dumps(body).encode() if body is not None else None
        url = f"{self.options.url.rstrip('/')}/{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.options.timeout_s) as answer:
            found = json.load(answer)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {str(found)[:200]}")
        return found
