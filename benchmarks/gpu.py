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
from megasao.ops.logprobs import chunked_logprobs
from megasao.ops.reference import (
    DIS_STATS,
    PPO_STATS,
    SIDES,
    dis_loss_reference,
    gae_reference,
    ppo_clip_loss_reference,
    response_loss_reference,
    response_sums_reference,
)

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


def policy_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
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
            verify_losses(policy_inputs(size, dtype), close)
        for lengths in shapes:
            verify_responses(policy_inputs(sum(lengths), dtype), lengths, close)
    verify_logprobs()


def divisor() -> Tensor:
    """The denominator of the verification."""
    return torch.tensor(7.0, dtype=torch.float64, device="cuda")


def compare(name: str, arguments: list[object], expected: list[Tensor], close: dict[str, float]) -> None:
    """The operator ``name`` gives ``expected``, twice the same bits."""
    operator = getattr(torch.ops.megasao, name)
    got, again = (operator(*arguments) for _ in range(2))
    got, again = ([results] if isinstance(results, Tensor) else list(results) for results in (got, again))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.detach(), **close)
    assert all(torch.equal(one, two) for one, two in zip(got, again, strict=True)), f"{name} is not reproducible"


def verify_losses(case: list[Tensor], close: dict[str, float]) -> None:
    """DIS and PPO's clip with gradients and statistics."""
    ppo = {"eps_low": 0.2, "eps_high": 0.3, "dual_clip": 2.0}
    for name, run, options, numbers, names in (
        ("dis", dis_loss_reference, {"eps_low": 0.8, "eps_high": 3.0}, EDGES, DIS_STATS),
        ("ppo_clip", ppo_clip_loss_reference, ppo, (0.8, 1.3, 2.0), PPO_STATS),
    ):
        leaf = case[0].clone().requires_grad_()
        loss, stats = run(leaf, *case[1:], **options, denominator=7.0)
        loss.backward()
        zero = torch.zeros((), dtype=torch.float64)
        expected = [loss, leaf.grad, torch.stack([stats.get(key, zero) for key in names])]
        compare(name, [*(tensor.cuda() for tensor in case), divisor(), *numbers], expected, close)


def verify_responses(case: list[Tensor], lengths: list[int], close: dict[str, float]) -> None:
    """The sums of responses, and a loss that weighs them."""
    logprobs, _, advantages, mask = case
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    weights = torch.rand(len(lengths), dtype=torch.float64)
    on_gpu = [tensor.cuda() for tensor in (logprobs, advantages, mask, bounds)]
    sums = response_sums_reference(logprobs, advantages, mask, bounds)
    compare("response_sums", on_gpu, [sums], close)
    leaf = logprobs.clone().requires_grad_()
    row = (leaf, advantages, mask, bounds)
    loss, sides = response_loss_reference(*row, weights=weights, alpha=0.2, denominator=7.0)
    loss.backward()
    expected = [loss, leaf.grad, torch.stack([sides[key] for key in SIDES])]
    compare("response_loss", [*on_gpu, weights.cuda(), divisor(), 0.2], expected, close)


def verify_logprobs() -> None:
    """bfloat16 logits are float32 sums: close to float64 ones of the same inputs."""
    hidden, weight = torch.randn(100, 64).bfloat16(), torch.randn(1000, 64).bfloat16()
    targets = torch.randint(1000, (100,))
    got, _ = chunked_logprobs(hidden.cuda(), weight.cuda(), targets.cuda(), chunk=7)
    expected, _ = chunked_logprobs(hidden.double(), weight.double(), targets)
    torch.testing.assert_close(got.cpu(), expected.float(), rtol=1e-4, atol=1e-4)


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
        case = [tensor.cuda() for tensor in policy_inputs(tokens)]
        case.append(torch.tensor(float(tokens), dtype=torch.float64, device="cuda"))
        for name, numbers in (("dis", EDGES), ("ppo_clip", (0.8, 1.3, 2.0))):
            run, into = getattr(torch.ops.megasao, name), getattr(torch.ops.megasao, f"{name}_out")
            out = [torch.empty_like(tensor) for tensor in run(*case, *numbers)]
            taken = microseconds(lambda case=case, n=numbers, out=out, into=into: into(*case, *n, *out))
            table[f"{name} {tokens}"] = {"us": taken, "gb_s": 17 * tokens / taken / 1e3}
        lengths = [4096] * (tokens // 4096)
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        row = [tensor[: sum(lengths)].clone() for tensor in (case[0], case[2], case[3])] + [bounds]
        weights = torch.ones(len(lengths), dtype=torch.float64, device="cuda")
        taken = microseconds(lambda row=row: torch.ops.megasao.response_sums(*row))
        table[f"response_sums {tokens}"] = {"us": taken, "gb_s": 9 * sum(lengths) / taken / 1e3}
        taken = microseconds(
            lambda row=row, weights=weights, last=case[-1]: torch.ops.megasao.response_loss(*row, weights, last, 0.2)
        )
        table[f"response_loss {tokens}"] = {"us": taken, "gb_s": 13 * sum(lengths) / taken / 1e3}
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
