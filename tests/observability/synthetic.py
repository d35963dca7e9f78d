"""A made-up run directory with plausible numbers, for looking at the panel, the summary and the report.

``python tests/observability/synthetic.py DIR [STEPS]`` writes one.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import yaml

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.observability.examples import write_examples

START = 1_780_000_000.0
SFT_STEPS = 40


def make_config(directory: Path, *, steps: int = 160, sft: bool = True) -> Config:
    """A valid configuration of a small run."""
    optimizer = {"lr": 1e-4}
    return Config.model_validate(
        {
            "run": {"name": "synthetic", "directory": str(directory)},
            "model": {"path": "models/tiny"},
            "actor": {"optimizer": optimizer},
            "critic": {"optimizer": {"lr": 1e-3}},
            "loop": {"steps": steps, "batch_size": 64},
            "sft": {"steps": SFT_STEPS, "optimizer": optimizer} if sft else None,
        }
    )


def make_run(
    directory: Path, *, steps: int = 160, done: int | None = None, seed: int = 0
) -> tuple[RunDirectory, Config]:
    """A run that finished ``done`` of ``steps`` steps (default: all)."""
    done = steps if done is None else done
    config = make_config(directory, steps=steps)
    run = RunDirectory(directory / config.run.name)
    run.create()
    run.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    rng = random.Random(seed)
    write_lines(run.metrics / "sft.jsonl", [sft_row(step, rng) for step in range(SFT_STEPS)])
    write_lines(run.metrics / "trainer.jsonl", [trainer_row(step, steps, rng) for step in range(done)])
    write_lines(run.metrics / "controller.jsonl", [controller_row(second, rng) for second in range(done)])
    write_lines(run.evaluations, [row for step in evaluated(steps, done) for row in evaluation_rows(step, steps, rng)])
    for step in range(0, done, 10):
        write_examples(run, step, version(step), [example(step, index, steps, rng) for index in range(2)])
    return run, config


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def version(step: int) -> int:
    """Weight version after ``step`` (from 0): ten steps of critic warm-up publish nothing."""
    return max(0, step - 9)


def skill(step: float, steps: int) -> float:
    return 0.56 + 0.38 * (1 - math.exp(-3.2 * max(0.0, step - 10) / steps))


def sft_row(step: int, rng: random.Random) -> dict[str, Any]:
    loss = 0.35 + 2.6 * math.exp(-step / 7) + rng.gauss(0, 0.03)
    return {"time": START + step, "step": step, "sft/loss": loss, "sft/lr": 2e-3, "sft/tokens_per_s": 3900.0}


def trainer_row(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """One line of trainer.jsonl."""
    warm = step < 10
    reward = min(1.0, skill(step, steps) - 0.03 + rng.gauss(0, 0.035))
    wait, fetch, values = abs(rng.gauss(0.05, 0.04)), 0.02, 0.12
    critic, actor, publish = rng.gauss(0.62, 0.03), 0.0 if warm else rng.gauss(0.5, 0.03), 0.0 if warm else 0.06
    checkpoint = 0.9 if step % 50 == 49 else 0.0
    total = wait + fetch + values + critic + actor + publish + checkpoint + 0.03
    row: dict[str, Any] = {
        "time": START + 60 + 1.45 * (step + 1),
        "step": step,
        "weight_version": version(step),
        "reward/mean": reward,
        "reward/std": math.sqrt(max(0.0, reward * (1 - reward))),
        "critic/loss": 0.07 + 0.15 * math.exp(-step / 15) + abs(rng.gauss(0, 0.01)),
        "critic/grad_norm": 0.4 + 2 * math.exp(-step / 10) + abs(rng.gauss(0, 0.08)),
        "critic/lr": 1e-3 * (1 if step < steps / 2 else 2 * (1 - step / steps)),
        "critic/value_mean": reward + rng.gauss(0, 0.02),
        "critic/explained_variance": None
        if step > 0.93 * steps
        else 0.55 * (1 - math.exp(-step / 25)) + rng.gauss(0, 0.04),
        "data/lag_mean": 0.0 if warm else 1.1 + rng.gauss(0, 0.15),
        "data/lag_max": 0 if warm else rng.choice([2, 2, 3, 3, 4]),
        "data/mixed_versions": 0.0 if warm else 0.3 + rng.gauss(0, 0.05),
        "data/response_tokens": 15.2 + 0.01 * step + rng.gauss(0, 0.4),
        "data/trajectories": 64.0,
        "data/total_tokens": 47.0 + rng.gauss(0, 1),
        "data/truncated": max(0.0, 0.03 * math.exp(-step / 40) + rng.gauss(0, 0.004)),
        "time/step": total,
        "time/wait": wait,
        "time/fetch": fetch,
        "time/values": values,
        "time/critic": critic,
        "time/actor": actor,
        "time/publish": publish,
        "time/checkpoint": checkpoint,
        "throughput/trainer_tokens_per_s": 64 * 47 / total,
        "throughput/rollout_tokens_per_s": rng.gauss(760, 40),
        "idle/trainer": wait / total,
        "idle/rollout": abs(rng.gauss(0.35, 0.05)),
        **{f"rollout/{name}": value for name, value in counters(step, rng).items()},
    }
    if not warm:
        row |= {
            "actor/loss": rng.gauss(-0.01, 0.02),
            "actor/grad_norm": 0.6 + abs(rng.gauss(0, 0.12)),
            "actor/lr": 1e-4,
            "actor/masked_low": abs(rng.gauss(0.0012, 0.0006)),
            "actor/masked_high": abs(rng.gauss(0.0003, 0.0002)),
            "actor/ratio_mean": rng.gauss(1, 0.004),
            "actor/ratio_max": 2 + abs(rng.gauss(0, 0.8)),
            "actor/log_ratio_abs_mean": abs(rng.gauss(0.02, 0.004)),
            "actor/kl_k3": abs(rng.gauss(0.0016, 0.0005)),
            "actor/ess": rng.gauss(0.985, 0.004),
        }
    return row


def counters(step: int, rng: random.Random) -> dict[str, float]:
    """Gauges and totals of the controller."""
    return {
        "workers": 1,
        "buffer": rng.randint(40, 200),
        "buffer_bytes": 1e5,
        "leases": 64,
        "open_evaluations": 0,
        "accepted/arithmetic-3": 64 * step,
        "failures/timeout": step // 60,
        "dropped/stale/arithmetic-3": step // 30,
        "accept_rate/arithmetic-3": 1 - step // 30 / (64 * step + 1),
    }


def controller_row(second: int, rng: random.Random) -> dict[str, Any]:
    return {"time": START + 60 + second, "step": second, **counters(second, rng)}


def evaluated(steps: int, done: int) -> list[int]:
    return [step for step in [*range(0, steps, 25), steps] if step <= done]


def evaluation_rows(step: int, steps: int, rng: random.Random) -> list[dict[str, Any]]:
    """The greedy and the sampled evaluation after ``step`` finished steps."""
    rows = []
    for mode, offset in (("greedy", 0.015), ("sampled", -0.03)):
        success = min(0.99, skill(step, steps) + offset + rng.gauss(0, 0.008))
        failures = 1 if step == 50 else 0
        rows.append(
            {
                "evaluation_id": f"step-{step:06d}/{mode}",
                "step": step,
                "mode": mode,
                "problems": 512,
                "solved": round(success * (512 - failures)),
                "success": round(success * (512 - failures)) / (512 - failures),
                "truncated": 0.006,
                "response_tokens": 15.4,
                "failures": failures,
                "oldest_version": version(step - 1),
                "newest_version": version(step - 1),
                "seconds": 4.2,
                "time": START + 62 + 1.45 * step,
            }
        )
    return rows


EPISODE = [
    ("<bos> <q> 7 * ( 9 - 4 ) + 6 </q>", False),
    ("<call> 9 - 4 </call>", True),
    ("<out> 5 </out>", False),
    ("<call> 7 x 5 </call>", True),
    ("<out> error </out>", False),
    ("<call> 7 * 5 </call>", True),
    ("<out> 3 5 </out>", False),
    ("<call> 3 5 + 6 </call>", True),
    ("<out> 4 1 </out>", False),
    ("<ans> 4 1 </ans>", True),
]


def example(step: int, index: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """One example trajectory with the trainer's numbers."""
    pieces = [(word, action) for text, action in EPISODE for word in text.split()]
    pieces += [("<eos>", False)] if index == 0 else [("</script><b>&amp;", False)]
    mask = [action for _, action in pieces]
    solved = rng.random() < skill(step, steps)
    rollout = [rng.choice([-0.01, -0.03, -0.2, -0.9, -1.8]) + rng.random() * 0.01 if action else 0.0 for action in mask]
    trained = [logp + rng.gauss(0, 0.12) if action else 0.0 for logp, action in zip(rollout, mask, strict=True)]
    if index == 0 and step % 20 == 0:
        trained[12] = rollout[12] - 1.9
    ratio = [math.exp(new - old) if action else None for new, old, action in zip(trained, rollout, mask, strict=True)]
    values = [
        min(1, max(0, 0.55 + 0.4 * t / len(mask) + rng.gauss(0, 0.06))) if a else None for t, a in enumerate(mask)
    ]
    reward = 1.0 if solved else 0.0
    newest = version(step)
    old = max(0, newest - 2)
    middle = len(mask) // 2
    return {
        "trajectory_id": f"lease-{step}-{index}",
        "prompt_id": f"train-{step * 64 + index}",
        "task": "arithmetic-3",
        "reward": reward,
        "finish_reason": "done",
        "weight_versions": [[0, old]] if old == newest else [[0, old], [middle, newest]],
        "text": [word for word, _ in pieces],
        "tokens": [len(word) for word, _ in pieces],
        "action_mask": mask,
        "rollout_logprobs": rollout,
        "logprobs": trained,
        "ratio": ratio,
        "kept": [0.2 < value < 4 if value is not None else None for value in ratio],
        "advantages": [reward - value + rng.gauss(0, 0.05) if value is not None else 0.0 for value in values],
        "returns": [reward if action else 0.0 for action in mask],
        "values": values,
    }


if __name__ == "__main__":
    made, _ = make_run(Path(sys.argv[1]), steps=int(sys.argv[2]) if len(sys.argv) > 2 else 160)
    print(made.path)
