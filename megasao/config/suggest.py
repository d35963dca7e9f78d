"""The nearest right key for a wrong one.

Invariants:
- a key that is one typing slip (insert, drop, change, swap) away from keys of its section gets exactly those keys;
- a key that belongs to another section gets its full path there.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from megasao.config.document import KeyPath, dotted

MOST_SHOWN = 3
SHORTEST_PART = 4
"""Letters from which on a key counts as an abbreviation of keys that contain it."""


def one_slip_apart(left: str, right: str) -> bool:
    """True if one insertion, deletion, substitution or swap of neighbours turns ``left`` into ``right`` (or none)."""
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    a, b = left[start:], right[start:]
    if a == b:
        return True
    swapped = len(a) > 1 and len(b) > 1 and a[0] == b[1] and a[1] == b[0] and a[2:] == b[2:]
    return swapped or a[1:] == b[1:] or a[1:] == b or a == b[1:]


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The config sections that a field's annotation allows."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for part in get_args(annotation) for section in sections_of(part)]


def sections_at(root: type[BaseModel], path: KeyPath) -> list[type[BaseModel]]:
    """The sections that may stand at ``path``; empty where it is not a section."""
    found = [root]
    for name in path:
        fields = [section.model_fields[str(name)] for section in found if str(name) in section.model_fields]
        found = [section for field in fields for section in sections_of(field.annotation)]
    return found


def keys_at(root: type[BaseModel], path: KeyPath, data: Any = None) -> list[str]:
    """The keys allowed in the section at ``path``, in order of definition.

    ``data``, the whole document, decides between sections of one union by their ``name``.
    """
    sections = sections_at(root, path)
    if len(sections) > 1:
        name = _name_at(path, data)
        sections = [
            s for s in sections if "name" in s.model_fields and s.model_fields["name"].default == name
        ] or sections
    return list(dict.fromkeys(key for section in sections for key in section.model_fields))


def _name_at(path: KeyPath, data: Any) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data.get("name") if isinstance(data, dict) else None


def all_paths(root: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every field of the config tree, sections included."""
    for name, field in root.model_fields.items():
        yield (*prefix, name)
        for section in sections_of(field.annotation):
            yield from all_paths(section, (*prefix, name))


def suggest(root: type[BaseModel], path: KeyPath, data: Any = None) -> list[str]:
    """Dotted paths that the unknown key ``path`` of the document ``data`` was most likely meant to be, best first.

    May be empty.
    """
    section, key = path[:-1], str(path[-1])
    here = keys_at(root, section, data)
    plain = key.strip().lower().replace("-", "_")
    close = [name for name in here if plain == name or one_slip_apart(key, name) or one_slip_apart(plain, name)]
    if close:
        return [dotted((*section, name)) for name in close]
    elsewhere = [other for other in dict.fromkeys(all_paths(root)) if other[-1] == plain and other != path]
    if not elsewhere:
        whole = [name for name in here if plain in name and len(plain) >= SHORTEST_PART]
        near = whole or difflib.get_close_matches(plain, here, n=1)
        if near:
            return [dotted((*section, name)) for name in near[:MOST_SHOWN]]
        paths = dict.fromkeys(all_paths(root))
        elsewhere = [other for other in paths if other != path and one_slip_apart(plain, str(other[-1]))]
    elsewhere.sort(key=lambda other: (-_shared(other, path), len(other)))
    return [dotted(other) for other in elsewhere[:MOST_SHOWN]]


def nearest(key: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that the unknown ``key`` was most likely meant to be, best first; may be empty."""
    plain = key.strip().lower().lstrip("-").replace("-", "_")
    close = [name for name in names if plain == name or one_slip_apart(plain, name)]
    return (close or difflib.get_close_matches(plain, names, n=MOST_SHOWN))[:MOST_SHOWN]


def _shared(left: KeyPath, right: KeyPath) -> int:
    """Length of the common beginning of two paths."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
