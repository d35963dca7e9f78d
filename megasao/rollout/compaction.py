"""What an episode says when it goes on in a new segment: the request for a summary, and the task with the summary.

Invariants:
- a summary is the model's own tokens; in the next segment it is text that the model is shown, without special tokens
  and without what was said before ``</think>``;
- the request and the longest summary fit into the window after whatever was said before them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasao.config.compaction import CompactionConfig
from megasao.environments.base import Prompt, StepResult
from megasao.environments.encoding import TokenizerCodec

_PLACE = re.compile(r"\{summary\}|\{observation\}")


@dataclass(frozen=True)
class Compaction:
    """The options of one run's episodes, with its tokenizer."""

    options: CompactionConfig
    codec: TokenizerCodec

    def request(self, prompt: Prompt, last_token: int | None = None) -> list[int]:
        """The ids that ask for a summary, after a turn that ended in ``last_token`` (None: not to be merged with)."""
        message = ({"role": "user", "content": self.options.request},) if prompt.messages else ()
        asked = StepResult(self.options.request, 0.0, False, {}, message)
        return self.codec.encode_observation(prompt, asked, -1 if last_token is None else last_token)

    def reserve(self, prompt: Prompt) -> int:
        """Tokens to keep free in a segment that another one may follow."""
        return len(self.request(prompt)) + self.options.summary_tokens

    def resume(self, prompt: Prompt, summary: Sequence[int], answer: StepResult) -> list[int]:
        """The ids with which the next segment begins; ``answer`` is what the model has not seen yet."""
        said = self.codec.decode(summary).rpartition("</think>")[2]
        shown = "\n".join(str(message["content"]) for message in answer.messages) or answer.observation
        texts = {"{summary}": self.codec.plain(said).strip(), "{observation}": shown}
        added = _PLACE.sub(lambda place: texts[place[0]], self.options.resume)
        if not prompt.messages:
            return self.codec.encode(prompt.text + added)
        *before, last = prompt.messages
        return self.codec.encode_prompt(
            replace(prompt, messages=(*before, {**last, "content": f"{last['content']}{added}"}))
        )
