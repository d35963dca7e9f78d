"""Kills the process groups of a launcher that died, grandchildren included.

The kernel kills each role with its launcher (``child.py``), but not what the role started. This script holds the read
end of a pipe whose only writer is the launcher: ``+PGID`` and ``-PGID`` lines say which groups live, and end of file
means that the launcher is gone. Run as a plain script; it imports nothing of the package.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Follow the launcher's lines; at their end kill every group that is left."""
    alive: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            alive.add(group)
        else:
            alive.discard(group)
    for group in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
