"""YAML read as plain data that remembers the line of every key.

Scalars follow YAML 1.2: only ``true`` and ``false`` are booleans (``off`` is text), ``1e-4`` is a number, ``010`` is
ten and ``1:30`` is text. Underscores may group digits.

Invariants:
- every value and key of the document has a line;
- a key written twice, a key that is not text, and a tag other than YAML's basic ones are problems, not surprises.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megasao.config.errors import ConfigError, Problem

KeyPath = tuple[str | int, ...]

NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_LINE_BREAKS = re.compile("[\\r\x85\\u2028\\u2029\\ufeff]")
_PREFIX = "tag:yaml.org,2002:"
_ALLOWED = {_PREFIX + kind for kind in ("null", "bool", "int", "float", "str", "map", "seq")}
_TAGS = [("null", NULL), ("bool", BOOL), ("int", INT), ("float", FLOAT)]


class _Composer(yaml.SafeLoader):
    """SafeLoader with the resolvers above and no others."""


class Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes the text which only our reader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal objects out in full."""
        return True


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    """Text, escaped where a plain or single-quoted scalar would be folded at an exotic line break."""
    return dumper.represent_scalar(_PREFIX + "str", text, style='"' if _LINE_BREAKS.search(text) else None)


Dumper.add_representer(str, _represent_text)
_Composer.yaml_implicit_resolvers = {}
for _name, _pattern in _TAGS:
    _Composer.add_implicit_resolver(_PREFIX + _name, _pattern, None)
    Dumper.add_implicit_resolver(_PREFIX + _name, _pattern, None)


@dataclass
class Document:
    """Plain data, and where each key path was written (``file:line``, or the text of an override)."""

    source: str
    data: Any = None
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """The place of ``path``, or of the nearest section around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.source)

    def problem(self, path: KeyPath, reason: str) -> Problem:
        """A problem with its place."""
        return Problem(dotted(path), reason, self.where(path))


def dotted(path: KeyPath) -> str:
    """``('loop', 'steps')`` as ``loop.steps``."""
    return ".".join(str(part) for part in path)


def read_document(path: Path) -> Document:
    """Read a YAML file whose top level is a mapping; ConfigError names the file, and the line where there is one."""
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(source, [Problem("", "no such file", source)]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(source, [Problem("", f"not UTF-8 text: {error}", source)]) from None
    except OSError as error:
        raise ConfigError(source, [Problem("", f"cannot be read: {error.strerror}", source)]) from None
    document = Document(source)
    node = _compose(text, source)
    if node is None:
        raise ConfigError(source, [Problem("", "the file is empty; a config has at least run, model and loop", source)])
    if not isinstance(node, yaml.MappingNode):
        reason = f"expected a mapping of sections at the top level, got {_kind(node)}"
        raise ConfigError(source, [Problem("", reason, _place(source, node))])
    document.data = _plain(node, (), document, ())
    return document


def parse_value(text: str, source: str) -> Any:
    """The value of an override, read as YAML; ConfigError names ``source``."""
    node = _compose(text, source)
    if node is None:
        raise ConfigError(source, [Problem("", "has no value; write null for none, '' for empty text", source)])
    scratch = Document(source)
    value = _plain(node, (), scratch, ())
    if scratch.problems:
        raise ConfigError(source, scratch.problems)
    return value


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(source, [Problem("", f"not valid YAML: {reason}", where)]) from None
    except yaml.YAMLError as error:
        raise ConfigError(source, [Problem("", f"not valid YAML: {error}", source)]) from None
    return node


def _plain(node: yaml.Node, path: KeyPath, document: Document, parents: tuple[int, ...]) -> Any:
    """Convert ``node`` to plain data, recording the place of every path below ``path``."""
    document.places.setdefault(path, _place(document.source, node))
    if id(node) in parents:
        document.problems.append(document.problem(path, "an alias that contains itself"))
        return None
    if node.tag not in _ALLOWED:
        document.problems.append(document.problem(path, f"the tag {node.tag} is not allowed; write a plain value"))
        return None
    below = (*parents, id(node))
    if isinstance(node, yaml.MappingNode):
        return {key: _plain(value, (*path, key), document, below) for key, value in _keys(node, path, document)}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, index), document, below) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, path, document)


def _keys(node: yaml.MappingNode, path: KeyPath, document: Document) -> Iterator[tuple[str, yaml.Node]]:
    """The entries of a mapping; a key that is not text or is written twice becomes a problem."""
    seen: dict[str, str] = {}
    for key_node, value_node in node.value:
        place = _place(document.source, key_node)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _PREFIX + "str":
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else _kind(key_node)
            document.problems.append(Problem(dotted(path), f"keys are text, got {shown}; put it in quotes", place))
            continue
        key = key_node.value
        if key in seen:
            reason = f"the key is written twice, first at {seen[key]}; keep one of them"
            document.problems.append(Problem(dotted((*path, key)), reason, place))
            continue
        seen[key] = place
        document.places[(*path, key)] = place
        yield key, value_node


def _scalar(node: yaml.ScalarNode, path: KeyPath, document: Document) -> Any:
    text, kind = node.value, node.tag.removeprefix(_PREFIX)
    if kind == "str":
        return text
    if kind == "null" and NULL.match(text):
        return None
    if kind == "bool" and BOOL.match(text):
        return text.lower() == "true"
    if kind == "int" and INT.match(text):
        return int(text.replace("_", ""))
    if kind == "float" and FLOAT.match(text):
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", "")))
    document.problems.append(document.problem(path, f"{text!r} is not a value of type {kind}"))
    return None


def _place(source: str, node: yaml.Node) -> str:
    return f"{source}:{node.start_mark.line + 1}"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a mapping" if isinstance(node, yaml.MappingNode) else f"the single value {node.value!r}"
