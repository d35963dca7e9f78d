"""Gymnasium's own text environments, and small ones registered here."""

import asyncio
import threading
from typing import ClassVar

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="the package gymnasium is not installed (extra gymnasium)")

from megasao.config.rollout import EnvironmentConfig  # noqa: E402
from megasao.environments.base import EnvironmentFailure  # noqa: E402
from megasao.environments.registry import make_environment  # noqa: E402
from megasao.environments.threads import MOST_HUNG  # noqa: E402

LAKE = {
    "id": "FrozenLake-v1",
    "settings": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
    "instructions": "Reach G.",
}


RELEASED, HANGING = threading.Event(), threading.Semaphore(0)


class Parrot(gymnasium.Env):
    """Text in, text out: the word that it was reset with is wanted back."""

    metadata: ClassVar = {"render_modes": []}
    action_space = gymnasium.spaces.Text(8, charset="abcdefgh")
    observation_space = gymnasium.spaces.Text(64)
    render_mode = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abcdefgh"), 5))
        return f"say {self.word}", {}

    def step(self, action):
        if action == "h":
            raise RuntimeError("the parrot flew away")
        if action == "g":
            HANGING.release()
            RELEASED.wait(250)
        return "no", float(action == self.word), action == self.word, False, {}


class Wide(Parrot):
    action_space = gymnasium.spaces.Box(0, 1)


gymnasium.register("Parrot-v0", Parrot, disable_env_checker=True)
gymnasium.register("Wide-v0", Wide, disable_env_checker=True)


def make(**options):
    return make_environment(EnvironmentConfig(name="gymnasium", options=options))


def play(environment, turns, index=0):
    async def body():
        episode = environment.start(environment.prompt("train", index), 0)
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await episode.close()

    return asyncio.run(body())


def act(*names):
    return [f"<think><action>up</action></think>so <action> {name} </action><|im_end|>" for name in names]


def test_the_way_over_the_lake_earns_its_reward_at_the_end():
    found = play(make(**LAKE), act("down", "down", "right", "right", "down", "right"))
    assert [(result.reward, result.done) for result in found] == [(0.0, False)] * 5 + [(1.0, True)]
    assert "(Down)" in found[0].messages[0]["content"] and found[-1].messages == ()
    (fell,) = play(make(**LAKE), act("right", "down"))[1:]
    assert (fell.reward, fell.done) == (0.0, True)


def test_what_is_no_action_is_told_what_is_and_moves_nothing():
    illegal = ["I go down", *act("south", "1"), "<action>"]
    found = play(make(**LAKE), [*illegal, *act("down", "down", "right", "right", "down", "right")])
    for result in found[: len(illegal)]:
        assert result.messages[0]["content"] == (
            "error: write one of left, down, right, up between <action> and </action>."
        )
        assert result.metrics == {"actions": 0.0, "illegal_actions": 1.0} and not result.done
    assert found[-1].reward == 1.0
    numbers = play(make(id="FrozenLake-v1", settings={"is_slippery": False}), act("1", "5"))
    assert [result.metrics["illegal_actions"] for result in numbers] == [0.0, 1.0]


def test_prompts_are_functions_of_their_index_and_splits_share_no_seed():
    environment, again = make(id="Parrot-v0"), make(id="Parrot-v0")
    prompts = {split: [environment.prompt(split, n) for n in range(40)] for split in ("train", "eval")}
    assert prompts["train"] == [again.prompt("train", n) for n in range(40)]
    assert {p.payload["seed"] % 2 for p in prompts["train"]} == {0}
    assert {p.payload["seed"] % 2 for p in prompts["eval"]} == {1}
    assert len({p.text for split in prompts.values() for p in split}) == 80
    assert make(id="Parrot-v0", seed=1).prompt("train", 0) != prompts["train"][0]
    assert make(**LAKE).prompt("train", 0).messages[0]["content"].startswith("Reach G.\n\n")


def test_text_actions_and_an_exception_is_a_failure():
    environment = make(id="Parrot-v0", chat=False)
    word = environment.prompt("train", 3).text.split()[1]
    wrong, illegal, right = play(environment, act("abc", "xyz", word), index=3)
    assert (wrong.reward, wrong.done, wrong.observation) == (0.0, False, "\nno\n")
    assert illegal.metrics["illegal_actions"] == 1.0 and (right.reward, right.done) == (1.0, True)
    with pytest.raises(EnvironmentFailure, match="RuntimeError: the parrot flew away"):
        play(environment, act("h"))


def test_environments_that_hang_lose_their_episodes_and_are_bounded():
    environment = make(id="Parrot-v0", chat=False)

    async def hang():
        episode = environment.start(environment.prompt("train", 0), 0)
        step = asyncio.create_task(episode.step("<action>g</action>"))
        assert await asyncio.to_thread(HANGING.acquire, timeout=60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(step, 0.1)
        await episode.close()

    for number in range(MOST_HUNG):
        assert environment.hung == number
        asyncio.run(hang())  # which would wait for a thread of the event loop's own
    with pytest.raises(EnvironmentFailure, match="8 of its episodes hang"):
        play(environment, act("abc"))
    assert make(id="Parrot-v0", chat=False).hung == 0
    RELEASED.set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "id: missing"),
        ({"id": "FrozenLak-v1"}, "id: FrozenLak-v1 cannot be made"),
        ({"id": "FrozenLake-v1", "settings": {"ice": 1}}, "id: FrozenLake-v1 cannot be made"),
        ({"id": "Wide-v0"}, "id: expected Discrete or Text actions"),
        ({**LAKE, "actions": ["left"]}, "actions: expected 4 names, got 1"),
        ({**LAKE, "actions": ["left", "left", "up", "down"]}, "actions: expected different names"),
        ({"id": "Parrot-v0", "actions": ["a"]}, "actions: the actions are free text"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=rf"environment\.options\.{message}"):
        make(**options)


def test_there_are_no_demonstrations():
    with pytest.raises(ValueError, match="no demonstrations"):
        make(**LAKE).demonstration(0, 0)
