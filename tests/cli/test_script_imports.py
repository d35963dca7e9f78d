"""Benchmarks and tools that the suite does not start: what they import of this package is there."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for name in ("benchmarks", "tools") for path in sorted((ROOT / name).glob("*.py"))]


def imported(source: str) -> Iterator[tuple[str, str | None]]:
    """Every module of this package that the source names, and what it takes from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.startswith("megasao"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megasao"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def lacking(source: str) -> list[str]:
    """Of those, what cannot be imported."""
    found = []
    for module, name in imported(source):
        try:
            there = name is None or hasattr(importlib.import_module(module), name)
            if not there:
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(script: Path) -> None:
    assert not lacking(script.read_text(encoding="utf-8"))


def test_what_is_not_there_is_noticed() -> None:
    assert lacking("from megasao.ops import gae, nothing\nfrom megasao import ops") == ["megasao.ops.nothing"]
