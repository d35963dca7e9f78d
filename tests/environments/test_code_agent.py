"""Mending repositories: the twelve tasks, the tools, and what the hidden tests are kept safe from."""

import asyncio
import re
from dataclasses import replace

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.code_agent import CodeAgentEnvironment, CodeAgentEpisode, CodeAgentOptions, hidden_tests_pass
from megasao.environments.code_demonstrator import edit
from megasao.environments.code_tasks import SHIPPED, load_tasks
from megasao.environments.code_tasks.variants import other_names, variant
from megasao.environments.python_tool import INTERPRETER
from megasao.environments.registry import make_environment
from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.run import Sandbox, SandboxLimits
from megasao.environments.sandbox.workspace import pack, unpack

try:
    bubblewrap.require()
    REASON = None if bubblewrap.Path(INTERPRETER).exists() else f"the system has no {INTERPRETER}"
except bubblewrap.SandboxUnavailable as error:
    REASON = str(error)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

PLAIN = {"variants": True, "chat": False, "stop": "<end>", "instructions": ""}
HABITS = {"gives_up": 0.3, "remembers": 0.3}

TASKS = {task.name: task for task in load_tasks(SHIPPED)}


def packed(*layers):
    return pack({name: text.encode() for layer in layers for name, text in layer.items()})


def passes(task, *layers):
    sandbox = Sandbox("bubblewrap", SandboxLimits(time_s=30.0))
    return asyncio.run(hidden_tests_pass(task, packed(*layers), sandbox))


def play(*turns, task="bounded_cache", **options):
    """The results of an episode on one task, and its files at the end."""
    environment = CodeAgentEnvironment(CodeAgentOptions(**options))
    places = [(split, index) for split in ("train", "eval") for index in range(12)]
    place = next(place for place in places if environment.task(*place).name == task)
    episode = environment.start(environment.prompt(*place), 0)

    async def body():
        return [await episode.step(turn) for turn in turns]

    return asyncio.run(body()), unpack(episode.workspace)


def said(result):
    return result.messages[0]["content"]


def block(kind, text):
    return f"Now this.\n```{kind}\n{text}\n```<|im_end|>"


def test_there_are_twelve_tasks_in_two_splits():
    environment = make_environment(EnvironmentConfig(name="code_agent"))
    names = {split: {environment.task(split, index).name for index in range(24)} for split in ("train", "eval")}
    assert len(TASKS) == 12 and names["train"] | names["eval"] == set(TASKS)
    assert not names["train"] & names["eval"] and len(names["eval"]) == 3
    prompt = environment.prompt("train", 0)
    assert environment.task("train", 0).statement in prompt.messages[0]["content"]
    assert "unittest" not in prompt.text and "test_hidden" not in prompt.text


@pytest.mark.parametrize("name", TASKS)
def test_hidden_tests_fail_on_the_bug_and_pass_on_the_solution_under_any_names(name):
    for task in (TASKS[name], renamed(TASKS[name], 1)):
        assert not passes(task, task.files)
        assert passes(task, task.files, task.solution)
    assert not passes(task, task.files, TASKS[name].solution)


def renamed(task, seed):
    return variant(task, other_names(task, seed))


def code_words(task):
    texts = [text for files in (task.files, task.tests, task.solution) for pair in files.items() for text in pair]
    return [word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)]


@pytest.mark.parametrize("name", TASKS)
def test_a_variant_differs_in_its_names_only(name):
    task = TASKS[name]
    for seed in range(20):
        found = renamed(task, seed)
        other = dict(zip(task.names, found.names, strict=True))
        assert found == renamed(task, seed) and len(set(found.names)) == len(task.names)
        assert not set(found.names) & set(code_words(task))
        assert code_words(found) == [other.get(word, word) for word in code_words(task)]
    assert len({other_names(task, seed) for seed in range(20)}) > 10
    with pytest.raises(ValueError, match="names: expected 1 to"):
        other_names(replace(task, names=()), 0)


def test_held_out_names_are_never_trained_on():
    environment, other = (CodeAgentEnvironment(CodeAgentOptions(**PLAIN, seed=seed)) for seed in (0, 1))
    tasks = {split: [environment.task(split, index) for index in range(240)] for split in ("train", "eval")}
    assert all({task.name for task in found} == set(TASKS) for found in tasks.values())
    named = {split: {(task.name, task.names) for task in found} for split, found in tasks.items()}
    assert not named["train"] & named["eval"] and min(map(len, named.values())) > 200
    few = CodeAgentEnvironment(CodeAgentOptions(**PLAIN, only=["word_wrap", "month_ends"], most_names=1))
    assert [len(few.task("train", index).names) for index in range(4)] == [1] * 4
    assert {few.task(split, index).name for split in tasks for index in range(8)} == {"word_wrap", "month_ends"}
    assert tasks["train"] != [other.task("train", index) for index in range(240)]
    held_out = {"".join(task.files[name] for name in sorted(task.files)) for task in tasks["eval"]}
    shown = [environment.demonstration(index, 0)[2].text for index in range(240)]
    assert not held_out & {text.removeprefix("\n```output\n").removesuffix("```\n") for text in shown}


def test_the_demonstrator_is_shown_what_the_environment_shows_and_is_right_without_habits():
    """With its habits it is right where it has none of them, and only there."""
    careful, sloppy = (CodeAgentEnvironment(CodeAgentOptions(**PLAIN, **habits)) for habits in ({}, HABITS))
    assert [reward for index in range(12) for reward in [play_demonstration(careful, index)]] == [1.0] * 12
    rewards = [play_demonstration(sloppy, index) for index in range(24)]
    same = [careful.demonstration(index, 0) == sloppy.demonstration(index, 0) for index in range(24)]
    assert rewards == [float(right) for right in same] and 4 < sum(rewards) < 16


def play_demonstration(environment, index):
    """Its reward; the observations in it must be the environment's."""
    _, *turns = environment.demonstration(index, 0)
    task = environment._variant(environment._tasks["train"][index % 12], "train", "demonstration-0", index)
    episode = CodeAgentEpisode(task, environment._sandbox, environment.options)

    async def body():
        for number, turn in enumerate(turns):
            if turn.is_action:
                result = await episode.step(turn.text)
                assert result.done or turns[number + 1].text == result.observation
        return result.reward

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a\nb\nc\n", "a\nB\nc\n", "replace x\nb\n=======\nB\n"),
        ("a\nb\na\n", "a\nb\nB\n", "write x\na\nb\nB\n"),
        ("a\n", "a\nb\n", "write x\na\nb\n"),
        (None, "a\n", "write x\na\n"),
    ],
)
def test_the_demonstrator_replaces_what_stands_there_once(old, new, expected):
    assert edit("x", old, new) == expected


def test_a_repository_is_mended_with_shell_and_editor_and_handed_in():
    mended = TASKS["bounded_cache"].solution["cache.py"]
    results, files = play(
        block("bash", "ls; grep -n get cache.py"),
        block("replace cache.py", "self.nothing\n=======\nself.entries"),
        block("replace cache.py", "        return self.entries.get(key, default)\n=======\n        return None"),
        block("bash", "python3 -c 'import cache; print(cache.BoundedCache(1).get(1, 2))'; touch new"),
        block("write cache.py", mended.rstrip("\n")),
        "I am done.<|im_end|>",
    )
    assert "cache.py" in said(results[0]) and "def get" in said(results[0])
    assert "error: the old text must be in cache.py once" in said(results[1])
    assert said(results[2]) == "done" and said(results[3]) == "```output\nNone\n```" and said(results[4]) == "done"
    assert [result.done for result in results] == [False] * 5 + [True] and results[-1].reward == 1.0
    assert set(files) == {"cache.py", "new"}
    assert results[1].metrics == {"edits": 1.0, "edit_errors": 1.0}
    assert results[0].metrics == {"commands": 1.0, "command_errors": 0.0}


def test_work_that_is_not_mended_earns_nothing():
    results, _ = play(block("bash", "exit 3"), "Done.")
    assert results[0].metrics["command_errors"] == 1.0 and results[1].reward == 0.0 and results[1].done


@pytest.mark.parametrize(
    "attempt",
    [
        "echo 'import unittest' > test_hidden.py",
        "mkdir unittest; echo 'raise SystemExit(0)' > unittest/__init__.py",
        "echo 'import sys; sys.exit(0)' >> cache.py",
        "echo 'import os; os._exit(0)' >> cache.py",
        "echo 'import os; os._exit(0)' > sitecustomize.py; echo 'print(1)' > run_hidden_tests.py",
        "mkdir test_hidden.py; touch test_hidden.py/x",
        "mkdir run_hidden_tests.py; echo 'import sys; print(sys.argv[1])' > run_hidden_tests.py/__main__.py",
        "exit 125",
    ],
)
def test_tampering_with_the_tests_does_not_pass_them(attempt):
    results, _ = play(block("bash", attempt), "Done.")
    assert results[-1].reward == 0.0


def test_the_hidden_tests_are_nowhere_while_the_model_works():
    results, _ = play(block("bash", "ls -a . /tmp; cat test_hidden.py; grep -rl BoundedCache /workspace /tmp"))
    assert "No such file" in said(results[0]) and "Tests" not in said(results[0])
    assert "/workspace/cache.py" in said(results[0])


def test_what_a_turn_cannot_do_is_an_observation_and_the_work_goes_on():
    turns = [
        block("write", "."),
        block("write cache.py/x", "x"),
        block("bash", "mkdir d; touch d/x"),
        block("write d", "x"),
        block(f"write {'x' * 300}", "x"),
        block("bash", "echo a\0b; exit 125"),
        block("bash", f"echo {'x' * 200_000}"),
        block("bash", "echo " + "'" * 30_000),  # within the kernel's bound, not within a container's script
        block("write ./d/x", "new"),
    ]
    results, files = play(*turns, block("bash", "cat d/x"))
    assert not any(result.done for result in results)
    shown = [said(result) for result in results]
    for number, text in ((1, "is a directory"), (3, "is a directory"), (4, "is no file"), (5, "ab"), (6, "too long")):
        assert text in shown[number], number
    assert "too long" in shown[7] and "new" in shown[9] and set(files) == {"cache.py", "d/x"}


@pytest.mark.parametrize("path", ["../x", "/usr/x", "", "."])
def test_edits_stay_in_the_workspace(path):
    results, files = play(block(f"write {path}", "x"), block("replace absent.py", "a\n=======\nb"))
    assert "is no file in the workspace" in said(results[0]) and "there is no file absent.py" in said(results[1])
    assert set(files) == {"cache.py"}


def test_demonstrations_need_plain_prompts():
    with pytest.raises(ValueError, match="needs plain prompts"):
        CodeAgentEnvironment().demonstration(0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "expected exactly the keys"),
        ("[", "while parsing"),
        ("{statement: s, files: {a: b}, tests: {a: b}, solution: {a: b}, names: [a b]}", "names: expected a list"),
        ("{statement: '', files: {a: b}, tests: {a: b}, solution: {a: b}}", "statement: expected text"),
        ("{statement: s, files: {}, tests: {a: b}, solution: {a: b}}", "files: expected at least one"),
        ("{statement: s, files: {../a: b}, tests: {a: b}, solution: {a: b}}", "files: expected relative names"),
    ],
)
def test_tasks_that_are_none_are_named(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"environment\.options\.tasks: .*bad\.yaml(.|\n)*{message}"):
        make_environment(EnvironmentConfig(name="code_agent", options={"tasks": str(tmp_path)}))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sandbox": "x"}, "sandbox"),
        ({"time_s": 0.0}, "time_s"),
        ({"tasks": "absent"}, "tasks"),
        ({"gives_up": 2.0}, "gives_up"),
        ({"most_names": -1}, "most_names"),
        ({"only": ["word_warp"]}, "only: no task 'word_warp' .*did you mean 'word_wrap'"),
        ({"remembers": 0.5}, "remembers: without variants"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=rf"environment\.options\.{named}"):
        make_environment(EnvironmentConfig(name="code_agent", options=options))
