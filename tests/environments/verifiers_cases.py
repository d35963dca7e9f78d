"""The adapter of verifiers' tasksets, against the real package, with tasksets written here as its users write them:
run by test_verifiers_tasks.py with the interpreter that has the package."""

import asyncio
import sys
import threading

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import EnvironmentFailure
from megasao.environments.registry import make_environment
from megasao.environments.threads import MOST_HUNG

RELEASED = threading.Event()

TASKSET = """
import verifiers.v1 as vf

from tests.environments.verifiers_cases import RELEASED

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    NEEDS_CONTAINER = {container}

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace{runtime}) -> float:
        said = (trace.assistant_messages[-1].content or "").strip()
        if said == "hang":
            RELEASED.wait(250)
        return float(int(said) == task.answer)

    @vf.reward(weight=0.5)
    async def thoughtful(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].reasoning_content == "hm")

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    count: int = 40


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.count):
            data = SumData(prompt=f"What is {{n}} + {{n}}?", answer=2 * n, system_prompt="Be brief.")
            yield SumTask(data, self.config.task)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a taskset, under a name of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def body(name, container="False", runtime=""):
        (tmp_path / f"{name}.py").write_text(TASKSET.format(container=container, runtime=runtime))
        sys.modules.pop(name, None)
        return name

    return body


def make(taskset, **options):
    return make_environment(EnvironmentConfig(name="verifiers", options={"taskset": taskset, **options}))


def score(environment, text, index=0):
    async def body():
        episode = environment.start(environment.prompt("train", index), 0)
        try:
            return await episode.step(text)
        finally:
            await episode.close()

    return asyncio.run(body())


def test_prompts_are_the_tasks_and_rewards_those_of_their_functions(write):
    environment = make(write("sums_rewards"))
    prompt = environment.prompt("train", 0)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    number = int(prompt.messages[1]["content"].split()[2])
    right = score(environment, f"<think>hm</think>\n{2 * number}<|im_end|>")
    assert (right.reward, right.done, right.metrics) == (1.5, True, {"turns": 1.0})
    assert score(environment, f"{2 * number}").reward == 1.0
    assert score(environment, f"<think>hm</think>{2 * number + 1}").reward == 0.5
    with pytest.raises(EnvironmentFailure, match="invalid literal"):
        score(environment, "many")


def test_tasks_are_split_by_key_and_come_round_in_another_order(write):
    environment = make(write("sums_split"), settings={"count": 64}, chat=False)
    size = {split: len(environment._tasks[split]) for split in ("train", "eval")}
    texts = {split: [environment.prompt(split, index).text for index in range(size[split])] for split in size}
    assert not set(texts["train"]) & set(texts["eval"]) and sum(size.values()) == 64
    again = [environment.prompt("train", size["train"] + index).text for index in range(size["train"])]
    assert again != texts["train"] and sorted(again) == sorted(texts["train"])
    assert texts["train"][0].startswith("Be brief.\n\nWhat is ") and environment.prompt("train", 0).messages == ()


def test_scoring_that_hangs_is_a_failure_and_bounded(write):
    environment = make(write("sums_hang"), time_limit_s=0.05)
    for _ in range(MOST_HUNG):
        with pytest.raises(EnvironmentFailure, match=r"more than 0\.05 s"):
            score(environment, "hang")
    with pytest.raises(EnvironmentFailure, match="8 scorings hang"):
        score(environment, "1")
    RELEASED.set()


def test_tasks_that_need_more_than_an_answer_are_refused(write):
    with pytest.raises(ValueError, match="needs a container"):
        make(write("sums_container", container="True"))
    with pytest.raises(ValueError, match="needs a runtime, for right"):
        make(write("sums_runtime", runtime=", runtime"))
    with pytest.raises(ValueError, match="too few to split"):
        make(write("sums_few"), settings={"count": 1})
    with pytest.raises(ValueError, match=r"taskset\.cont"):
        make(write("sums_typo"), settings={"cont": 1})
    with pytest.raises(ValueError, match=r"environment\.options\.taskset: absent_tasks: .*not found"):
        make("absent_tasks")
    with pytest.raises(ValueError, match=r"environment\.options\.taskset: missing"):
        make("")
