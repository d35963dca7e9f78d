"""accelerate and nvidia-modelopt for tests, in processes of their own.

They lie in a directory beside the environment (``make setup-quantizers``): modelopt changes classes of transformers and
Megatron when it is imported, and with accelerate in the environment every process imports it with transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "build" / "quantizers"

needs_quantizers = pytest.mark.skipif(
    not (DIRECTORY / ".ready").exists(), reason="no build/quantizers: `make setup-quantizers` failed or was not run"
)

CONVERT = """
import json, sys
from megasao.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(["convert", *arguments])
    except SystemExit as ended:
        codes.append(int(ended.code or 0))
print(json.dumps(codes))
"""


def run_beside(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with both packages importable."""
    paths = [str(DIRECTORY), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def convert_each(*commands: list[str]) -> tuple[list[int], str]:
    """The exit codes of several ``megasao convert``, one after another in one process, and all that they complained."""
    done = run_beside(CONVERT, json.dumps(commands))
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
