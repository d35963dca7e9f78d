"""A config written out with the help of every field, as YAML that loads back equal."""

import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megasao.config.load import dump_yaml
from megasao.config.root import Config

WIDTH = 110


def describe_config(config: Config) -> str:
    """YAML text of the resolved config; above each field its help, type, bounds and default as a comment."""
    return "\n".join(_section_lines(config, 0)) + "\n"


def _section_lines(section: BaseModel, indent: int) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if indent == 0:
            yield ""
        yield from _comment(field, isinstance(value, BaseModel), indent)
        pad = " " * indent
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _section_lines(value, indent + 2)
        else:
            yield from textwrap.indent(dump_yaml({name: value}).rstrip("\n"), pad).split("\n")


def _comment(field: FieldInfo, is_section: bool, indent: int) -> Iterator[str]:
    text = field.description or ""
    if not is_section:
        text += f" [{_facts(field)}]"
    pad = " " * indent + "# "
    yield from textwrap.wrap(text, WIDTH, initial_indent=pad, subsequent_indent=pad, break_long_words=False)


def _facts(field: FieldInfo) -> str:
    """Type, bounds and default of a field, in words."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs.items()
        if hasattr(item, name)
    ]
    facts = [" ".join([_type_name(field.annotation), ", ".join(bounds)]).strip()]
    if field.is_required():
        facts.append("required")
    else:
        facts.append(f"default {_value_name(field.get_default(call_default_factory=True))}")
    return "; ".join(facts)


def _value_name(value: Any) -> str:
    return dump_yaml(value).removesuffix("\n").removesuffix("\n...") if not isinstance(value, BaseModel) else "section"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_args(annotation) and get_origin(annotation) is not dict:
        parts = get_args(annotation)
        if get_origin(annotation) not in (Union, type(int | str)):
            parts = parts[:1]
        return " | ".join(_type_name(part) for part in parts)
    names = {int: "whole number", float: "number", str: "text", bool: "true | false", NoneType: "null"}
    if annotation in names:
        return names[annotation]
    return "mapping" if get_origin(annotation) is dict else "section"
