"""The adapter of OpenEnv against a real OpenEnv server, in a Python environment of its own (`make setup-openenv`)."""

import asyncio
import os
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import EnvironmentFailure
from megasao.environments.openenv import OpenEnvEnvironment
from megasao.environments.registry import make_environment
from megasao.launch.ports import free_ports

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("MEGASAO_OPENENV_PYTHON", ROOT / ".venv-openenv" / "bin" / "python"))
START_S = 120.0
SESSIONS = 4
needs_openenv = pytest.mark.skipif(not PYTHON.exists(), reason=f"no openenv-core: {PYTHON} is missing")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of both environments."""
    directory = tmp_path_factory.mktemp("openenv")
    (port,) = free_ports(1)
    log = (directory / "log").open("w")
    command = [str(PYTHON), str(Path(__file__).with_name("openenv_server.py")), str(port), str(directory)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/echo/health", timeout=1).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(60)


def make(url, **options):
    return make_environment(EnvironmentConfig(name="openenv", options={"url": url, **options}))


def guessing(server, **options):
    return make(f"{server}/guess", text_field="number", **options)


def play(environment, turns, index=0, prompt=None):
    async def body():
        episode = environment.start(prompt or environment.prompt("train", index), 0)
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await episode.close()

    return asyncio.run(body())


def said(result):
    return result.messages[0]["content"]


def act(text):
    return f"<think>hm</think> <action>{text}</action>"


@needs_openenv
def test_the_packages_own_echo_environment_answers(server):
    environment = make(f"{server}/echo", instructions="Say something.", shown=["echoed_message"])
    prompt = environment.prompt("train", 0)
    assert prompt.messages[0]["content"].splitlines()[::2] == [
        "Say something.",
        "Echo environment ready!",
        "In each turn, write your action between <action> and </action>.",
    ]
    hello, silence, again = play(environment, [act("hello"), "hello", act(" you ")])
    assert (said(hello), hello.reward, hello.done) == ("hello", pytest.approx(0.5), False)
    assert said(silence).startswith("error: write your action") and silence.reward == 0.0
    assert silence.metrics == {"actions": 0.0, "illegal_actions": 1.0}
    assert said(again) == "you" and again.reward == pytest.approx(0.3)
    [everything] = play(make(f"{server}/echo"), [act("hi")])
    assert said(everything) == '{"echoed_message": "hi", "message_length": 2}'


@needs_openenv
def test_a_problem_is_a_seed_and_its_session_begins_as_the_prompt_says(server):
    environment = guessing(server, chat=False)
    prompts = [environment.prompt("train", index) for index in range(12)]
    assert [p.text for p in prompts] == [guessing(server, chat=False).prompt("train", i).text for i in range(12)]
    assert len({prompt.text for prompt in prompts}) == 2, "both rows occur"
    assert {p.payload["seed"] % 2 for p in prompts} == {0} and environment.prompt("eval", 0).payload["seed"] % 2 == 1
    for index in range(4):
        results = play(environment, [act(number) for number in range(10)], index)
        won = [result.reward for result in results].index(1.0)
        assert results[won].done and results[won].observation == ""
        assert {result.observation for result in results[:won]} <= {"\nhigher\n"}
        assert ("row 0" in prompts[index].text) == (won < 5)
    prompt = prompts[0]
    prompt.payload["first"] = "It is in row 7."
    with pytest.raises(EnvironmentFailure, match="not with what the prompt says"):
        play(environment, [act(1)], prompt=prompt)


@needs_openenv
def test_more_sessions_than_the_server_allows_are_failures(server):
    environment = guessing(server)

    async def body():
        episodes = [environment.start(environment.prompt("train", 0), 0) for _ in range(SESSIONS + 1)]
        try:
            return [await asyncio.gather(episode.step(act("11")), return_exceptions=True) for episode in episodes]
        finally:
            for episode in episodes:
                await episode.close()

    *served, last = [result for (result,) in asyncio.run(body())]
    assert [said(result) for result in served] == ["lower"] * SESSIONS
    assert isinstance(last, EnvironmentFailure) and "CAPACITY_REACHED" in str(last)


@needs_openenv
def test_what_the_schema_refuses_is_told_and_what_breaks_is_a_failure(server):
    environment = guessing(server)
    refused, after = play(environment, [act("many"), act("4")])
    assert "valid integer" in said(refused) and refused.reward == 0.0 and refused.metrics["illegal_actions"] == 1.0
    assert after.metrics["actions"] == 1.0
    with pytest.raises(EnvironmentFailure, match="EXECUTION_ERROR: bad luck"):
        play(environment, [act("13")])
    with pytest.raises(EnvironmentFailure, match="TimeoutError"):
        play(guessing(server, timeout_s=1.0), [act("14")])


@needs_openenv
def test_a_whole_action_may_be_json_and_other_fields_are_fixed(server):
    environment = make(f"{server}/guess", text_field="", action={"patience": 2})
    number, nonsense, unknown = play(environment, [act('{"number": 11}'), act("11"), act('{"number": 1, "x": 2}')])
    assert said(number) == "lower" and "JSON object" in said(nonsense)
    assert "Extra inputs" in said(unknown)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "localhost:1"}, "url: expected http"),
        ({"url": "http://127.0.0.1:9"}, "url: no OpenEnv server answers"),
        ({"url": "http://127.0.0.1:9", "timeout_s": 0.0}, "timeout_s"),
        ({"url": "http://127.0.0.1:9", "action": {"message": "x"}}, "action: message is the text_field"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=rf"environment\.options\.{named}"):
        make_environment(EnvironmentConfig(name="openenv", options=options))


def test_what_a_controller_leases_needs_no_server(monkeypatch):
    monkeypatch.setattr(OpenEnvEnvironment, "_request", lambda *_: {"observation": {"seen": "x"}})
    environment = make("http://127.0.0.1:1")
    prompt = environment.prompt("train", 3)

    def gone(*_):
        raise ConnectionRefusedError

    monkeypatch.setattr(OpenEnvEnvironment, "_request", gone)
    with pytest.raises(EnvironmentFailure):
        environment.prompt("train", 3)
    assert environment.named("train", 3) == (prompt.prompt_id, prompt.task)
