"""Speed and memory of ``megasao convert`` against copying: ``python benchmarks/conversion.py [--gb 2] [--dir DIR]``.

Writes a random bfloat16 llama checkpoint, then runs each command in a process of its own, the plain copy of the same
files (``shutil.copyfile``, then fsync) before and after them. GB/s is bytes read by seconds of the wall clock; peak
memory is that of the process above what its imports took. ``--json FILE`` also writes the numbers.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHILD = """
import sys, time
import megasao.conversion.progress, megasao.conversion.to_hf, megasao.conversion.to_megatron, megasao.conversion.verify
from megasao.cli import main
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) * 1024
before, start = peak(), time.monotonic()
try:
    main(["convert", *sys.argv[1:]])
except SystemExit as ended:
    code = ended.code or 0
print("MEASURED", time.monotonic() - start, peak() - before, code)
"""


def write_source(path: Path, gigabytes: float) -> tuple[int, int]:
    """A llama of about this size in files of at most 0.5 GB; its bytes, and those of its largest tensor."""
    import torch

    from megasao.storage.header import TensorInfo
    from megasao.storage.hf_directory import INDEX
    from megasao.storage.writer import TensorFileWriter

    hidden = 2048 if gigabytes >= 1 else 128
    ffn, vocabulary, heads = 4 * hidden, 16 * hidden, 16
    layer = 4 * hidden * hidden + 3 * hidden * ffn
    layers = max(round((gigabytes * 1e9 / 2 - 2 * vocabulary * hidden) / layer), 1)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= {f"{name}.weight": (vocabulary, hidden) for name in ("model.embed_tokens", "lm_head")}
    for number in range(layers):
        prefix = f"model.layers.{number}."
        shapes |= {f"{prefix}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, ffn)
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    infos = [TensorInfo(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    groups: list[list[TensorInfo]] = [[]]
    for info in infos:
        if sum(each.nbytes for each in groups[-1]) + info.nbytes > 500_000_000:
            groups.append([])
        groups[-1].append(info)
    places = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        with TensorFileWriter(path / name, group) as writer:
            for info in group:
                writer.write(info.name, torch.empty(info.shape, dtype=torch.bfloat16).normal_(std=0.02))
                places[info.name] = name
            writer.finish()
    total = sum(info.nbytes for info in infos)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total, max(info.nbytes for info in infos)


def copy(source: Path, out: Path) -> float:
    """Seconds to copy the files and have them on the disk."""
    from megasao.storage.atomic import sync

    start = time.monotonic()
    out.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, out / file.name)
        sync(out / file.name)
    return time.monotonic() - start


def run(*arguments: str | Path) -> tuple[float, int]:
    """Seconds and bytes of peak memory of one command."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    seconds, peak, code = done.stdout.splitlines()[-1].split()[1:]
    if code != "0":
        raise RuntimeError(f"{' '.join(map(str, arguments))} ended with {code}: {done.stderr}")
    return float(seconds), int(peak)


def measure(directory: Path, gigabytes: float) -> dict[str, Any]:
    """All rows: seconds, GB read, and peak memory in MB."""
    source = directory / "hf"
    source.mkdir()
    total, largest = write_source(source, gigabytes)
    rows: dict[str, Any] = {}

    def row(name: str, seconds: float, read: int, peak: int | None = None) -> None:
        rows[name] = {"seconds": seconds, "gb": read / 1e9, "peak_mb": None if peak is None else peak / 1e6}

    row("copy", copy(source, directory / "copy"), total)
    shutil.rmtree(directory / "copy")
    in_four = f"--shard-gb={gigabytes / 4}"
    for parallel in (1, 2):
        out = directory / f"model-{parallel}"
        seconds, peak = run("hf-to-megatron", source, out, f"--parallel={parallel}", in_four)
        row(f"hf-to-megatron, {parallel} at a time", seconds, total, peak)
    shutil.rmtree(directory / "model-2")
    seconds, peak = run("megatron-to-hf", directory / "model-1", directory / "back")
    row("megatron-to-hf", seconds, 2 * total, peak)  # the sums are compared first
    seconds, peak = run("verify", source, directory / "back")
    row("verify", seconds, 2 * total, peak)
    shutil.rmtree(directory / "back")
    shutil.rmtree(directory / "model-1")
    for parallel in (1, 2):
        out = directory / f"fp8-{parallel}"
        seconds, peak = run("quantize", source, out, f"--parallel={parallel}", in_four)
        row(f"quantize, {parallel} at a time", seconds, total, peak)
    fp8 = sum(file.stat().st_size for file in (directory / "fp8-1").glob("*.safetensors"))
    seconds, peak = run("quantize", "--dequantize", directory / "fp8-1", directory / "plain")
    row("quantize --dequantize", seconds, fp8, peak)
    row("copy again", copy(source, directory / "copy"), total)
    return {"gb": total / 1e9, "largest_mb": largest / 1e6, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint; five times as much disk is used")
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        found = measure(Path(directory), options.gb)
    print(f"{found['gb']:.2f} GB of bfloat16, the largest tensor {found['largest_mb']:.0f} MB")
    print(f"{'what':<30}{'GB read':>9}{'seconds':>9}{'GB/s':>7}{'peak MB':>9}")
    for name, row in found["rows"].items():
        peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
        print(f"{name:<30}{row['gb']:>9.2f}{row['seconds']:>9.1f}{row['gb'] / row['seconds']:>7.2f}{peak:>9}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
