"""The compiled operators against other formulations, on one thread: ``python benchmarks/kernels.py``.

Prints milliseconds of processor time (best of many, so other processes on the machine count little) and ratios; all
numbers of a table come from one run. ``--json FILE`` also writes them, ``--quick`` only shows that everything runs.
The other formulations are written here from their published formulas. Missing ones (numba, a compiler for
torch.compile) are left out.
"""

import argparse
import importlib.util
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megasao.ops.extension import load_extension
from megasao.ops.reference import dis_loss_reference, gae_reference

Run = Callable[[], object]
LAMBDA = 0.95


def best_of(run: Run, budget_s: float) -> float:
    """Milliseconds of processor time of the fastest run, at least three of them."""
    run()
    best, spent, runs = math.inf, 0.0, 0
    while runs < 3 or (spent < budget_s and runs < 200):
        start = time.process_time()
        run()
        taken = time.process_time() - start
        best, spent, runs = min(best, taken), spent + taken, runs + 1
        if taken > budget_s:
            break
    return 1e3 * best


def chunked_scan(deltas: Tensor, decay: float, chunk: int = 128) -> Tensor:
    """Dense GAE [B, T] by triangular products inside chunks and a loop over chunks; T a multiple of ``chunk``."""
    powers = torch.arange(chunk)
    distance = powers[:, None] - powers[None, :]
    matrix = torch.where(distance >= 0, torch.tensor(decay) ** distance.clamp_min(0), torch.tensor(0.0))
    pieces = deltas.view(len(deltas), -1, chunk) @ matrix
    tail = torch.tensor(decay) ** (chunk - powers)
    carry = deltas.new_zeros(len(deltas), 1)
    for piece in reversed(pieces.unbind(1)):
        piece += carry * tail
        carry = piece[:, :1]
    return pieces.view_as(deltas)


def step_loop(deltas: Tensor, decay: float) -> Tensor:
    """Dense GAE [B, T] by a loop over time, all sequences at once."""
    carry, steps = deltas.new_zeros(len(deltas)), []
    for delta in reversed(deltas.unbind(1)):
        carry = delta + decay * carry
        steps.append(carry)
    return torch.stack(steps[::-1], dim=1)


def dense_deltas(rewards: Tensor, values: Tensor, sequences: int, pad_to: int) -> Tensor:
    """delta [B, T'] of the dense formulations (they have no mask), T' a multiple of ``pad_to``."""
    shape = (sequences, -1)
    values, rewards = values.view(shape), rewards.view(shape)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    return torch.nn.functional.pad(rewards + following - values, (0, -values.shape[1] % pad_to))


def numba_gae() -> Callable[..., None] | None:
    """The serial masked loop, compiled by numba."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    @numba.njit  # type: ignore[misc]
    def loop(rewards, values, mask, bounds, lam, bootstrap, gamma, advantages, returns):  # type: ignore[no-untyped-def]
        for b in range(len(bounds) - 1):
            y = gamma * bootstrap[b]
            for t in range(bounds[b + 1] - 1, bounds[b] - 1, -1):
                if mask[t]:
                    total = rewards[t] + y
                    returns[t] = total
                    advantages[t] = total - values[t]
                    y = gamma * lam[b] * total + gamma * (1 - lam[b]) * values[t]
                else:
                    returns[t] = advantages[t] = 0.0
                    if math.isfinite(rewards[t]):
                        y += rewards[t]

    return loop


def gae_row(tokens: int, length: int, budget: float) -> dict[str, float]:
    """Milliseconds by formulation."""
    sequences = tokens // length
    tokens = sequences * length
    rewards, values = torch.zeros(tokens), torch.randn(tokens)
    rewards[length - 1 :: length] = 1
    mask = torch.arange(tokens) // 200 % 3 < 2  # turns of 400 actions and 200 observations
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    lam = torch.full((sequences,), LAMBDA, dtype=torch.float64)
    bootstrap = torch.zeros(sequences, dtype=torch.float64)
    row = (rewards, values, mask, bounds, lam, bootstrap)
    outputs = torch.empty(tokens), torch.empty(tokens)
    ops = torch.ops.megasao
    times = {
        "fused, out=": best_of(lambda: ops.gae_out(*row, 1.0, *outputs), budget),
        "fused": best_of(lambda: ops.gae(*row, 1.0), budget),
    }
    loop = numba_gae()
    if loop is not None:
        arrays = [tensor.numpy() for tensor in (*row, *outputs)]
        times["numba serial loop"] = best_of(lambda: loop(*arrays[:6], 1.0, *arrays[6:]), budget)

    def scan() -> Tensor:
        return chunked_scan(dense_deltas(rewards, values, sequences, 128), LAMBDA)

    def scan_and_returns() -> tuple[Tensor, Tensor]:
        """What the operator gives: advantages and returns."""
        advantages = scan()[:, :length]
        return advantages, advantages + values.view(sequences, -1)

    times["chunked scan (dense)"] = best_of(scan_and_returns, budget)
    if length <= 10_000:
        deltas = dense_deltas(rewards, values, sequences, 1)
        times["loop over time (dense)"] = best_of(lambda: step_loop(deltas, LAMBDA), budget)
        times["plain torch reference"] = best_of(
            lambda: gae_reference(*row[:4], gamma=1.0, lam=lam, bootstrap=bootstrap), budget
        )
        torch.testing.assert_close(scan()[:, :length], step_loop(deltas, LAMBDA), atol=1e-4, rtol=1e-4)
    return times


def dis_row(tokens: int, budget: float, compiled: bool) -> dict[str, float]:
    """Milliseconds of forward and backward with all statistics."""
    rollout, advantages = torch.randn(2, tokens).unbind(0)
    logprobs = (rollout + 0.3 * torch.randn(tokens)).requires_grad_()
    mask = torch.arange(tokens) // 200 % 3 < 2
    band = {"eps_low": 0.8, "eps_high": 3.0, "denominator": float(tokens)}
    edges = (math.log(0.2), math.log(4.0))
    denominator = torch.tensor(float(tokens), dtype=torch.float64)
    row = (logprobs, rollout, advantages, mask)
    ops = torch.ops.megasao

    def both(loss: Callable[..., object]) -> Run:
        def run() -> None:
            logprobs.grad = None
            loss(*row, **band)[0].backward()  # type: ignore[index]

        return run

    def fused(*arguments: Tensor, **_: float) -> tuple[Tensor, ...]:
        return ops.dis(*arguments, denominator, *edges)

    plain = tuple(tensor.detach() for tensor in row)
    outputs = [torch.empty_like(tensor) for tensor in ops.dis(*plain, denominator, *edges)]
    times = {
        "fused forward, out=": best_of(lambda: ops.dis_out(*plain, denominator, *edges, *outputs), budget),
        "fused": best_of(both(fused), budget),
        "plain torch": best_of(both(dis_loss_reference), budget),
    }
    if compiled:
        times["torch.compile"] = best_of(both(torch.compile(dis_loss_reference)), budget)
    return times


def bandwidth() -> float:
    """GB/s of z = x + y on 80 MB tensors: two reads, and a write with its read for ownership."""
    x, y, z = torch.ones(3, 20_000_000).unbind(0)
    return 16 * len(x) / best_of(lambda: torch.add(x, y, out=z), 1.0) / 1e6


def show(title: str, times: dict[str, float], base: str) -> None:
    """One table: milliseconds, and how many times the base's."""
    print(f"\n{title}\n{'':<26}{'ms':>10}{'x ' + base:>18}")
    for name, value in times.items():
        print(f"{name:<26}{value:>10.3f}{value / times[base]:>18.2f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions: numbers mean nothing")
    parser.add_argument("--compile", action="store_true", help="also torch.compile (needs half a minute a size)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    extension = load_extension()
    if extension.problem is not None:
        raise SystemExit(f"no compiled operators: {extension.problem}")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    budget = 0.01 if options.quick else 1.5
    sizes = [20_000] if options.quick else [1_000_000, 10_000_000]
    record: dict[str, object] = {"machine": platform.processor() or platform.machine(), "isa": extension.cpu}
    speed = bandwidth()
    record["bandwidth_gb_s"] = speed
    print(f"one thread, {extension.cpu}; {speed:.1f} GB/s (measured: add of two tensors)")
    for tokens in sizes:
        for length in (4096, tokens):
            times = gae_row(tokens, length, budget)
            bound = 25 * (tokens // length * length) / speed / 1e6
            times["memory bound, 25 B/token"] = bound
            show(f"GAE, {tokens:.0e} tokens in sequences of {length}", times, "fused, out=")
            record[f"gae/{tokens}/{length}"] = times
    for tokens in sizes if options.quick else [1_000, 10_000, 100_000, *sizes]:
        times = dis_row(tokens, budget, options.compile)
        show(f"DIS forward + backward with statistics, {tokens:.0e} tokens", times, "fused")
        record[f"dis/{tokens}"] = times
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
