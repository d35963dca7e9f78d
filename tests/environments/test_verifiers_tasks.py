"""The adapter of verifiers against the real package, in a Python environment of its own (`make setup-verifiers`)."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("MEGASAO_VERIFIERS_PYTHON", ROOT / ".venv-verifiers" / "bin" / "python"))
CASES = Path(__file__).with_name("verifiers_cases.py")


@pytest.mark.skipif(not PYTHON.exists(), reason=f"no verifiers: {PYTHON} is missing")
def test_the_adapter_does_what_its_cases_say_beside_the_real_package():
    """All of them run there: one that is skipped, or not found, would show in the count."""
    command = [str(PYTHON), "-m", "pytest", "-p", "no:cacheprovider", str(CASES)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    cases = CASES.read_text().count("\ndef test_")
    assert done.returncode == 0 and f"= {cases} passed in" in done.stdout, done.stdout + done.stderr
