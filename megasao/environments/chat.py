"""A checkpoint's own chat template, rendered without torch or transformers.

Invariants:
- the text is the one that transformers renders from the same directory;
- a conversation grows at its end: what follows a turn of the model is rendered alone, and nothing before it again;
- a template runs in Jinja's sandbox and cannot reach out of it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

_TURN = "\ue000turn\ue001"
"""Stands for a turn of the model; private-use characters, which no message should have."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Generation(Extension):
    """``{% generation %}`` around what the model says: a mark for fine-tuning, which changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes within, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages as text."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """``source``: Jinja; ``variables``: what it may name, such as special tokens. ValueError for bad Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        self._variables = dict(variables)

    @classmethod
    def from_directory(cls, directory: Path, variables: Mapping[str, Any] | None = None) -> "ChatTemplate | None":
        """The template of a checkpoint: ``chat_template.jinja``, or the one in tokenizer_config.json; else None.

        It may name the checkpoint's special tokens and ``variables``.
        """
        path = directory / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several under names
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        found = {name: settings.get(name) for name in _TOKENS}
        texts = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
        return cls(source, {**{name: text for name, text in texts.items() if text is not None}, **(variables or {})})

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The text up to where the model begins its turn. ValueError for messages that the template refuses.

        ``options`` are variables of the template, such as ``tools``.
        """
        variables = {"add_generation_prompt": True, "tools": None, **self._variables, **options}
        try:
            return self._template.render(messages=list(messages), **variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def continuation(self, before: Sequence[Message], new: Sequence[Message], **options: Any) -> str:
        """The text between the end of a turn of the model and the beginning of its next one, with ``new`` in between.

        It begins with what ends a turn. ValueError for a template that does not show the model's turns as they are.
        """
        whole = self.render([*before, {"role": "assistant", "content": _TURN}, *new], **options)
        _, found, rest = whole.rpartition(_TURN)
        if not found:
            raise ValueError("chat template: it leaves out what the assistant said, so a turn cannot be continued")
        return rest


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})
