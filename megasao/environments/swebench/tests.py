"""How the tests of a repository are run, and what their log says.

Invariants:
- only the test files that the hidden patch touches are run, as in the published evaluation;
- a test that the log does not name has not passed; of two lines about one test the later one counts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megasao.environments.swebench.rows import Instance

_TOUCHED = re.compile(r"^diff --git a/(?:.*) b/(.*)$", re.MULTILINE)
_NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst", ".cfg")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s+(\S+)|^(\S+)\s+(PASSED|FAILED|ERROR|XFAIL)(?:\s|$)")
_SUMMARY = "short test summary info"
_UNITTEST = re.compile(r"^(?P<name>.*?) \.\.\. (?P<rest>.*)$")
_METHOD = re.compile(r"^(\S+) \((\S+)\)$")
_SYMPY = re.compile(r"^(test_\S*)\b.* (ok|F|E|f|X|s)$")

Log = Callable[[str], dict[str, str]]


def touched_files(patch: str) -> list[str]:
    """The files that a unified diff of git changes, by their new names, in order."""
    return list(dict.fromkeys(_TOUCHED.findall(patch)))


def read_pytest(log: str) -> dict[str, str]:
    """By test, from ``pytest -rA``: the short summary where there is one, else the lines of a verbose run."""
    found: dict[str, str] = {}
    text = _COLOUR.sub("", log)
    for line in text[max(0, text.rfind(_SUMMARY)) :].splitlines():
        if match := _PYTEST.match(line):
            status, name = (match[1], match[2]) if match[1] else (match[4], match[3])
            found[name] = status
    return found


def read_pytest_short_paths(log: str) -> dict[str, str]:
    """As ``read_pytest``; of a parameter that is a path only its last part counts: the rest is where the tests lie."""
    return {_short_path(name): status for name, status in read_pytest(log).items()}


def read_matplotlib(log: str) -> dict[str, str]:
    """As ``read_pytest``; the published names have the numbers of mouse buttons, as older versions write them."""
    return read_pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def read_unittest(log: str) -> dict[str, str]:
    """By test, or by the first line of its description, from ``unittest -v`` and Django's runner."""
    found: dict[str, str] = {}
    waiting = None
    for line in map(str.strip, log.splitlines()):
        if match := _UNITTEST.match(line):
            waiting, rest = match["name"], match["rest"]
        elif line in ("ok", "FAIL", "ERROR") and waiting is not None:  # the test printed something in between
            rest = line
        else:
            continue
        status = _unittest_status(rest.strip())
        if status is not None and waiting is not None:
            found[plain_name(waiting)] = status
    return found


def read_sympy(log: str) -> dict[str, str]:
    """By test, from ``bin/test --verbose``."""
    words = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "f": "XFAIL", "X": "XPASS", "s": "SKIPPED"}
    matches = (_SYMPY.match(line.strip()) for line in log.splitlines())
    return {match[1]: words[match[2]] for match in matches if match}


def plain_name(name: str) -> str:
    """``test_x (a.B.test_x)``, as Python from 3.11 on writes it, is ``test_x (a.B)``."""
    match = _METHOD.match(name)
    if match and match[2].endswith(f".{match[1]}"):
        return f"{match[1]} ({match[2].removesuffix(f'.{match[1]}')})"
    return name


@dataclass(frozen=True)
class TestRun:
    """``command`` is followed by files (for Django modules) to be tested; ``install`` comes before it."""

    command: str
    read: Log
    install: str = ""


_INSTALL = "python -m pip install --no-deps --no-build-isolation"
_DJANGO = "./tests/runtests.py --verbosity 2"

_RUNS: dict[str, TestRun] = {
    "astropy/astropy": TestRun("pytest -rA", read_pytest, f"{_INSTALL} -e ."),
    "django/django": TestRun(f"{_DJANGO} --settings=test_sqlite --parallel 1", read_unittest),
    "matplotlib/matplotlib": TestRun("pytest -rA", read_matplotlib, f"{_INSTALL} -e ."),
    "mwaskom/seaborn": TestRun("pytest --no-header -rA", read_pytest),
    "pallets/flask": TestRun("pytest -rA", read_pytest),
    "psf/requests": TestRun("pytest -rA", read_pytest_short_paths, f"{_INSTALL} ."),
    "pydata/xarray": TestRun("pytest -rA", read_pytest),
    "pylint-dev/pylint": TestRun("pytest -rA", read_pytest_short_paths),
    "pytest-dev/pytest": TestRun("pytest -rA", read_pytest),
    "scikit-learn/scikit-learn": TestRun("pytest -rA", read_pytest, f"{_INSTALL} -e ."),
    "sphinx-doc/sphinx": TestRun("tox --current-env -epy39 -v --", read_pytest),
    "sympy/sympy": TestRun(
        "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose", read_sympy
    ),
}
"""The twelve repositories of SWE-bench Verified. What runs without a network is installed again, where a change to the
sources would not be seen otherwise."""

_OTHER = TestRun("python3 -m unittest -v", read_unittest)


def test_run(instance: Instance) -> TestRun:
    """How this instance's tests are run; a repository that is not in SWE-bench Verified has unittest."""
    run = _RUNS.get(instance.repo, _OTHER)
    old_django = instance.repo == "django/django" and int(instance.version.partition(".")[0]) < 3
    if old_django:
        command = _DJANGO if instance.version == "1.9" else run.command
        return TestRun(command, run.read, "python setup.py install")
    return run


def targets(instance: Instance) -> list[str]:
    """What is handed to the test command: the test files of the hidden patch."""
    files = [name for name in touched_files(instance.test_patch) if not name.endswith(_NO_TESTS)]
    if instance.repo != "django/django":
        return files
    return [
        name.removesuffix(".py").removeprefix("tests/").replace("/", ".") for name in files if _is_django_test(name)
    ]


def all_pass(instance: Instance, statuses: Mapping[str, str]) -> bool:
    """FAIL_TO_PASS must pass; PASS_TO_PASS must pass or be skipped. A failure that is expected is a pass."""
    return _all(instance.fail_to_pass, statuses, ("PASSED", "XFAIL")) and _all(
        instance.pass_to_pass, statuses, ("PASSED", "XFAIL", "SKIPPED")
    )


def _all(names: Sequence[str], statuses: Mapping[str, str], wanted: Sequence[str]) -> bool:
    return all(statuses.get(name, statuses.get(plain_name(name))) in wanted for name in names)


def _unittest_status(rest: str) -> str | None:
    if rest.lower().endswith("ok"):
        return "PASSED"
    for word, status in (("FAIL", "FAILED"), ("ERROR", "ERROR")):
        if rest.endswith(word):
            return status
    return "SKIPPED" if rest.startswith("skipped") else "XFAIL" if rest.endswith("expected failure") else None


def _short_path(name: str) -> str:
    head, bracket, option = name.partition("[")
    option = option.removesuffix("]")
    if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
        return f"{head}[/{option.rpartition('/')[2]}]"
    return name


def _is_django_test(name: str) -> bool:
    file = name.rpartition("/")[2]
    return file == "tests.py" or file.startswith("test_") or "/tests/" in name or "/test_" in name
