"""Peak memory of a training step on one long row: ``python benchmarks/long_context.py [--tokens 8192 16384 32768]``.

A tiny mixture of experts (2 layers, hidden 64, vocabulary 32,768), float32 on CPU, one sequence; log-probabilities in
chunks. Each measurement is a world of its own processes. Printed are MiB of resident memory of the largest rank above
that before the step: plain, with full recomputation, on two context-parallel ranks, and with both; the same for sparse
latent attention on 1024 keys a query; and after them the KiB that a token more costs, from each size to the next, which
leaves out what does not grow (a chunk's logits). Linear is a constant there; with a [T, T] matrix of scores it would
double with the size, 96 KiB a head from 8k to 16k. The C library gives memory back as soon as it is free.
``--json FILE`` also writes the numbers.
"""

import argparse
import json
import os
import resource
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from ranks import run_ranks

RECOMPUTE: dict[str, Any] = {"trainer": {"recompute": "full"}}
CP2: dict[str, Any] = {"parallel": {"ranks": 2, "context": 2}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": RECOMPUTE,
    "CP2": CP2,
    "CP2, recompute": CP2 | RECOMPUTE,
    "sparse": {},
    "sparse, recompute": RECOMPUTE,
    "sparse, CP2": CP2,
    "sparse, CP2, recompute": CP2 | RECOMPUTE,
}
COMMON = {
    "vocab_size": 32_768,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
GROUPED = COMMON | {"model_type": "qwen3_moe", "num_experts": 8, "num_key_value_heads": 2, "head_dim": 16}
SPARSE = COMMON | {
    "model_type": "glm_moe_dsa",
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 1024,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
}
"""The first layer has an indexer, the second uses its selection."""


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
    # Larger blocks are mapped one by one and go back to the system when they are freed.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)
    sizes = sorted(options.tokens)
    results: dict[str, list[float]] = {}
    spans = "".join(f"{f'to {size // 1024}k':>10}" for size in sizes[1:])
    print(f"{'MiB a rank':<24}" + "".join(f"{size:>10}" for size in sizes) + "    KiB a token" + spans)
    with tempfile.TemporaryDirectory() as directory:
        for name, shape in (("grouped", GROUPED), ("sparse", SPARSE)):
            (Path(directory) / name).mkdir()
            (Path(directory) / name / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        for variant in options.variants:
            model = Path(directory) / ("sparse" if variant.startswith("sparse") else "grouped")
            found = results[variant] = [largest(model, variant, size) for size in sizes]
            grown, added = ([right - left for left, right in pairwise(each)] for each in (found, sizes))
            slopes = [1024 * mib / tokens for mib, tokens in zip(grown, added, strict=True)]
            cells = [*(f"{each:>10.0f}" for each in found), " " * 15, *(f"{each:>10.2f}" for each in slopes)]
            print(f"{variant:<24}" + "".join(cells), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"tokens": sizes, "mib": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
