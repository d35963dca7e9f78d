"""A config file plus overlays and overrides, read strictly: every problem at once, each with its field, file and line.

Invariants:
- a key that no section knows is refused with the nearest right one;
- ``load_config`` of ``dump_config(config)`` equals ``config``;
- an override behaves as if its value stood in the file, and its errors name the override;
- text that begins with ``~/`` is a path below the home directory of who loads the config;
- an overlay (another config file) changes what it names and nothing else; its errors name its own file and line.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megasao.config.document import Document, Dumper, KeyPath, dotted, parse_value, read_document
from megasao.config.errors import CombinationError, ConfigError, Problem
from megasao.config.root import Config
from megasao.config.suggest import keys_at, sections_at, suggest

_OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=")
_KINDS = {bool: "true/false", int: "whole number", float: "number", str: "text", list: "list", dict: "mapping"}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The validated config of ``path``, changed by ``overrides`` in turn: ``key.path=value``, or a file ``*.yaml``.

    ConfigError lists everything wrong.
    """
    config, _ = load_with_places(path, overrides)
    return config


def load_with_places(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Document]:
    """Like ``load_config``; the document says where each field was written, for checks that come later."""
    document = read_document(Path(path))
    for override in overrides:
        if is_overlay(override):
            _apply_overlay(document, read_document(Path(override)))
        else:
            _apply_override(document, override)
    try:
        config = Config.model_validate(_below_home(document.data))
    except ValidationError as error:
        document.problems.extend(_explain(error, document))
    if document.problems:
        raise ConfigError(document.source, document.problems)
    return config, document


def dump_config(config: Config) -> str:
    """YAML text of the whole config, defaults included; it loads back equal."""
    return dump_yaml(config.model_dump(mode="python"))


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that this loader reads back unchanged."""
    return str(
        yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=1000)
    )


def is_overlay(text: str) -> bool:
    """Whether a command-line word is a config file, and not ``key.path=value``."""
    return text.endswith((".yaml", ".yml")) and not _OVERRIDE.match(text)


def _below_home(data: Any) -> Any:
    """The same data with ``~/`` as a shell would write it out; taken literally it would be a directory named ``~``."""
    if isinstance(data, dict):
        return {key: _below_home(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_below_home(value) for value in data]
    return os.path.expanduser(data) if isinstance(data, str) and data.startswith("~/") else data


def _apply_overlay(document: Document, overlay: Document) -> None:
    """Lay one file over the document: sections merge key by key, anything else replaces what was there.

    A section that is one of several kinds (``algorithm.objective``) is replaced whole where the kind changes.
    """
    document.source = f"{document.source} + {overlay.source}"
    document.problems.extend(overlay.problems)
    document.data = _merged(document, overlay, (), document.data, overlay.data)


def _merged(document: Document, overlay: Document, path: KeyPath, below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict) and not _changes_kind(path, below, above):
        if path in overlay.places and path:
            document.places[path] = overlay.places[path]
        merged = {
            key: _merged(document, overlay, (*path, key), below[key], value) if key in below else value
            for key, value in above.items()
        }
        for key in above.keys() - below.keys():
            _move_places(document, overlay, (*path, key))
        return {**below, **merged}
    _move_places(document, overlay, path)
    return above


def _changes_kind(path: KeyPath, below: dict[str, Any], above: dict[str, Any]) -> bool:
    return len(sections_at(Config, path)) > 1 and "name" in above and above["name"] != below.get("name")


def _move_places(document: Document, overlay: Document, path: KeyPath) -> None:
    """What stands at ``path`` now comes from the overlay."""
    _forget_places(document, path)
    document.places |= {known: where for known, where in overlay.places.items() if known[: len(path)] == path}


def _forget_places(document: Document, path: KeyPath) -> None:
    for known in [known for known in document.places if known[: len(path)] == path]:
        del document.places[known]


def _apply_override(document: Document, override: str) -> None:
    """Set one value in the document; a bad override becomes a problem that names it."""
    name, equals, text = override.partition("=")
    path: KeyPath = tuple(part.strip() for part in name.split("."))
    where = f"override {override!r}"
    if not equals or not all(path):
        document.problems.append(Problem("", "expected key.path=value, for example loop.steps=100", where))
        return
    try:
        value = parse_value(text, where)
    except ConfigError as error:
        document.problems.extend(Problem(dotted(path), problem.reason, where) for problem in error.problems)
        return
    section = document.data
    for depth, key in enumerate(path[:-1]):
        if section.get(key) is None:
            section[key] = {}
            document.places[path[: depth + 1]] = where
        section = section[key]
        if not isinstance(section, dict):
            reason = f"{dotted(path[: depth + 1])} holds {_shown(section)}, so nothing can be set below it"
            document.problems.append(Problem(dotted(path), reason, where))
            return
    section[path[-1]] = value
    _forget_places(document, path)
    document.places[path] = where


def _explain(error: ValidationError, document: Document) -> list[Problem]:
    """Our wording of pydantic's errors, one problem a field."""
    problems: dict[KeyPath, list[str]] = {}
    unknown: list[KeyPath] = []
    missing: list[KeyPath] = []
    found: list[Problem] = []
    for details in error.errors(include_url=False):
        path = _written_path(details["loc"], document.data, missing=details["type"] == "missing")
        if details["type"] == "extra_forbidden":
            unknown.append(path)
        elif details["type"] == "missing":
            missing.append(path)
        elif details["type"] == "union_tag_invalid":
            expected = details["ctx"]["expected_tags"].replace("'", "")
            problems.setdefault((*path, "name"), []).append(
                f"expected one of {expected}, got {details['ctx']['tag']!r}"
            )
        elif isinstance(cause := details.get("ctx", {}).get("error"), CombinationError):
            found.extend(document.problem(tuple(problem.path.split(".")), problem.reason) for problem in cause.problems)
        else:
            problems.setdefault(path, []).append(_reason(details))
    suggestions = {path: suggest(Config, path, document.data) for path in unknown}
    meant = {name for names in suggestions.values() for name in names}
    found.extend(document.problem(path, _unknown(path, names, document.data)) for path, names in suggestions.items())
    found.extend(document.problem(path, _missing(path)) for path in missing if dotted(path) not in meant)
    found.extend(document.problem(path, " or ".join(dict.fromkeys(reasons))) for path, reasons in problems.items())
    return found


def _written_path(loc: Sequence[str | int], data: Any, *, missing: bool) -> KeyPath:
    """The part of pydantic's location that stands in the document: names of union branches are left out."""
    path: list[str | int] = []
    for depth, part in enumerate(loc):
        last = depth == len(loc) - 1
        if isinstance(data, dict) and (part in data or (missing and last)):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def _unknown(path: KeyPath, names: list[str], data: Any) -> str:
    if names:
        return f"unknown key; did you mean {' or '.join(names)}?"
    keys = keys_at(Config, path[:-1], data)
    section = dotted(path[:-1]) or "the top level"
    return f"unknown key; {section} has the keys {', '.join(keys)}"


def _missing(path: KeyPath) -> str:
    keys = keys_at(Config, path)
    return (
        f"missing, and it has no default; it is a section with the keys {', '.join(keys)}"
        if keys
        else ("missing, and it has no default")
    )


def _reason(details: ErrorDetails) -> str:
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        return message
    if details["type"] == "model_type":
        message = "expected a section (a mapping of keys)"
    message = message.replace("Input should be a valid integer", "expected a whole number")
    message = message.replace("Input should be a valid string", "expected text")
    message = message.replace("Input should be a valid boolean", "expected true or false")
    message = message.replace("Input should be a valid dictionary", "expected a mapping")
    message = message.replace("Input should be a valid", "expected a")
    message = message.replace("Input should be greater", "expected a value greater")
    message = message.replace("Input should be less", "expected a value less").replace("Input should be", "expected")
    return f"{message}, got {_shown(details['input'])}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return f"a {_KINDS[type(value)]} of {len(value)}"
    return f"{value!r} ({_KINDS.get(type(value), type(value).__name__)})"
