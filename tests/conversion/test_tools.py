"""The four tools are the commands of ``megasao convert``."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_verify_says_by_its_exit_code(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        save_file({"w": torch.full((2,), value)}, tmp_path / name)
    equal, different = (run("verify_checkpoint", tmp_path / "a", tmp_path / other) for other in "bc")
    assert (equal.returncode, equal.stdout) == (0, "equal: 1 tensors, 8 bytes\n")
    assert different.returncode == 1 and "w: 2 of 2 numbers differ" in different.stdout
    assert run("verify_checkpoint", tmp_path / "a", tmp_path / "d").returncode == 2


@pytest.mark.parametrize("tool", ["quantize_hf", "convert_hf_to_megatron", "convert_megatron_to_hf"])
def test_a_wrong_source_is_one_message(tool: str, tmp_path: Path) -> None:
    done = run(tool, tmp_path / "absent", tmp_path / "out")
    assert done.returncode == 2 and str(tmp_path / "absent") in done.stderr.replace("\n", "")
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
