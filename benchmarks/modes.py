"""Asynchronous against synchronous training: ``python benchmarks/modes.py [--steps 40] [--repeats 2]``.

Whole runs of `megasao train` on the same seed, problems and model, alternating: one rollout process, one trainer
rank, two idle cores. The model is random, so an episode goes on until it happens to end: lengths are geometric, and
the longest of a batch is several times the mean. Printed for each mode: seconds of all steps but the first five,
the share of them that the trainer waits and that the engine's slots are empty, and how old what it trains on is.
``--json FILE`` also writes the numbers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megasao.config import Config
from megasao.config.load import dump_config
from megasao.studies.tiny_model import write_model, write_tokenizer

SKIPPED = 5
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one step off": {"mode": "async", "max_lag": 1},
    "asynchronous": {"mode": "async", "max_lag": 4},
}
RUN_TIMEOUT_S = 900


def config_of(directory: Path, name: str, mode: str, steps: int) -> Config:
    """A run without evaluations and checkpoints in between."""
    return Config.model_validate(
        {
            "run": {"name": name, "directory": str(directory), "seed": 0},
            "model": {"path": str(directory / "model")},
            "environment": {"name": "chain", "max_tokens": 640, "max_turn_tokens": 600},
            "actor": {"optimizer": {"lr": 1e-6}},
            "critic": {"optimizer": {"lr": 1e-4}, "warmup_steps": 0},
            "loop": {"steps": steps, "batch_size": 32, **MODES[mode]},
            "parallel": {"ranks": 1},
            "buffer": {"max_trajectories": 64},
            "evaluation": {"every": 0, "problems": 1},
        }
    )


def run_once(directory: Path, name: str, mode: str, steps: int) -> dict[str, float]:
    """Train; what the run's own metrics say of the steps that count."""
    file = directory / f"{name}.yaml"
    file.write_text(dump_config(config_of(directory, name, mode, steps)), encoding="utf-8")
    command = [sys.executable, "-m", "megasao", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = (directory / name / "metrics" / "trainer.jsonl").read_text(encoding="utf-8").splitlines()
    steps_of = [record for record in map(json.loads, lines) if "time/step" in record][SKIPPED:]
    seconds = sum(record["time/step"] for record in steps_of)
    return {
        "seconds": seconds,
        "trainer waits": sum(record["time/wait"] for record in steps_of) / seconds,
        "slots empty": statistics.fmean(idle for record in steps_of if (idle := record["idle/rollout"]) is not None),
        "lag": statistics.fmean(record["data/lag_mean"] for record in steps_of),
        "tokens": sum(record["data/response_tokens"] * record["data/trajectories"] for record in steps_of),
    }


def main() -> None:
    """One line a mode, the fastest of its runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "model").mkdir()
        write_tokenizer(directory / "model")
        write_model(directory / "model", seed=0, hidden=128, layers=2, experts=8, moe_hidden=96)
        for repeat in range(given.repeats):
            for mode in MODES:
                found[mode].append(run_once(directory, f"{mode.replace(' ', '-')}-{repeat}", mode, given.steps))
    best = {mode: min(runs, key=lambda run: run["seconds"]) for mode, runs in found.items()}
    print(f"{'':14} {'seconds':>8} {'tokens/s':>9} {'trainer waits':>14} {'slots empty':>12} {'lag':>5} {'speed':>6}")
    for mode, run in best.items():
        rate = run["tokens"] / run["seconds"]
        against = rate * best["sync"]["seconds"] / best["sync"]["tokens"]
        print(
            f"{mode:14} {run['seconds']:8.1f} {rate:9.0f} {run['trainer waits']:13.0%} {run['slots empty']:11.0%} "
            f"{run['lag']:6.1f} {against:5.2f}x"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
