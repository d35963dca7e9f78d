"""What one process at a time may do.

Invariants: the lock goes with the process that holds it, however that ends; waiting for it is bounded.
"""

import fcntl
import time
from pathlib import Path
from typing import BinaryIO


def exclusive(path: Path, owner: str, *, wait_s: float = 0.0) -> BinaryIO:
    """Hold the file ``path`` until what is returned is closed. ValueError names the ``owner`` that has it longer."""
    file = path.open("ab")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise ValueError(f"another {owner} is alive (it holds {path}); stop it first") from None
            time.sleep(0.1)
