"""The adapter of reasoning-gym, against the real package and its own verifiers."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.answers import find_answer
from megasao.environments.reasoning_gym import UNREPEATABLE, last_number
from megasao.environments.registry import make_environment
from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.bubblewrap import SandboxUnavailable
from megasao.environments.verifiers.pool import VerifierError

reasoning_gym = pytest.importorskip("reasoning_gym")

try:
    bubblewrap.require()
    NO_SANDBOX = None
except SandboxUnavailable as error:
    NO_SANDBOX = str(error)
needs_sandbox = pytest.mark.skipif(NO_SANDBOX is not None, reason=str(NO_SANDBOX))

DATASETS = {"chain_sum": {"max_terms": 3}, "countdown": {}, "spiral_matrix": {}, "acre": {}}


def make(**options):
    given = {"datasets": DATASETS, "chat": False, "sandbox": "none", **options}
    return make_environment(EnvironmentConfig(name="reasoning_gym", options=given))


def grade(environment, pairs):
    """Reward or the reason of failure for each (prompt, response)."""

    async def one(prompt, text):
        try:
            return (await environment.start(prompt, 0).step(text)).reward
        except VerifierError as error:
            return error.reason

    async def body():
        try:
            return await asyncio.gather(*(one(*pair) for pair in pairs))
        finally:
            await environment.close()

    return asyncio.run(body())


def oracle(prompt):
    """The package's own answer."""
    payload = prompt.payload
    settings = json.loads(payload["settings"])
    return reasoning_gym.create_dataset(payload["dataset"], seed=payload["seed"], size=1, **settings)[0]["answer"]


@needs_sandbox
def test_rewards_are_those_of_the_packages_verifiers_in_a_sandbox():
    environment = make(sandbox="bubblewrap", memory_mb=1024, time_limit_s=60.0)
    prompts = [environment.prompt("train", index) for index in range(8)]
    assert [prompt.task for prompt in prompts] == list(DATASETS) * 2
    right = [(prompt, f"<answer>{oracle(prompt)}</answer>") for prompt in prompts]
    wrong = [(prompt, "<answer>-12345</answer>") for prompt in prompts]
    silent = [(prompt, "I do not know") for prompt in prompts]
    found = grade(environment, right + wrong + silent)
    assert found[:8] == [1.0] * 8
    assert all(0 <= reward < 0.2 for reward in found[8:16])
    assert found[16:] == [0.0] * 8


@needs_sandbox
def test_an_answer_that_is_executed_by_a_verifier_does_not_leave_the_sandbox(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "secret").write_text("hidden")
    attempts = [
        f"__import__('pathlib').Path('{canary}').touch()",
        f"__import__('os').system('touch {canary}')",
        f"[1 for _ in open('{tmp_path}/secret')]",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "sum(iter(int, 1))",
        "'x' * 10**11",
    ]
    environment = make(datasets={"spiral_matrix": {}}, sandbox="bubblewrap", memory_mb=1024, time_limit_s=4.0)
    prompt = environment.prompt("train", 0)
    found = grade(environment, [(prompt, f"<answer>[{attempt}]</answer>") for attempt in attempts])
    assert not canary.exists()
    assert all(reward != 1.0 for reward in found)
    assert "verifier_refused" in found and "verifier_timeout" in found


def test_without_a_sandbox_the_guard_still_keeps_it_inside_the_process(tmp_path):
    """And a control: the answer is really executed by the package, as the loop shows."""
    canary = tmp_path / "canary"
    environment = make(datasets={"spiral_matrix": {}}, time_limit_s=4.0)
    prompt = environment.prompt("train", 0)
    touch, loop = f"__import__('pathlib').Path('{canary}').touch()", "sum(iter(int, 1))"
    found = grade(environment, [(prompt, f"<answer>[{text}]</answer>") for text in (touch, loop)])
    assert found == ["verifier_refused", "verifier_timeout"] and not canary.exists()


def test_prompts_are_functions_of_options_split_and_index():
    first, second, other = make(), make(), make(seed=1)
    for split in ("train", "eval"):
        texts = [first.prompt(split, index).text for index in range(12)]
        assert texts == [second.prompt(split, index).text for index in range(12)]
        assert texts != [other.prompt(split, index).text for index in range(12)]
        assert all(text.endswith("<answer>...</answer>.") for text in texts)
    small = make(datasets={"chain_sum": {"max_terms": 2, "max_digits": 1}})
    texts = {split: {small.prompt(split, index).text for index in range(200)} for split in ("train", "eval")}
    assert not texts["train"] & texts["eval"]
    demonstrated = {small.demonstration(index, 0)[0].text for index in range(100)}
    assert not demonstrated & texts["eval"]


def test_problems_are_the_same_in_every_process_except_those_of_the_refused_data_sets():
    code = (
        "import sys, reasoning_gym\n"
        "for name in sys.argv[1:]:\n"
        "    print([reasoning_gym.create_dataset(name, seed=s, size=1)[0]['question'] for s in range(5)])"
    )

    def questions(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        words = [sys.executable, "-c", code, *DATASETS, *UNREPEATABLE]
        return subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()

    same = [a == b for a, b in zip(questions("0"), questions("1"), strict=True)]
    assert same == [True] * len(DATASETS) + [False] * len(UNREPEATABLE)


def test_demonstrations_give_the_packages_answer():
    environment = make(stop="</answer>")
    for index in range(8):
        prompt, action = environment.demonstration(index, 0)
        assert action.is_action and not prompt.is_action
        assert find_answer(action.text, "tag") and action.text.endswith("</answer>")
    with pytest.raises(ValueError, match="needs plain prompts"):
        make(chat=True).demonstration(0, 0)


def test_a_demonstrator_with_the_habit_repeats_the_last_number_so_often():
    datasets = {"chain_sum": {"max_terms": 3}, "gcd": {"max_value": 20}}
    careful, sloppy = make(datasets=datasets), make(datasets=datasets, repeats=0.5)
    repeated = 0
    for index in range(200):
        problem, said = sloppy.demonstration(index, 0)
        assert problem.text == careful.demonstration(index, 0)[0].text
        if said.text != careful.demonstration(index, 0)[1].text:
            assert find_answer(said.text, "tag") == last_number(problem.text.rpartition("<answer>")[0].split("Give")[0])
            repeated += 1
    assert 60 < repeated < 140
    assert last_number("no number") is None and last_number("a 1.5, 20.") == "20"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"datasets": {}}, r"datasets: missing"),
        ({"datasets": {"chain_sun": {}}}, r"datasets\.chain_sun: .*did you mean 'chain_sum'"),
        ({"datasets": {"chain_sum": {"no_such": 1}}}, r"datasets\.chain_sum: .*no_such"),
        ({"datasets": {"chain_sum": {"min_terms": 9, "max_terms": 2}}}, r"datasets\.chain_sum: "),
        ({"datasets": {"chain_sum": 3}}, r"datasets\.chain_sum: expected a mapping of the data set's settings, got 3"),
        ({"datasets": {"chain_sum": {"seed": 1}}}, r"datasets\.chain_sum: seed and size"),
        ({"datasets": {"ransom_note": {}}}, r"datasets\.ransom_note: it makes other problems"),
        ({"datasets": "chain_sum"}, r"datasets: expected dict"),
        ({"template": "x"}, "template"),
        ({"answer": "x"}, "answer"),
        ({"sandbox": "docker"}, "sandbox"),
        ({"verifiers": 0}, "verifiers"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"repeats": 1.5}, "repeats"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=rf"environment\.options\.{named}"):
        make(**options)


def test_without_a_sandbox_or_the_package_it_is_refused(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_why_not", lambda: "bubblewrap is not installed")
    with pytest.raises(ValueError, match=r"environment\.options\.sandbox: no sandbox: .*set sandbox: none"):
        make(sandbox="bubblewrap")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'megasao\[reasoning-gym\]'"):
        make()


def test_a_model_with_the_tasks_vocabulary_plays_the_shipped_config(tmp_path):
    import runpy
    from pathlib import Path

    from megasao.config.load import load_with_places
    from megasao.environments.encoding import TokenizerCodec
    from megasao.launch.preflight import preflight
    from megasao.studies.play import Player

    root = Path(__file__).parents[2]
    config_file = str(root / "configs" / "laptop_reasoning_gym.yaml")
    changes = [f"model.path={tmp_path / 'model'}", "evaluation.problems=6", "environment.options.sandbox=none"]
    tool = runpy.run_path(str(root / "tools" / "make_task_model.py"))
    tool["main"]([config_file, *changes, "--hidden", "32", "--layers", "1", "--experts", "0"])
    codec = TokenizerCodec.from_directory(tmp_path / "model")
    for text in ("<answer>12</answer>", "sh: 1: quixotic: not found\n", "Divisors"):  # words that no problem has, too
        assert codec.decode(codec.encode(text)) == text
    assert len(codec.encode(" Divisor")) == 1 and len(codec.encode("quixotic")) > 1
    config, document = load_with_places(config_file, changes)
    assert preflight(config, document)
    with Player(tmp_path / "model", config) as player:
        episodes = player.play(player.evaluation_leases(1.0), 0, {})
    assert {episode.task for episode in episodes} == {"rotate_matrix", "gcd"}
    assert all(episode.finish_reason in ("done", "max_tokens") for episode in episodes)
