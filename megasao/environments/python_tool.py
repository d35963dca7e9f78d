"""Python as a tool in a text protocol: a fenced block of code in, its output in a fenced block back.

Invariants:
- the code runs in the sandbox and nowhere else; what it wrote into its workspace is there for the next call of the same
  episode, and its variables are not;
- a program that fails or is stopped is an observation, not a failure of the environment.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megasao.environments.sandbox.run import Sandbox
from megasao.environments.sandbox.shown import shown
from megasao.environments.sandbox.workspace import pack, unpack, with_files

INTERPRETER = "/usr/bin/python3"
PROGRAM = "main.py"

NOTE = (
    "\n\nYou can run Python: write one block of code between ```python and ```, and end your turn. You will be shown "
    "what it prints. Files are kept between blocks, variables are not."
)

_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)


def find_code(text: str) -> str | None:
    """The last whole block of Python in a turn."""
    found = _BLOCK.findall(text.rpartition("</think>")[2])
    return found[-1] if found else None


def require_interpreter() -> None:
    """ValueError where the system has no Python that a sandbox could see."""
    if not Path(INTERPRETER).exists():
        raise ValueError(f"{INTERPRETER} does not exist, and the tool runs the system's Python; install it")


@dataclass
class PythonTool:
    """The tool of one episode."""

    sandbox: Sandbox
    shown_characters: int
    files: bytes | None = None

    async def run(self, code: str) -> tuple[str, bool]:
        """What the model is shown, and whether the program ended well. EnvironmentFailure if the sandbox breaks."""
        there = unpack(self.files) if self.files is not None else {}
        outcome = await self.sandbox.run([INTERPRETER, PROGRAM], pack(with_files(there, {PROGRAM: code.encode()})))
        self.files = outcome.workspace
        return shown(outcome, self.shown_characters), outcome.exit_code == 0
