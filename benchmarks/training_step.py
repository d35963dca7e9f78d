"""Speed of training steps on CPU, one thread a rank: ``python benchmarks/training_step.py``.

A mixture of experts of 14 M parameters, float32. Four questions, each answered by a ratio within one run:
- one rank against the same step written with transformers and torch's fused AdamW (losses must agree; alternating);
- two ranks (data parallel; expert parallel) against one: needs two idle cores;
- the share of a whole SAO step (packing, values, two critic updates, actor, weights out) that is spent in Megatron's
  schedules and optimizer;
- packed rows against the same trajectories padded to the longest.
Seconds are wall time, the best of the repeats. ``--json FILE`` also writes the numbers.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks import run_ranks

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "moe_intermediate_size": 384,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
LENGTH, SEQUENCES = 256, 8
QUICK = {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1}
"""Another shape, that only shows whether the script runs."""
LAYOUTS: dict[str, dict[str, int]] = {"1 rank": {"ranks": 1}, "DP2": {"ranks": 2}, "EP2": {"ranks": 2, "expert": 2}}


def best_of(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def write_model(path: Path) -> None:
    """A random model as transformers writes it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(path)


def sequences(count: int = SEQUENCES, length: int = LENGTH) -> list[list[int]]:
    """Random tokens, the same in every process."""
    generator = random.Random(0)
    return [[generator.randrange(SHAPE["vocab_size"]) for _ in range(length)] for _ in range(count)]


def config_of(model: Path, parallel: dict[str, int]) -> Any:
    """Actor with DIS and critic, both trained from the first step."""
    from megasao.config import Config

    return Config.model_validate(
        {
            "run": {"name": "speed"},
            "model": {"path": str(model)},
            "algorithm": {"objective": {"name": "dis", "eps_low": 0.8, "eps_high": 3.0}},
            "actor": {"optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-4}, "warmup_steps": 0, "updates_per_actor_update": 2},
            "loop": {"steps": 100},
            "parallel": parallel,
        }
    )


@contextmanager
def actor_of(model: Path, parallel: dict[str, int]) -> Iterator[tuple[Any, Any, Any]]:
    """(actor, config, topology) in a world of this layout."""
    import torch

    from megasao.megatron.runtime import initialize_world, set_layout, shutdown_world
    from megasao.training.actor import Actor

    torch.set_num_threads(1)
    config = config_of(model, parallel)
    initialize_world(600.0)
    topology = set_layout(config.parallel, seed=0)
    yield Actor.build(model, config, topology), config, topology
    shutdown_world()


def our_step(actor: Any, rows: list[Any], tokens: int) -> Callable[[], float]:
    """One forward, backward and optimizer step on these rows; its loss summed over this rank's rows."""
    from megasao.megatron.step import forward_backward

    def step() -> float:
        actor.optimizer.zero_grad()
        stats = forward_backward(actor.model, rows, lambda _, out: (-out.sum() / tokens, {"loss": -out.sum() / tokens}))
        actor.optimizer.step(1e-4)
        return float(sum(float(row["loss"]) for row in stats))

    return step


def transformers_step(path: Path, tokens: int) -> Callable[[], float]:
    """The same step with transformers and torch alone."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    ids = torch.tensor(sequences())

    def step() -> float:
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return step


def beside_transformers(model: Path, repeats: int) -> dict[str, float]:
    """Seconds of both steps, alternating. AssertionError if their first losses differ."""
    from megasao.megatron.rows import Row

    tokens = SEQUENCES * (LENGTH - 1)
    with actor_of(model, {"ranks": 1}) as (actor, _, _):
        ours = our_step(actor, [Row.from_sequences(sequences(), [1.0] * SEQUENCES)], tokens)
        theirs = transformers_step(model, tokens)
        first, other = ours(), theirs()
        assert abs(first - other) < 1e-4, f"not the same step: losses {first} and {other}"
        seconds = [(best_of(ours, 1), best_of(theirs, 1)) for _ in range(repeats)]
    return {"megasao": min(a for a, _ in seconds), "transformers": min(b for _, b in seconds)}


def under_layout(model: Path, layout: str, repeats: int) -> float:
    """Seconds of a step on all sequences, in rows of two, shared out over the data-parallel ranks."""
    from megasao.megatron.rows import Row

    with actor_of(model, LAYOUTS[layout]) as (actor, _, topology):
        mine = sequences()[topology.data_rank :: topology.data_size]
        rows = [Row.from_sequences(mine[i : i + 2], [1.0] * 2) for i in range(0, len(mine), 2)]
        return best_of(our_step(actor, rows, SEQUENCES * (LENGTH - 1)), repeats)


def long_tailed(count: int, padded: bool) -> list[Any]:
    """Trajectories of lognormal lengths (median 90, at most 1024); ``padded``: masked tokens up to the longest."""
    from megasao.trajectories.schema import Trajectory

    generator = random.Random(1)
    lengths = [min(1024, max(16, round(generator.lognormvariate(4.5, 0.9)))) for _ in range(count)]
    return [
        Trajectory(
            trajectory_id=f"t{number}",
            prompt_id=f"p{number}",
            group_id=f"p{number}",
            task="speed",
            tokens=[generator.randrange(SHAPE["vocab_size"]) for _ in range(size)],
            action_mask=[8 <= token < length for token in range(size)],
            rewards=[0.0] * (length - 1) + [float(number % 2)] + [0.0] * (size - length),
            weight_versions=[(0, 0)],
            turn_starts=[],
            finish_reason="done",
            rollout_logprobs=[-9.0 if 8 <= token < length else 0.0 for token in range(size)],
            temperature=1.0,
        )
        for number, length in enumerate(lengths)
        for size in (max(lengths) if padded else length,)
    ]


def whole_step(model: Path, padded: bool, repeats: int) -> dict[str, float]:
    """Seconds of a whole SAO step, and the share of it in Megatron's schedules and optimizer."""
    from megasao.megatron import step as megatron_step
    from megasao.megatron.bridge import export_hf
    from megasao.training.batch import pack_trajectories
    from megasao.training.critic import Critic
    from megasao.training.estimator import Estimator
    from megasao.training.step import sao_step

    inside = [0.0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            inside[0] += time.perf_counter() - start
            return result

        return run

    with actor_of(model, {"ranks": 1}) as (actor, config, topology):
        critic = Critic.build(model, config, topology)
        estimator = Estimator(config.algorithm, topology.all_reduce_data)
        schedule = megatron_step.get_forward_backward_func()
        megatron_step.get_forward_backward_func = lambda: counted(schedule)
        for role in (actor, critic):
            for method in ("step", "prepare_grads", "get_grad_norm"):
                setattr(role.optimizer.megatron, method, counted(getattr(role.optimizer.megatron, method)))
        found = []
        for number in range(repeats + 1):
            inside[0], start = 0.0, time.perf_counter()
            batch = pack_trajectories(long_tailed(32, padded), data_rank=0, data_size=1, token_budget=2048)
            sao_step(actor, critic, estimator, batch, step=number, config=config)
            export_hf(actor.model)
            seconds = time.perf_counter() - start
            found.append({"seconds": seconds, "share": inside[0] / seconds, "tokens": batch.tokens})
        return min(found[1:], key=lambda each: each["seconds"])


MEASUREMENTS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {
    "beside_transformers": (1, beside_transformers),
    "1 rank": (1, lambda model, repeats: under_layout(model, "1 rank", repeats)),
    "DP2": (2, lambda model, repeats: under_layout(model, "DP2", repeats)),
    "EP2": (2, lambda model, repeats: under_layout(model, "EP2", repeats)),
    "packed": (1, lambda model, repeats: whole_step(model, False, repeats)),
    "padded": (1, lambda model, repeats: whole_step(model, True, repeats)),
}


def report(found: dict[str, Any]) -> Iterator[str]:
    """A line for each question."""
    beside, packed, padded = found["beside_transformers"], found["packed"], found["padded"]
    yield (
        f"step of {SEQUENCES * LENGTH} tokens: {beside['megasao']:.3f} s, transformers {beside['transformers']:.3f} s: "
        f"{beside['transformers'] / beside['megasao']:.2f} of its speed"
    )
    for layout in ("DP2", "EP2"):
        yield (
            f"{layout}: {found[layout]:.3f} s, one rank {found['1 rank']:.3f} s: "
            f"{found['1 rank'] / found[layout]:.2f} times as fast"
        )
    yield (
        f"whole SAO step of {packed['tokens']} tokens: {packed['seconds']:.2f} s, "
        f"{packed['share']:.1%} of it in Megatron"
    )
    yield (
        f"padded to {padded['tokens']} tokens: {padded['seconds']:.2f} s, "
        f"{padded['seconds'] / packed['seconds']:.2f} times the packed step"
    )


def main() -> None:
    """One line a question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a model so small that its times say nothing")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        SHAPE.update(QUICK)
    if options.rank:
        model, name = options.rank
        print(json.dumps(MEASUREMENTS[name][1](Path(model), options.repeats)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        common = ["--repeats", str(options.repeats), *(["--quick"] if options.quick else [])]
        found = {
            name: run_ranks(__file__, ranks, ["--rank", directory, name, *common])[0]
            for name, (ranks, _) in MEASUREMENTS.items()
        }
    print("\n".join(report(found)))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
