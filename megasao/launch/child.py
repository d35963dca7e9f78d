"""Becomes a role's command, after making sure that it dies with its launcher.

Run as a plain script (``python -I -S child.py LAUNCHER_PID COMMAND...``), so it imports nothing of the package. It is a
program of its own because Python code between fork and exec can deadlock in a launcher that has threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL when the launcher dies, then exec the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != launcher:
        sys.exit("the launcher died before this role started")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
