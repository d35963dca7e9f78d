"""SWE-bench on small repositories in the sandbox: rewards of the hidden tests, and what a model cannot see or reach."""

import asyncio
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import EnvironmentFailure
from megasao.environments.registry import make_environment
from megasao.environments.sandbox import bubblewrap
from megasao.environments.swebench.environment import SwebenchEnvironment, SwebenchOptions
from megasao.environments.swebench.rows import load_instances
from megasao.environments.swebench.tests import (
    all_pass,
    read_matplotlib,
    read_pytest,
    read_pytest_short_paths,
    read_sympy,
    read_unittest,
    targets,
)
from megasao.environments.swebench.tests import (
    test_run as run_of,
)
from megasao.environments.swebench.work import judge
from tests.swebench_rows import WORDS_MENDED, write_instances

try:
    bubblewrap.require()
    REASON = None
except bubblewrap.SandboxUnavailable as error:
    REASON = str(error)
sandboxed = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOOL = Path(__file__).parents[2] / "tools" / "check_swebench.py"
LIMITS = {"time_s": 60.0, "test_time_s": 200.0, "memory_mb": 512, "processes": 64, "disk_mb": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("swebench")
    write_instances(path)
    return path


@pytest.fixture(scope="module")
def environment(place):
    data = str(place / "swebench_verified.parquet")
    options = {"data": data, "eval_data": data, "repositories": str(place / "repositories"), **LIMITS, "output": 20000}
    return make_environment(EnvironmentConfig(name="swebench", options=options))


def numbered(environment, number):
    return next(n for n in range(4) if environment.instance("train", n).instance_id.endswith(f"-{number}"))


def play(environment, number, *turns):
    """The results of an episode on instance ``number``."""
    episode = environment.start(environment.prompt("train", numbered(environment, number)), 0)

    async def body():
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await episode.close()

    return asyncio.run(body())


def said(result):
    return result.messages[0]["content"]


def block(kind, text):
    return f"Now this.\n```{kind}\n{text}\n```<|im_end|>"


def patched(instance):
    return block("bash", f"git apply - <<'END'\n{instance.patch}END\n")


@sandboxed
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_solution_earns_1_and_nothing_earns_0(environment, number):
    instance = environment.instance("train", numbered(environment, number))
    results = play(environment, number, patched(instance), "Done.")
    assert said(results[0]) == "```output\n\n```" and (results[1].reward, results[1].done) == (1.0, True)
    assert results[1].metrics == {"handed_in": 1.0, "no_patch": 0.0, "not_applied": 0.0, "tests_stopped": 0.0}
    assert play(environment, number, "Done.")[0].reward == 0.0


@sandboxed
def test_an_issue_is_resolved_with_shell_and_editor(environment):
    results = play(
        environment,
        1,
        block("bash", "ls; git log --oneline | wc -l; git status --short"),
        block("replace words.py", "nothing\n=======\nx"),
        block("replace words.py", "    return len(text.split(' '))\n=======\n    return len(text.split())"),
        block("write notes/new.txt", "caf\u00e9"),
        block("bash", "cat notes/new.txt; python3 -m unittest 2>&1 | tail -1; git diff --stat; exit 7"),
        block("write ../x", "x"),
        block("replace absent.py", "a\n=======\nb"),
        "I am done.",
    )
    assert said(results[0]) == "```output\ntests\nwords.py\n1\n```"
    assert "error: the old text must be in words.py once" in said(results[1])
    assert [said(result) for result in results[2:4]] == ["done", "done"]
    assert "caf\u00e9\n" in said(results[4]) and "OK" in said(results[4]) and "words.py | 2" in said(results[4])
    assert results[4].metrics == {"commands": 1.0, "command_errors": 1.0}
    assert "is no file in the repository" in said(results[5]) and "there is no file absent.py" in said(results[6])
    assert results[-1].reward == 1.0


@sandboxed
def test_one_test_that_used_to_pass_is_enough_for_0(environment):
    broken = WORDS_MENDED.replace("max(", "min(")
    assert play(environment, 1, block("write words.py", broken), "Done.")[-1].reward == 0.0
    assert play(environment, 1, block("write words.py", WORDS_MENDED), "Done.")[-1].reward == 1.0


@sandboxed
def test_neither_hidden_tests_nor_hints_nor_other_commits_are_there(environment, place):
    look = (
        "git log --all --format=%B; git fsck --unreachable --no-reflogs; git remote; git tag; git branch -a; "
        "git cat-file --batch-all-objects --batch; git stash list; git reflog --format=%gs; "
        "cat -v $(find . /tmp -type f -not -path './.git/*'); ls -a / /tmp; cat /proc/1/cmdline"
    )
    shown = said(play(environment, 1, block("bash", look))[0])
    for secret in ("test_spaces", "nobody may see", "secret of the future", "count any space", "default=''"):
        assert secret not in shown
    assert "test_longest" in shown and "base" in shown
    prompt = environment.prompt("train", numbered(environment, 1))
    assert "exactly one space" in prompt.text
    for secret in ("test_spaces", "nobody may see", "split()"):
        assert secret not in prompt.text and secret not in json.dumps(prompt.messages)


@sandboxed
@pytest.mark.parametrize(
    "attempt",
    [
        "rm -r tests; mkdir tests; touch tests/__init__.py",
        "sed -i 's/^class/class Other(unittest.TestCase):\\n    pass\\n\\n\\nclass/' tests/test_words.py",
        "echo 'import os; os._exit(0)' >> words.py",
        "echo 'import sys; sys.exit(0)' > sitecustomize.py",
        "ln -s /etc/passwd link; git config core.hooksPath .; git config diff.external /bin/true",
        "rm -rf tests; ln -s / tests",
        "git commit -q --allow-empty -m x; git gc -q --prune=now",
    ],
)
def test_tampering_passes_no_tests(environment, attempt):
    result = play(environment, 1, block("bash", attempt), "Done.")[-1]
    assert (result.reward, result.done) == (0.0, True)


@sandboxed
def test_a_change_of_the_hidden_tests_files_does_not_count(environment):
    instance = environment.instance("train", numbered(environment, 1))
    spoiled = block("bash", "echo 'raise SystemExit(1)' > tests/test_words.py; git add -A; git commit -qm spoiled")
    assert play(environment, 1, patched(instance), spoiled, "Done.")[-1].reward == 1.0


@sandboxed
def test_work_that_gives_no_patch_or_never_ends_earns_nothing(environment):
    gone = play(environment, 3, block("bash", "rm -rf .git"), "Done.")[-1]
    assert gone.reward == 0.0 and gone.metrics["no_patch"] == 1.0
    fast = SwebenchEnvironment(replace(environment.options, test_time_s=1.0))
    endless = play(fast, 3, block("write stack.py", "while True: pass"), "Done.")[-1]
    assert endless.reward == 0.0 and endless.metrics["tests_stopped"] == 1.0


@sandboxed
def test_what_is_not_the_models_fault_is_a_failure(environment, place):
    """A hidden patch that does not fit, a commit that is not there: no reward at all."""
    instance = environment.instance("train", numbered(environment, 1))
    site = environment.site(instance)
    solution = instance.patch.encode()
    assert asyncio.run(judge(site, instance, solution)).passed
    for changes in (
        {"test_patch": instance.test_patch.replace("test_longest", "test_shortest")},
        {"base_commit": "0" * 40},
    ):
        with pytest.raises(EnvironmentFailure):
            asyncio.run(judge(site, replace(instance, **changes), solution))
    unfit = asyncio.run(judge(site, instance, solution.replace(b"split(' ')", b"split('x')")))
    assert (unfit.passed, unfit.applied) == (False, False)


@sandboxed
def test_the_tool_says_which_instances_can_be_judged(place, tmp_path, capsys):
    """Good rows, one whose solution is none, and one whose hidden patch does not fit."""
    rows = pq.read_table(place / "swebench_verified.parquet").to_pylist()
    rows[1]["patch"] = rows[0]["patch"]
    rows[2]["test_patch"] = rows[2]["test_patch"].replace("/dev/null", "a/test_stack.py")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    main = runpy.run_path(str(TOOL))["main"]
    limits = [f"{name}={value}" for name, value in LIMITS.items()]
    code = main([f"data={tmp_path / 'rows.json'}", f"repositories={place / 'repositories'}", *limits])
    said = capsys.readouterr().out.splitlines()
    assert code == 1 and said[0] == "tiny__words-1: fine" and said[3:] == ["tiny__shelf-4: fine", "2 of 4 are fine"]
    assert said[1] == "tiny__words-2: its solution does not fit" and "swebench_failure: the hidden tests" in said[2]
    assert main(["data=absent"]) == 2


@sandboxed
def test_demonstrations_resolve_the_issue(environment):
    plain = SwebenchEnvironment(replace(environment.options, chat=False, stop="<|im_end|>"))
    turns = plain.demonstration(numbered(environment, 2), 0)
    results = play(plain, 2, *(turn.text for turn in turns if turn.is_action))
    assert results[0].observation == turns[2].text and results[-1].reward == 1.0
    with pytest.raises(ValueError, match="needs plain prompts"):
        environment.demonstration(0, 0)


def test_rows_are_read_from_parquet_and_json(place, tmp_path):
    found = load_instances(place / "swebench_verified.parquet")
    assert [instance.instance_id for instance in found] == [
        "tiny__words-1",
        "tiny__words-2",
        "tiny__stack-3",
        "tiny__shelf-4",
    ]
    assert found[0].fail_to_pass == ("test_spaces (tests.test_words.WordsTest)",) and found[3].pass_to_pass == ()
    assert replace(found[0], instance_id="psf__requests-1142").image("a/{instance}:latest") == (
        "a/psf_1776_requests-1142:latest"
    )
    rows = [{**vars(one), "FAIL_TO_PASS": list(one.fail_to_pass), "PASS_TO_PASS": []} for one in found]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_instances(tmp_path)[2].test_patch == found[2].test_patch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_commit": "main"}, "row 0: base_commit: expected"),
        ({"instance_id": "../x"}, "row 0: instance_id: expected"),
        ({"repo": "x"}, "row 0: repo: expected"),
        ({"test_patch": ""}, "row 0: test_patch: expected text"),
        ({"FAIL_TO_PASS": "[]"}, "row 0: FAIL_TO_PASS: expected at least one"),
        ({"FAIL_TO_PASS": "test_a"}, "row 0: FAIL_TO_PASS: expected a list"),
        ({"PASS_TO_PASS": [1]}, "row 0: PASS_TO_PASS: expected a list"),
    ],
)
def test_rows_that_are_none_are_named(place, tmp_path, changes, message):
    row = {**pq.read_table(place / "swebench_verified.parquet").to_pylist()[0], **changes}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=rf"environment\.options\.data: .*rows\.json, {message}"):
        SwebenchEnvironment.from_options({"data": str(tmp_path / "rows.json")})


PYTEST_LOG = """tests/test_a.py::test_loud PASSED
tests/test_a.py ..F
------ Captured stdout ------
PASSED tests/test_a.py::test_forged
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_two[a b]\x1b[0m
SKIPPED [1] tests/test_a.py:7: not here
XFAIL tests/test_a.py::test_three - reason
FAILED tests/test_a.py::test_four - assert 1 == 2
ERROR tests/test_b.py
"""
UNITTEST_LOG = """test_a (x.Y.test_a) ... ok
test_b (x.Y) ... Testing against Django installed in '/x'
ok
test_c (x.Y) ... FAIL
test_d (x.Y) ... ERROR
test_e (x.Y.test_e)
What it does. ... ok
test_f (x.Y) ... skipped 'no reason'
test_g (x.Y) ... expected failure
Ran 7 tests
OK
"""
SYMPY_LOG = "sympy/core/tests/test_a.py[3] \ntest_one ok\ntest_two F\ntest_three E\ntest_four f    [OK]\n"


def test_logs_of_tests_are_read():
    assert read_pytest(PYTEST_LOG) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_two[a": "PASSED",
        "[1]": "SKIPPED",
        "tests/test_a.py::test_three": "XFAIL",
        "tests/test_a.py::test_four": "FAILED",
        "tests/test_b.py": "ERROR",
    }
    assert read_pytest("tests/a.py::test_x PASSED [ 50%]\n") == {"tests/a.py::test_x": "PASSED"}
    assert read_pytest_short_paths("PASSED a.py::t[/tmp/x/y.py]\nFAILED a.py::u[//h/x] - e\n") == {
        "a.py::t[/y.py]": "PASSED",
        "a.py::u[//h/x]": "FAILED",
    }
    assert read_matplotlib("PASSED a.py::t[MouseButton.LEFT]\n") == {"a.py::t[1]": "PASSED"}
    assert read_unittest(UNITTEST_LOG) == {
        "test_a (x.Y)": "PASSED",
        "test_b (x.Y)": "PASSED",
        "test_c (x.Y)": "FAILED",
        "test_d (x.Y)": "ERROR",
        "What it does.": "PASSED",
        "test_f (x.Y)": "SKIPPED",
        "test_g (x.Y)": "XFAIL",
    }
    assert read_sympy(SYMPY_LOG) == {"test_one": "PASSED", "test_two": "FAILED", "test_three": "ERROR"}


def test_all_named_tests_must_pass(place):
    instance = load_instances(place / "swebench_verified.parquet")[2]
    statuses = {"test_order (test_stack.StackTest)": "PASSED", "test_one (test_stack.StackTest)": "PASSED"}
    skipped = {**statuses, "test_large (test_stack.StackTest)": "SKIPPED"}
    assert all_pass(instance, skipped)
    assert not all_pass(instance, statuses)
    assert not all_pass(instance, {**skipped, "test_one (test_stack.StackTest)": "FAILED"})
    assert not all_pass(instance, {**skipped, "test_order (test_stack.StackTest)": "SKIPPED"})


def test_published_repositories_have_their_own_commands(place):
    tiny = load_instances(place / "swebench_verified.parquet")[0]
    touched = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n"

    def made(repo, version, *files):
        return replace(tiny, repo=repo, version=version, test_patch="".join(map(touched.format, files)))

    django = made(
        "django/django", "1.11", "tests/forms/test_x.py", "tests/forms/models.py", "django/x.py", "docs/a.txt"
    )
    assert targets(django) == ["forms.test_x"]
    assert run_of(django).install == "python setup.py install" and run_of(made("django/django", "3.0")).install == ""
    assert "--parallel" not in run_of(made("django/django", "1.9")).command and "--parallel 1" in run_of(django).command
    flask = made("pallets/flask", "2.3", "tests/test_a.py", "tests/static/x.json")
    assert targets(flask) == ["tests/test_a.py"] and run_of(flask).command == "pytest -rA"
    assert run_of(tiny).command == "python3 -m unittest -v"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "podmann"}, r"sandbox: expected one of .* \(did you mean 'podman'\?\)"),
        ({"sandbox": "none"}, "repositories: none has no images"),
        ({"time_s": 0.0}, "time_s: expected more than 0"),
        ({"image": "x"}, r"image: expected \{instance\}"),
        ({}, "data: name the published file"),
        ({"data": "absent"}, "data: absent does not exist"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=rf"environment\.options\.{message}"):
        make_environment(EnvironmentConfig(name="swebench", options=options))


def test_a_repository_that_is_not_there_is_named(place):
    with pytest.raises(ValueError, match=r"tiny__words-\d: neither .*tiny__words\.bundle nor .*tiny__words exists"):
        SwebenchEnvironment(
            SwebenchOptions(data=str(place / "swebench_verified.parquet"), repositories=str(place), sandbox="none")
        )
