"""Starting the ranks of a small world from a benchmark script, one thread each."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megasao.launch.ports import free_ports


def run_ranks(script: str, count: int, arguments: Sequence[str]) -> list[Any]:
    """``python script ARGUMENTS`` as ``count`` ranks of one world; what each printed last, which must be JSON."""
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{script} {' '.join(arguments)} failed")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]
