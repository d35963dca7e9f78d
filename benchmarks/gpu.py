"""The CUDA kernels on a GPU: correct against the CPU reference, then timed: ``python benchmarks/gpu.py``.

Prints microseconds, GB/s, and the share of the copy bandwidth that is measured in the same run.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megasao.ops.extension import load_extension
from megasao.ops.reference import STATS, dis_loss_reference, gae_reference

EDGES = (math.log(0.2), math.log(4.0))


def gae_inputs(lengths: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """On the CPU: turns of actions and observations, rewards anywhere, lambda and bootstrap per sequence."""
    tokens = sum(lengths)
    rewards = torch.where(torch.rand(tokens) < 0.1, torch.randn(tokens), 0.0).to(dtype)
    mask = (torch.rand(tokens) < 0.01).cumsum(0) % 3 < 2
    values = torch.where(mask, torch.randn(tokens), math.nan).to(dtype)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lam = 1 - torch.rand(len(lengths), dtype=torch.float64) / 100
    return [rewards, values, mask, bounds, lam, torch.randn(len(lengths), dtype=torch.float64)]


def dis_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """On the CPU: log-ratios inside and outside the band, NaN at observations."""
    mask = torch.rand(tokens) < 0.7
    rollout = -torch.rand(tokens)
    logprobs = torch.where(mask, rollout + torch.randn(tokens), math.nan)
    return [logprobs.to(dtype), rollout.to(dtype), torch.randn(tokens).to(dtype), mask]


def verify(tokens: int) -> None:
    """Raise AssertionError where CUDA and the reference disagree, or two runs differ in a bit."""
    half = tokens // 2
    shapes = [[1], [2047, 2, 2047], [0, 5, 0, 3], [tokens], [half, 1, tokens - half], [3] * (tokens // 30)]
    for dtype in (torch.float32, torch.float64):
        close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-10}
        for lengths in shapes:
            case = gae_inputs(lengths, dtype)
            expected = gae_reference(*case[:4], gamma=0.999, lam=case[4], bootstrap=case[5])
            for _ in range(3):
                got = torch.ops.megasao.gae(*(tensor.cuda() for tensor in case), 0.999)
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one.cpu(), other, **close)
        for size in (1, 7, 2048, tokens):
            case = dis_inputs(size, dtype)
            leaf = case[0].clone().requires_grad_()
            loss, stats = dis_loss_reference(leaf, *case[1:], eps_low=0.8, eps_high=3.0, denominator=7.0)
            loss.backward()
            arguments = (*(tensor.cuda() for tensor in case), torch.tensor(7.0, dtype=torch.float64, device="cuda"))
            got, again = (torch.ops.megasao.dis(*arguments, *EDGES) for _ in range(2))
            expected_stats = torch.stack([stats[name] for name in STATS])
            for one, other in zip(got, (loss.detach(), leaf.grad, expected_stats), strict=True):
                torch.testing.assert_close(one.cpu(), other, **close)
            assert all(torch.equal(one, two) for one, two in zip(got, again, strict=True)), "not reproducible"


def microseconds(run: Callable[[], object], repeats: int = 50) -> float:
    """Median of single runs between events, after the L2 cache was overwritten."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def measure(sizes: list[int]) -> dict[str, dict[str, float]]:
    """Microseconds and GB/s by kernel and size; bytes are those that the algorithm must move."""
    big = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(big)
    peak = 2 * big.numel() / microseconds(lambda: copy.copy_(big)) / 1e3
    table = {"copy": {"gb_s": peak}}
    for tokens in sizes:
        for name, lengths in (("4096", [4096] * (tokens // 4096)), ("one", [tokens])):
            case = [tensor.cuda() for tensor in gae_inputs(lengths)]
            out = [torch.empty_like(case[0]) for _ in range(2)]
            taken = microseconds(lambda case=case, out=out: torch.ops.megasao.gae_out(*case, 1.0, *out))
            table[f"gae {tokens} {name}"] = {"us": taken, "gb_s": 17 * sum(lengths) / taken / 1e3}
        case = [*(tensor.cuda() for tensor in dis_inputs(tokens))]
        case.append(torch.tensor(float(tokens), dtype=torch.float64, device="cuda"))
        out = [torch.empty_like(tensor) for tensor in torch.ops.megasao.dis(*case, *EDGES)]
        taken = microseconds(lambda case=case, out=out: torch.ops.megasao.dis_out(*case, *EDGES, *out))
        table[f"dis {tokens}"] = {"us": taken, "gb_s": 17 * tokens / taken / 1e3}
    for row in table.values():
        row["of_copy"] = row["gb_s"] / peak
    return table


def main() -> None:
    """Verify, then time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000, help="largest row of the verification")
    parser.add_argument("--verify-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    extension = load_extension()
    if not torch.cuda.is_available() or not extension.cuda:
        raise SystemExit(f"needs a GPU and CUDA kernels; torch {torch.__version__}, {extension}")
    torch.manual_seed(0)
    verify(options.tokens)
    print(f"verified on {torch.cuda.get_device_name()}, kernels for {extension.cuda}")
    if options.verify_only:
        return
    table = measure([100_000, 1_000_000, 10_000_000, 100_000_000])
    for name, row in table.items():
        print(f"{name:<24}{row.get('us', math.nan):>12.1f} us{row['gb_s']:>10.0f} GB/s{row['of_copy']:>8.2f} of copy")
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "table": table}, indent=1))


if __name__ == "__main__":
    main()
