"""What background evaluation takes from a whole run: ``python benchmarks/evaluation_share.py [--steps 60]``.

Runs `megasao train configs/laptop.yaml` with evaluation.every=0 and with evaluation.every=1, so that an evaluation is
always going on, with one and the same warm start, alternating. Rollouts a second are those that the trainer got, by the
run's own metrics; processor seconds are those of the run's processes over the same steps. Everything shares the
machine's cores, so what evaluation costs is its share of the processor time: the worker's time beyond what its rollouts
take in the run without evaluations. ``--json FILE`` also writes the numbers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from megasao.observability.jsonl import read_metrics

ROOT = Path(__file__).parents[1]
FIRST = 15
"""The step from which is counted: the critic's warm-up is over, and the evaluation at the beginning too."""
ROLES = ("trainer", "rollout", "controller")


@dataclass(frozen=True)
class Measured:
    """One run from step ``FIRST`` to its last: rollouts and processor seconds of each role, a second of wall time."""

    rollouts_per_s: float
    processors: dict[str, float]
    evaluations: int


def processor_seconds(launcher: psutil.Process) -> dict[str, float]:
    """Of the roles under ``launcher`` until now, by the word after `megasao` on their command lines."""
    found = dict.fromkeys(ROLES, 0.0)
    for process in launcher.children(recursive=True):
        try:
            words, times = process.cmdline(), process.cpu_times()
        except psutil.Error:  # it ended
            continue
        for role in ROLES:
            if role in words:
                found[role] += times.user + times.system
    return found


def measure(directory: Path, model: Path, every: int, steps: int) -> Measured:
    """One run to its end."""
    changes = [
        f"run.directory={directory}",
        f"run.name=every-{every}-{time.monotonic_ns()}",
        f"model.path={model}",
        "sft.steps=200",
        f"loop.steps={steps}",
        f"evaluation.every={every}",
    ]
    before = set(directory.iterdir())
    command = [sys.executable, "-m", "megasao", "train", str(ROOT / "configs" / "laptop.yaml"), *changes]
    with (directory / "log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    launcher, samples = psutil.Process(process.pid), []
    while process.poll() is None:
        samples.append((time.time(), processor_seconds(launcher)))
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit((directory / "log").read_text()[-2000:])
    [run] = [path for path in directory.iterdir() if path not in before and path.is_dir()]
    rows = [row for row in read_metrics(run / "metrics" / "trainer.jsonl") if row["step"] >= FIRST]
    begun, ended = rows[0]["time"], rows[-1]["time"]
    one, other = (min(samples, key=lambda sample: abs(sample[0] - moment)) for moment in (begun, ended))
    rollouts = sum(row["data/trajectories"] for row in rows[1:])
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return Measured(
        rollouts / (ended - begun),
        {role: (other[1][role] - one[1][role]) / (other[0] - one[0]) for role in ROLES},
        sum(line["problems"] for line in lines if begun <= line["time"] <= ended),
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[int, list[Measured]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        model, runs = Path(name) / "model", Path(name) / "runs"
        runs.mkdir()
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_laptop_model.py"), str(model)], check=True)
        for _ in range(given.repeats):
            for every, measured in found.items():
                measured.append(measure(runs, model, every, given.steps))
                last = measured[-1]
                shares = ", ".join(f"{role} {value:.2f}" for role, value in last.processors.items())
                print(
                    f"evaluation.every={every}: {last.rollouts_per_s:.1f} rollouts a second, "
                    f"{last.evaluations} evaluation episodes; processors: {shares}",
                    flush=True,
                )
    rate = {every: median(one.rollouts_per_s for one in measured) for every, measured in found.items()}
    worker = {every: median(one.processors["rollout"] for one in measured) for every, measured in found.items()}
    total = median(sum(one.processors.values()) for one in found[1])
    share = (worker[1] - worker[0] * rate[1] / rate[0]) / total
    print(
        f"rollouts beside evaluations / without = {rate[1] / rate[0]:.3f}; "
        f"evaluation took {share:.1%} of the processor time"
    )
    if given.json is not None:
        numbers = {str(every): [asdict(one) for one in measured] for every, measured in found.items()}
        given.json.write_text(json.dumps({**numbers, "ratio": rate[1] / rate[0], "share": share}))


if __name__ == "__main__":
    main()
