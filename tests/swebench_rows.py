"""Four hand-made instances in the format of SWE-bench Verified, of three small repositories that are made here."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = (
    "def count(text):\n    return len(text.split(' '))\n\n\ndef longest(text):\n    return max(text.split(), key=len)\n"
)
WORDS_MENDED = WORDS.replace("split(' ')", "split()")
WORDS_MENDED_TWICE = WORDS_MENDED.replace("key=len)", "key=len, default='')")
WORDS_TESTS = """import unittest

import words


class WordsTest(unittest.TestCase):
    def test_count(self):
        self.assertEqual(words.count("one two"), 2)

    def test_longest(self):
        self.assertEqual(words.longest("a bbb cc"), "bbb")
"""
WORDS_TESTS_1 = f"""{WORDS_TESTS}
    def test_spaces(self):
        self.assertEqual(words.count(" one  two\\n"), 2)
"""
WORDS_TESTS_2 = f"""{WORDS_TESTS_1}
    def test_nothing(self):
        \"\"\"The longest word of nothing is empty.\"\"\"
        self.assertEqual(words.longest(""), "")
"""

STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.insert(0, item)

    def pop(self):
        return self.items.pop()
"""
STACK_MENDED = STACK.replace("insert(0, item)", "append(item)")
STACK_TESTS = """import unittest

from stack import Stack


class StackTest(unittest.TestCase):
    def test_one(self):
        stack = Stack()
        stack.push(1)
        self.assertEqual(stack.pop(), 1)

    def test_order(self):
        stack = Stack()
        stack.push(1)
        stack.push(2)
        self.assertEqual((stack.pop(), stack.pop()), (2, 1))

    @unittest.skip("not on every machine")
    def test_large(self):
        pass
"""

SHELF = "import json\n\n\ndef save(books):\n    return json.dumps(books)\n"
SHELF_MENDED = SHELF.replace("dumps(books)", "dumps(books, sort_keys=True)")
SHELF_TESTS = """import unittest

from shelf.store import save


class SaveTest(unittest.TestCase):
    def test_order(self):
        self.assertEqual(save({"b": 1, "a": 2}), '{"a": 2, "b": 1}')
"""

Files = Mapping[str, str]

_DATE = "2024-01-01T00:00:00+0000"
_GIT = {name: value for who in ("AUTHOR", "COMMITTER") for name, value in (
    (f"GIT_{who}_NAME", "maker"), (f"GIT_{who}_EMAIL", "maker@localhost"), (f"GIT_{who}_DATE", _DATE))}  # fmt: skip


def git(place: Path, *words: str) -> str:
    run = subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *words],
        cwd=place,
        capture_output=True,
        text=True,
        env={**os.environ, **_GIT},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def commit(place: Path, files: Files, message: str) -> str:
    """A commit with these files changed; its hash."""
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    git(place, "add", "-A")
    git(place, "commit", "-q", "-m", message)
    return git(place, "rev-parse", "HEAD").strip()


def repository(place: Path) -> Path:
    place.mkdir(parents=True)
    git(place, "init", "-q")
    return place


def row(place: Path, number: int, repo: str, base: str, mended: Files, tests: Files, **named: Any) -> dict[str, Any]:
    """A row: the solution and the hidden tests as diffs on ``base``, whatever the repository came to later."""
    before = git(place, "rev-parse", "HEAD").strip()
    diffs = []
    for files in (mended, tests):
        git(place, "reset", "-q", "--hard", base)
        after = commit(place, files, "to be forgotten")
        diffs.append(git(place, "diff", base, after))
    git(place, "reset", "-q", "--hard", before)
    return {
        "repo": repo,
        "instance_id": f"{repo.replace('/', '__')}-{number}",
        "base_commit": base,
        "patch": diffs[0],
        "test_patch": diffs[1],
        "problem_statement": named["issue"],
        "hints_text": "The hint that nobody may see.",
        "created_at": _DATE,
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(named["fail"]),
        "PASS_TO_PASS": json.dumps(named["keep"]),
        "environment_setup_commit": base,
        "difficulty": "<15 min fix",
    }


def write_instances(directory: Path) -> list[dict[str, Any]]:
    """``swebench_verified.parquet`` and ``repositories`` in ``directory``; the rows."""
    made, kept = directory / "made", directory / "repositories"
    kept.mkdir(parents=True)
    words = repository(made / "words")
    first = commit(words, {"words.py": WORDS, "tests/test_words.py": WORDS_TESTS, "tests/__init__.py": ""}, "words")
    second = commit(words, {"words.py": WORDS_MENDED, "tests/test_words.py": WORDS_TESTS_1}, "count any space")
    commit(words, {"words.py": WORDS_MENDED_TWICE}, "the secret of the future")
    git(words, "bundle", "create", "-q", str(kept / "tiny__words.bundle"), "--all")
    stack = repository(kept / "tiny__stack")
    only = commit(stack, {"stack.py": STACK, "README.md": "A stack.\n", ".gitignore": "*.pyc\n"}, "stack")
    shelf = repository(kept / "tiny__shelf")
    attributes = {".gitattributes": "shelf/store.py export-ignore\n"}
    there = commit(shelf, {"shelf/__init__.py": "", "shelf/store.py": SHELF, **attributes}, "shelf")
    rows = [
        row(
            words,
            1,
            "tiny/words",
            first,
            {"words.py": WORDS_MENDED},
            {"tests/test_words.py": WORDS_TESTS_1},
            issue="count is wrong where words are not apart by exactly one space.",
            fail=["test_spaces (tests.test_words.WordsTest)"],
            keep=["test_count (tests.test_words.WordsTest)", "test_longest (tests.test_words.WordsTest)"],
        ),
        row(
            words,
            2,
            "tiny/words",
            second,
            {"words.py": WORDS_MENDED_TWICE},
            {"tests/test_words.py": WORDS_TESTS_2},
            issue="longest fails on an empty text.",
            fail=["The longest word of nothing is empty."],
            keep=["test_count (tests.test_words.WordsTest)", "test_spaces (tests.test_words.WordsTest.test_spaces)"],
        ),
        row(
            stack,
            3,
            "tiny/stack",
            only,
            {"stack.py": STACK_MENDED},
            {"test_stack.py": STACK_TESTS},
            issue="What is pushed last is not what is popped first.",
            fail=["test_order (test_stack.StackTest)"],
            keep=["test_one (test_stack.StackTest)", "test_large (test_stack.StackTest)"],
        ),
        row(
            shelf,
            4,
            "tiny/shelf",
            there,
            {"shelf/store.py": SHELF_MENDED},
            {"shelf/tests/test_store.py": SHELF_TESTS, "shelf/tests/__init__.py": ""},
            issue="save writes its keys in any order.",
            fail=["test_order (shelf.tests.test_store.SaveTest)"],
            keep=[],
        ),
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "swebench_verified.parquet")
    return rows
