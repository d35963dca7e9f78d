"""Chunked against plain log-probabilities at a large vocabulary: ``python benchmarks/logprobs.py [--tokens 1024]``.

Forward and backward on one thread, each variant in a process of its own. Prints seconds of processor time, and the
peak of resident memory above that of the inputs and their gradients; it holds one more gradient of the weight.
``--json FILE`` also writes the numbers.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path


def measure(variant: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """Seconds and extra MiB of one forward and backward pass; runs in the child process."""
    import torch

    from megasao.ops.logprobs import chunked_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.empty(vocabulary, hidden).normal_(std=hidden**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    for tensor in (states, weight):
        tensor.grad = torch.zeros_like(tensor).fill_(0)  # written, so that it is resident
    warm_up = torch.randn(8, hidden, requires_grad=True)
    chunked_logprobs(warm_up, warm_up, torch.zeros(8, dtype=torch.int64))[0].sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    if variant == "plain":
        law = torch.log_softmax((states @ weight.T).float(), dim=-1)
        logprobs = law.gather(1, targets[:, None]).squeeze(1)
    else:
        logprobs, _ = chunked_logprobs(states, weight, targets, chunk=int(variant))
    logprobs.sum().backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "extra_mib": (peak - before) / 1024, "chunk_mib": 0.0, "loss": float(logprobs.sum())}


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=154_880)
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = (options.tokens, options.hidden, options.vocabulary)
    if options.variant:
        print(json.dumps(measure(options.variant, *size)))
        return
    print("{} tokens, hidden {}, vocabulary {}; float32, one thread".format(*size))
    print(f"{'variant':<12}{'seconds':>10}{'extra MiB':>12}{'one chunk MiB':>16}")
    table = {}
    for variant in ["plain", *map(str, options.chunks)]:
        arguments = [f"--{name}={value}" for name, value in zip(("tokens", "hidden", "vocabulary"), size, strict=True)]
        command = [sys.executable, __file__, *arguments, f"--variant={variant}"]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows = options.tokens if variant == "plain" else int(variant)
        row["chunk_mib"] = rows * options.vocabulary * 4 / 2**20
        table[variant] = row
        print(f"{variant:<12}{row['seconds']:>10.2f}{row['extra_mib']:>12.0f}{row['chunk_mib']:>16.0f}", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"tokens": size[0], "hidden": size[1], "vocabulary": size[2], "rows": table})
        )


if __name__ == "__main__":
    main()
