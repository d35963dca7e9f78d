"""Peak memory of a training step on one long row: ``python benchmarks/long_context.py [--tokens 8192 16384 32768]``.

A tiny mixture of experts (2 layers, hidden 64, vocabulary 32,768), float32 on CPU, one sequence; log-probabilities in
chunks. Each measurement is a world of its own processes. Printed are MiB of resident memory of the largest rank above
that before the step: plain, with full recomputation, on two context-parallel ranks, and with both; then how memory
grows with the tokens: 1.0 is linear. A [T, T] matrix of scores would be 4 T^2 bytes a head, logits 4 T V bytes.
``--json FILE`` also writes the numbers.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

from ranks import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"trainer": {"recompute": "full"}},
    "CP2": {"parallel": {"ranks": 2, "context": 2}},
    "CP2, recompute": {"parallel": {"ranks": 2, "context": 2}, "trainer": {"recompute": "full"}},
}
SIZES = {
    "vocab_size": 32_768,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
}


def measure(model: Path, variant: str, tokens: int) -> float:
    """MiB that one step on one sequence of ``tokens`` adds to this rank's resident memory. In a rank's process."""
    import torch

    from megasao.config import Config
    from megasao.megatron.models import build_model
    from megasao.megatron.optimizer import build_optimizer
    from megasao.megatron.rows import Row
    from megasao.megatron.runtime import initialize_world, set_layout, shutdown_world
    from megasao.megatron.step import forward_backward

    torch.set_num_threads(1)
    settings = VARIANTS[variant]
    config = Config.model_validate(
        {
            "run": {"name": "memory"},
            "model": {"path": str(model)},
            "actor": {"optimizer": {"lr": 1e-3}},
            "critic": {"optimizer": {"lr": 1e-3}},
            "loop": {"steps": 100},
            "parallel": {"ranks": 1},
            **settings,
        }
    )
    initialize_world(3600.0)
    set_layout(config.parallel, seed=0)
    actor = build_model("actor", model, config, load=False)
    optimizer = build_optimizer(actor, config.actor.optimizer)

    def step(length: int) -> None:
        optimizer.zero_grad()
        row = Row.from_sequences([[token % 1000 for token in range(length)]], [1.0])
        forward_backward(actor, [row], lambda index, logprobs: (-logprobs.sum() / length, {}))
        optimizer.step(1e-3)

    step(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shutdown_world()
    return (peak - before) / 1024


def largest(model: Path, variant: str, tokens: int) -> float:
    """The most that any rank adds."""
    ranks = VARIANTS[variant].get("parallel", {"ranks": 1})["ranks"]
    return max(run_ranks(__file__, ranks, ["--rank", str(model), variant, str(tokens)]))


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16_384, 32_768])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        model, variant, tokens = options.rank
        print(measure(Path(model), variant, int(tokens)))
        return
    sizes = sorted(options.tokens)
    results: dict[str, list[float]] = {}
    print(f"{'MiB a rank':<16}" + "".join(f"{size:>10}" for size in sizes) + f"{'growth':>10}")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
        for variant in options.variants:
            found = results[variant] = [largest(Path(directory), variant, size) for size in sizes]
            growth = (found[-1] / found[0]) / (sizes[-1] / sizes[0])
            print(f"{variant:<16}" + "".join(f"{each:>10.0f}" for each in found) + f"{growth:>10.2f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"tokens": sizes, "mib": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
