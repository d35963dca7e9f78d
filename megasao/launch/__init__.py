"""The local launcher: prepares the run directory, starts every role as a process, restarts what dies."""
