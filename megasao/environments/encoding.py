"""Text to ids and back by a checkpoint's own ``tokenizer.json``, without torch or transformers.

Invariants: no special token is added; a character that the vocabulary lacks is an error that names it, never an
unknown-token id.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megasao.environments.base import Environment, Prompt, StepResult
from megasao.environments.chat import ChatTemplate


class TokenizerCodec:
    """Encodes observations and decodes actions."""

    def __init__(
        self, tokenizer: Tokenizer, *, end_ids: Sequence[int] = (), template: ChatTemplate | None = None
    ) -> None:
        """``end_ids``: with which the model ends a turn; ``template``: its chat template."""
        self._tokenizer = tokenizer
        self._end_ids, self._template = tuple(end_ids), template
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._unknown_id = tokenizer.token_to_id(unknown) if unknown else None

    @classmethod
    def from_directory(
        cls, directory: str | Path, template_variables: Mapping[str, Any] | None = None
    ) -> "TokenizerCodec":
        """Read ``directory/tokenizer.json``; FileNotFoundError or ValueError names the file.

        ``template_variables`` are passed to the chat template whenever it is rendered.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a checkpoint directory with a tokenizer.json is expected")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer file: {error}") from error
        template = ChatTemplate.from_directory(path.parent, template_variables)
        return cls(tokenizer, end_ids=_end_ids(path.parent), template=template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` alone; ValueError names characters that the vocabulary lacks."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if self._unknown_id is not None and self._unknown_id in encoding.ids:
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            missing = sorted({text[start:end] for token, (start, end) in spans if token == self._unknown_id})
            raise ValueError(f"the tokenizer has no token for {', '.join(map(repr, missing))} in {text!r}")
        return list(encoding.ids)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The ids with which an episode begins; ValueError where there are messages and no chat template."""
        if not prompt.messages:
            return self.encode(prompt.text)
        return self.encode(self._chat(prompt).render(prompt.messages, tools=list(prompt.tools) or None))

    def encode_observation(self, prompt: Prompt, answer: StepResult, last_token: int) -> list[int]:
        """The ids that follow a turn of the model ending in ``last_token``; the end of a turn is not written twice."""
        if not answer.messages:
            return self.encode(answer.observation)
        tools = list(prompt.tools) or None
        ids = self.encode(self._chat(prompt).continuation(prompt.messages, answer.messages, tools=tools))
        return ids[1:] if ids[0] == last_token else ids

    def _chat(self, prompt: Prompt) -> ChatTemplate:
        if self._template is None:
            raise ValueError(
                f"prompt {prompt.prompt_id} is a chat, and the checkpoint has no chat template; set "
                "environment.options.chat = false"
            )
        return self._template

    def stop_ids(self, environment: Environment) -> tuple[int, ...]:
        """The ids that end a turn; ValueError if a stop string is not one token, or if there are none at all."""
        stops = tuple(self.single_token(text) for text in environment.stop_strings) or self._end_ids
        if not stops:
            raise ValueError(
                f"environment {environment.name!r} names no stop token, and the checkpoint's generation_config.json "
                "and config.json have no eos_token_id"
            )
        return stops

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included; U+FFFD for an id that the tokenizer does not have.

        Models have more rows than their tokenizers have tokens (151,936 and 151,669 for Qwen3), and may sample those.
        """
        known = [self._tokenizer.id_to_token(token) is not None for token in ids]
        runs = groupby(zip(ids, known, strict=True), key=lambda pair: pair[1])
        return "".join(
            self._tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
            if is_known
            else "\ufffd" * sum(1 for _ in run)
            for is_known, run in runs
        )

    def plain(self, text: str) -> str:
        """``text`` without the special tokens in it."""
        return self._tokenizer.decode(self.encode(text), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """The text of one id."""
        return self.decode([token])

    def single_token(self, text: str) -> int:
        """The id of a text that must be exactly one token, such as a stop string; else ValueError."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} must be one token of the checkpoint's tokenizer, but it is {len(ids)}: {ids}")
        return ids[0]


def _end_ids(directory: Path) -> list[int]:
    """``eos_token_id`` of the checkpoint, which may be one id or several."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    return []
