"""The four tools are the commands of ``megasao convert``."""

import os
import pty
import re
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


def test_a_bar_on_the_terminal_says_how_far_how_fast_and_how_long_still(tmp_path: Path) -> None:
    for name in "ab":
        save_file({f"w{number}": torch.zeros(2**20) for number in range(8)}, tmp_path / name)
    terminal, end = pty.openpty()
    command = [sys.executable, str(TOOLS / "verify_checkpoint.py"), str(tmp_path / "a"), str(tmp_path / "b")]
    environment = os.environ | {"COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=end, env=environment) as process:
        os.close(end)
        shown = b""
        try:
            while some := os.read(terminal, 4096):
                shown += some
        except OSError:  # how a terminal says that the other side has gone
            pass
        os.close(terminal)
        assert process.wait(400) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n").split("\n")
    assert any(re.search(r"comparing .* 0 % +\d:\d\d:\d\d left -:--:--", line) for line in lines), lines
    assert any(re.search(r"comparing .* 100 % \d+\.\d\d GB/s \d:\d\d:\d\d left 0:00:00", line) for line in lines), lines
