"""A misspelt key anywhere is refused, with the file, the line and the key that was meant."""

import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megasao.config import Config
from megasao.config.document import KeyPath, dotted
from megasao.config.errors import ConfigError
from megasao.config.load import dump_config, load_config
from megasao.config.suggest import all_paths, keys_at, one_slip_apart, suggest

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"
FULL = load_config(LAPTOP)
TEXT = dump_config(FULL)


def paths_of(data: dict[str, Any], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, key))


PATHS = sorted(paths_of(FULL.model_dump()))
ALPHABET = string.ascii_letters + string.digits + "_-"


@st.composite
def slips(draw: st.DrawFn) -> tuple[KeyPath, str]:
    """A path of the full config, and its last key with one typing slip."""
    path = draw(st.sampled_from(PATHS))
    key = str(path[-1])
    kind = draw(st.sampled_from(["insert", "drop", "change", "swap"]))
    at = draw(st.integers(0, len(key) - (0 if kind == "insert" else 1)))
    letter = draw(st.sampled_from(ALPHABET))
    if kind == "insert":
        wrong = key[:at] + letter + key[at:]
    elif kind == "drop":
        wrong = key[:at] + key[at + 1 :]
    elif kind == "change":
        wrong = key[:at] + letter + key[at + 1 :]
    else:
        assume(at + 1 < len(key))
        wrong = key[:at] + key[at + 1] + key[at] + key[at + 2 :]
    assume(wrong and wrong[0] in string.ascii_letters + "_" and wrong not in keys_at(Config, path[:-1]))
    assume(wrong.lower() not in ("true", "false", "null"))
    return path, wrong


def misspelt(path: KeyPath, wrong: str) -> tuple[str, int]:
    """The full config with one key misspelt, and the line of it."""
    lines = TEXT.splitlines()
    at, depth = -1, 0
    for depth, key in enumerate(path):
        at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("  " * depth + f"{key}:"))
    lines[at] = lines[at].replace(f"{path[-1]}:", f"{wrong}:", 1)
    return "\n".join(lines) + "\n", at + 1


@settings(deadline=None, max_examples=300)
@given(slips())
def test_any_misspelt_field_is_refused_and_the_right_one_suggested(slip: tuple[KeyPath, str]) -> None:
    path, wrong = slip
    text, line = misspelt(path, wrong)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(file)
    (found,) = [problem for problem in caught.value.problems if "unknown key" in problem.reason]
    assert found.path == dotted((*path[:-1], wrong))
    assert found.where == f"{file}:{line}"
    assert "did you mean" in found.reason
    assert dotted(path) in found.reason.removesuffix("?").split("did you mean ")[1].split(" or ")


@pytest.mark.parametrize("path", PATHS, ids=dotted)
def test_any_other_word_is_refused_too(path: KeyPath, tmp_path: Path) -> None:
    text, line = misspelt(path, "zzzzzzzz")
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert any(p.where == f"{file}:{line}" and "has the keys" in p.reason for p in caught.value.problems)


def test_the_unchanged_config_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TEXT, encoding="utf-8")
    assert load_config(file) == FULL


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("loop", "Batch-Size"), ["loop.batch_size"]),
        (("buffer", "max_lag"), ["loop.max_lag"]),
        (("max_lag",), ["loop.max_lag"]),
        (("actor", "lr"), ["actor.optimizer.lr", "critic.optimizer.lr", "sft.optimizer.lr"]),
        (("critic", "optimizer", "beta"), ["critic.optimizer.beta1", "critic.optimizer.beta2"]),
        (("rollout", "temprature"), ["rollout.temperature"]),
        (("trainer", "maxlag"), ["loop.max_lag"]),
        (("loop", "zzzzzzzz"), []),
        (("environment", "timeout"), ["environment.episode_timeout_s"]),
    ],
)
def test_suggestions(path: KeyPath, expected: list[str]) -> None:
    assert suggest(Config, path) == expected


@pytest.mark.parametrize(
    ("left", "right", "near"),
    [
        ("abc", "abc", True),
        ("abc", "abd", True),
        ("abc", "ab", True),
        ("abc", "xabc", True),
        ("abc", "acb", True),
        ("abc", "cba", False),
        ("abc", "abcde", False),
        ("abc", "axy", False),
        ("abcd", "badc", False),
        ("", "a", True),
    ],
)
def test_one_slip_apart(left: str, right: str, near: bool) -> None:
    assert one_slip_apart(left, right) is near
    assert one_slip_apart(right, left) is near


def test_all_paths_reaches_into_optional_sections() -> None:
    assert ("sft", "optimizer", "decay_start") in set(all_paths(Config))
