"""One thing a turn, in one fenced block: commands for a shell, a file to write, or a text to replace.

```bash                    ```write PATH              ```replace PATH
commands                   the whole new text         the old text
```                        ```                        =======
                                                      the new text
                                                      ```
"""

import re
from dataclasses import dataclass
from typing import Literal

HOW = """In each turn do one thing, in one block:

```bash
commands
```

```write PATH
the whole new text of the file
```

```replace PATH
text that is in the file once
=======
what stands there instead
```

You will be shown the result. A turn without a block hands your work in.
"""

_BLOCK = re.compile(r"```(bash|sh|write|replace)[ \t]*([^\n]*)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What a turn asks for. ``path`` is empty for a command."""

    kind: Literal["bash", "write", "replace"]
    path: str
    text: str


def find_block(turn: str) -> Block | None:
    """The last whole block of a turn, thoughts left out."""
    found = _BLOCK.findall(turn.rpartition("</think>")[2])
    if not found:
        return None
    kind, path, text = found[-1]
    return Block("bash" if kind in ("bash", "sh") else kind, path.strip(), text)


def replaced(current: str, text: str, path: str) -> tuple[str, str | None]:
    """``current`` with what ``text`` says replaced in it; or what is wrong with it."""
    before, mark, after = text.partition("=======\n")
    count = current.count(before) if mark else 0
    if count != 1:
        return current, f"error: the old text must be in {path} once, and ======= after it; it is there {count} times"
    return current.replace(before, after), None
