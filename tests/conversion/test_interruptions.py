"""Interrupted work goes on where it was; memory stays small. In processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megasao.conversion.output import make, reserved
from megasao.conversion.to_hf import quantized
from megasao.conversion.to_megatron import hf_to_model
from tests.conversion.support import convert, names_and_bytes

MB = 1 << 20
LARGEST = 48 * MB
START = "import sys; from megasao.cli import main; main(['convert', *sys.argv[1:]])"
HELD = """
import os, time
rename, done = os.rename, []
def held(old, new):
    rename(old, new)
    done.append(new)
    if len(done) == 3:
        time.sleep(600)
os.rename = held
"""
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (52_000_000, 52_000_000)); " + START
MEASURED = """
import sys
from pathlib import Path
import torch
import megasao.conversion.to_megatron, megasao.conversion.to_hf, megasao.conversion.progress
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) * 1024
torch.randn(600, 600) @ torch.randn(600, 600)
before = peak()
if sys.argv[1] == "whole":
    from safetensors.torch import load_file, save_file
    save_file(load_file(Path(sys.argv[2]) / "model.safetensors"), sys.argv[3])
else:
    from megasao.cli import main
    try:
        main(["convert", *sys.argv[1:]])
    except SystemExit as ended:
        assert not ended.code, ended.code
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 330 MB whose largest tensor has 48 MiB; only its sizes matter."""
    path = tmp_path_factory.mktemp("large")
    hidden, rows, layers = 1024, LARGEST // 2 // 1024, 3
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": rows // 2,
        "max_position_embeddings": 128,
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "vocab_size": rows,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    noise = torch.randn(LARGEST // 2).bfloat16()
    tensors = {name: noise.view(rows, hidden).clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden, hidden),
            "self_attn.v_proj": (hidden, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (rows // 2, hidden),
            "mlp.up_proj": (rows // 2, hidden),
            "mlp.down_proj": (hidden, rows // 2),
        }.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = noise[: shape[0] * shape[1]].view(shape).clone()
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def run(script: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=400
    )


def test_memory_holds_a_few_pieces_whatever_the_size(large: Path, tmp_path: Path) -> None:
    """Beyond the largest tensor there are at most 96 MiB: a few pieces. Loading whole needs more."""
    total = (large / "model.safetensors").stat().st_size

    def peak(*arguments: str | Path) -> int:
        done = run(MEASURED, *arguments)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    bound = LARGEST + 96 * MB
    assert total > 2 * bound
    there = ("hf-to-megatron", large, tmp_path / "model"), ("megatron-to-hf", tmp_path / "model", tmp_path / "back")
    chains = (
        (*there, ("verify", large, tmp_path / "back")),
        (("quantize", large, tmp_path / "fp8"), ("quantize", tmp_path / "fp8", tmp_path / "plain", "--dequantize")),
    )
    with ThreadPoolExecutor(2) as pool:  # each command is a process of its own
        peaks = list(pool.map(lambda commands: [peak(*command) for command in commands], chains))
    assert max(map(max, peaks)) < bound, peaks
    assert peak("whole", large, tmp_path / "copy") > 2 * bound


def test_a_full_disk_ends_it_and_the_same_command_goes_on(large: Path, tmp_path: Path) -> None:
    arguments = ("quantize", large, tmp_path / "out", "--shard-gb", "0.06")
    stopped = run(LIMITED, *arguments)
    assert stopped.returncode == 2
    assert "goes on from there" in stopped.stderr.replace("\n", " ") and "Traceback" not in stopped.stderr
    partial = tmp_path / ".out.partial"
    kept = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert kept and not (tmp_path / "out").exists()
    (partial / "model-00099-of-00099.safetensors.tmp").write_bytes(b"begun")
    going_on = run(START, *arguments)
    assert going_on.returncode == 0, going_on.stderr
    assert f"{len(kept)} of " in going_on.stdout and "files are there" in going_on.stdout
    assert kept.items() <= {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}.items()
    assert not list(tmp_path.glob(".out*")) and not list((tmp_path / "out").glob("*.tmp"))
    assert not (tmp_path / "out" / "plan.json").exists()
    assert convert("quantize", large, tmp_path / "at once") == 0
    assert names_and_bytes(tmp_path / "out") == names_and_bytes(tmp_path / "at once")


def test_a_killed_conversion_goes_on(large: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(large), str(tmp_path / "out"), "--shard-gb", "0.006"]
    process = subprocess.Popen([sys.executable, "-c", HELD + START, *arguments], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300  # it waits in the middle, so that no machine is too fast for the kill
    while not list(tmp_path.glob(".out.partial/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    kept = {path.name: path.stat().st_ino for path in tmp_path.glob(".out.partial/*.safetensors")}
    assert kept and not (tmp_path / "out").exists()
    assert convert(*arguments, "--parallel", "2") == 0
    assert kept.items() <= {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}.items()
    assert convert("quantize", large, tmp_path / "at once") == 0
    assert names_and_bytes(tmp_path / "out") == names_and_bytes(tmp_path / "at once")


def test_an_interrupted_conversion_says_how_to_go_on(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename, done = os.rename, list[str]()

    def interrupted(old: Path, new: Path) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(str(new))
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", interrupted)
        assert convert("quantize", large, tmp_path / "out", "--shard-gb", "0.06") == 130
    assert f"interrupted; the same command goes on from {tmp_path / '.out.partial'}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert convert("quantize", large, tmp_path / "out", "--shard-gb", "0.06") == 0
    assert "going on with" in capsys.readouterr().out


def test_only_the_same_conversion_goes_on_and_only_one_at_a_time(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with reserved(quantized(large, out)):
        assert convert("quantize", large, out) == 2
        assert "is in use" in capsys.readouterr().err.replace("\n", " ")
    for other in (("hf-to-megatron", large, out), ("quantize", large, out, "--shard-gb", "0.1")):
        assert convert(*other) == 2
        assert "was begun by another conversion" in capsys.readouterr().err.replace("\n", " ")
    output = quantized(large, out)
    os.utime(large / "model.safetensors", ns=(0, time.time_ns()))
    assert convert("quantize", large, out) == 2
    assert "its source has changed since" in capsys.readouterr().err.replace("\n", " ")
    assert output.partial.is_dir() and not out.exists()


def test_a_number_that_fp8_cannot_hold_is_named(tmp_path: Path, large: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text((large / "config.json").read_text())
    from safetensors.torch import load_file

    tensors, name = load_file(large / "model.safetensors"), "model.layers.2.mlp.up_proj.weight"
    tensors[name][-1, -1] = float("inf")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    done = run(START, "quantize", tmp_path / "hf", tmp_path / "out", "--parallel", "2", "--shard-gb", "0.05")
    assert done.returncode == 2 and f"{name} has numbers that are infinite" in done.stderr.replace("\n", " ")


def test_nothing_appears_before_everything_is_there(large: Path, tmp_path: Path) -> None:
    output = hf_to_model(large, tmp_path / "out", part_bytes=100_000_000)
    seen = []
    with reserved(output) as missing:
        make(output, missing, parallel=2, advance=lambda count: seen.append((count, output.path.exists())))
    assert not any(exists for _, exists in seen)
    assert sum(count for count, _ in seen) == sum(file.read_bytes for file in output.files)
    assert (output.path / "manifest.json").is_file() and not output.partial.exists()
