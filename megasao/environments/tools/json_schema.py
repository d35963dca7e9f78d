"""The part of JSON Schema that tools are declared in, read and checked without a library.

Invariants:
- a keyword that is not checked is refused when the schema is read, never passed over;
- ``problem`` never raises for a JSON value, and its message says where, what was expected and what was given.
"""

from collections.abc import Mapping
from typing import Any

from megasao.environments.options import nearest
from megasao.environments.tools.calls import shorten

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES = ("title", "description", "default", "examples")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems")
_KEYWORDS = (
    *("type", "enum", "properties", "required", "additionalProperties", "items"),
    *_NOTES,
    *_BOUNDS,
    *_SIZES,
)


def check_schema(schema: Any, where: str) -> None:
    """ValueError naming ``where`` if ``schema`` uses what is not understood, or uses it wrongly."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: expected a JSON schema (a mapping), got {shorten(schema)}")
    for keyword, value in schema.items():
        if keyword not in _KEYWORDS:
            known = ", ".join(_KEYWORDS)
            raise ValueError(
                f"{where}.{keyword}: not a keyword that is checked{nearest(keyword, list(_KEYWORDS))}; {known}"
            )
        _check_keyword(keyword, value, f"{where}.{keyword}")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}) and schema.get("additionalProperties") is False:
            raise ValueError(f"{where}.required: {name!r} is not among the properties, and no other is allowed")


def _check_keyword(keyword: str, value: Any, where: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match keyword:
        case "type":
            for kind in value if isinstance(value, list) else [value]:
                if not isinstance(kind, str) or kind not in _TYPES:
                    raise ValueError(f"{where}: expected one of {', '.join(_TYPES)}, got {shorten(kind)}")
        case "properties" if isinstance(value, Mapping):
            for name, inner in value.items():
                check_schema(inner, f"{where}.{name}")
        case "items":
            check_schema(value, where)
        case "additionalProperties" if not isinstance(value, bool):
            check_schema(value, where)
        case "properties":
            raise ValueError(f"{where}: expected a mapping of names to schemas, got {shorten(value)}")
        case "required" if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where}: expected a list of names, got {shorten(value)}")
        case "enum" if not isinstance(value, list) or not value:
            raise ValueError(f"{where}: expected a list of values, got {shorten(value)}")
        case _ if keyword in _BOUNDS + _SIZES and not is_number:
            raise ValueError(f"{where}: expected a number, got {shorten(value)}")


def problem(value: Any, schema: Mapping[str, Any], where: str = "arguments") -> str | None:
    """The first way in which a JSON value does not fit a checked ``schema``, or None."""
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is(value, kind) for kind in kinds):
            return f"{where}: expected {' or '.join(kinds)}, got {shorten(value)}"
    if "enum" in schema and not any(type(value) is type(known) and value == known for known in schema["enum"]):
        return f"{where}: expected one of {', '.join(map(repr, schema['enum']))}, got {shorten(value)}"
    return _wrong_size(value, schema, where) or _wrong_inside(value, schema, where)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _wrong_size(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        fits = {
            "minimum": lambda bound: value >= bound,
            "maximum": lambda bound: value <= bound,
            "exclusiveMinimum": lambda bound: value > bound,
            "exclusiveMaximum": lambda bound: value < bound,
        }
    elif isinstance(value, str | list):
        unit = "Length" if isinstance(value, str) else "Items"
        fits = {f"min{unit}": lambda bound: len(value) >= bound, f"max{unit}": lambda bound: len(value) <= bound}
    else:
        return None
    for keyword, holds in fits.items():
        if keyword in schema and not holds(schema[keyword]):
            return f"{where}: expected {keyword} {schema[keyword]}, got {shorten(value)}"
    return None


def _wrong_inside(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if isinstance(value, list) and "items" in schema:
        found = (problem(item, schema["items"], f"{where}[{index}]") for index, item in enumerate(value))
        return next((text for text in found if text), None)
    if not isinstance(value, dict):
        return None
    for name in schema.get("required", ()):
        if name not in value:
            return f"{where}.{name}: missing"
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        if name not in properties and others is False:
            guess, known = nearest(name[:64], list(properties)), ", ".join(properties) or "none"
            return f"{where}: there is no argument {shorten(name)}{guess}; the arguments are {known}"
        inner = properties.get(name, others if isinstance(others, Mapping) else {})
        if (text := problem(item, inner, f"{where}.{name[:64]}")) is not None:
            return text
    return None
