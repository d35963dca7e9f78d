"""Speed of the numerical core on this machine's CPU: ``python benchmarks/ops.py``. Prints milliseconds, best of 10."""

import time
from collections.abc import Callable

import torch

from megasao.algorithms.advantages import skip_observation_gae
from megasao.config.algorithm import SkipObservationGae
from megasao.ops import dis_loss, gae
from megasao.trajectories.packing import plan

SHAPES = {"60 x 85 (a laptop row)": (60, 85), "64 x 4096": (64, 4096), "1 x 131072": (1, 131_072)}


def best_of(run: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def main() -> None:
    """Print one table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{'row':<24}{'gae':>9}{'skip_observation_gae':>22}{'dis forward':>13}{'forward + backward':>20}")
    for name, (sequences, length) in SHAPES.items():
        tokens = sequences * length
        rewards, values, rollout = torch.randn(3, tokens).unbind(0)
        mask = torch.rand(tokens) < 0.7
        cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32)
        logprobs = (rollout + 0.1 * torch.randn(tokens)).requires_grad_()
        row = (rewards, values, mask, cu_seqlens)
        dis = (logprobs, rollout, values, mask)
        band = {"eps_low": 0.8, "eps_high": 3.0, "denominator": float(tokens)}
        times = (
            best_of(lambda row=row: gae(*row, gamma=1.0, lam=0.95)),
            best_of(lambda row=row: skip_observation_gae(*row, SkipObservationGae())),
            best_of(lambda dis=dis, band=band: dis_loss(*dis, **band)),
            best_of(lambda dis=dis, band=band: dis_loss(*dis, **band)[0].backward()),
        )
        print("{:<24}{:>9.2f}{:>22.2f}{:>13.2f}{:>20.2f}".format(name, *times))
    lengths = torch.randint(100, 8192, (1024,)).tolist()
    milliseconds = best_of(lambda: plan(lengths, data_size=8, token_budget=16_384))
    print(f"plan of 1024 trajectories, 8 ranks: {milliseconds:.1f}")


if __name__ == "__main__":
    main()
