"""A whole asynchronous run of a GLM-5.2-shaped model: latent attention in the engine as in the trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megasao.config.architecture import read_hf_config
from megasao.families.routing import Routing
from megasao.studies.tiny_model import write_tokenizer
from megasao.trajectories.journal import Journal
from tests.e2e import runs
from tests.megatron.tiny_families import SHORT_LATENT, write_tiny_family
from tests.training.router_margin import router_margins

pytestmark = pytest.mark.e2e
STEPS, NEAR_TIE = 5, 2e-6


def rows_of(run: runs.RunDirectory) -> list[dict[str, Any]]:
    names = ("tokens", "action_mask", "rollout_logprobs", "weight_versions", "routed_experts")
    columns = [[] for _ in names]  # type: list[list[Any]]
    for batch, _ in Journal(run.journal).recover():
        for column, name in zip(columns, names, strict=True):
            column += batch.column(name).to_pylist()
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def largest(rows: list[dict[str, Any]], model: Path, started_from: Path) -> tuple[float, int]:
    """Largest |engine - transformers at ``model``| of sampled tokens before a near-tie, and how many those are."""
    from transformers import AutoModelForCausalLM

    reference, found, tokens = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 0.0, 0
    for row in rows:
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(torch.tensor([row["tokens"]])).logits[0], -1)
        margins = router_margins(started_from, row["tokens"])
        for place, sampled in enumerate(row["action_mask"]):
            if sampled and margins[place] > NEAR_TIE:
                theirs = float(logprobs[place - 1, row["tokens"][place]])
                found, tokens = max(found, abs(theirs - row["rollout_logprobs"][place])), tokens + 1
    return found, tokens


def test_an_asynchronous_run_of_latent_attention(tmp_path: Path) -> None:
    """16 of up to 64 keys; experts replayed; new weights, by which running episodes are computed again."""
    model = write_tiny_family(tmp_path / "model", "glm_moe_dsa", index_topk=16, **SHORT_LATENT)
    write_tokenizer(model)
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        actor={"optimizer": {"lr": 1e-3}, "router_replay": True},
        loop={"steps": STEPS, "batch_size": 8, "max_lag": 1},
        rollout={"concurrency": 8, "embedded": {"slots": 8, "kv_after_update": "recompute"}},
        evaluation={"problems": 4, "every": 0, "sampled": False},
    )
    run = runs.train(config)
    runs.check_books(run, total_steps=STEPS)
    lines = runs.steps(run)
    assert [line["weight_version"] for line in lines] == list(range(STEPS))

    # Tokens of the step's own weights: the first trained step has no others. A near-tie may spoil a step or two.
    seen = [line["actor/current_log_ratio_abs_max"] for line in lines[1:]]
    seen = [each for each in seen if each is not None]
    assert seen and sorted(seen)[(len(seen) - 1) // 2] < 1e-5, seen

    rows = rows_of(run)
    versions = {version for row in rows for _, version in row["weight_versions"]}
    assert max(versions) >= STEPS - 3, "with a lag of one the last step cannot have older ones"
    first = [row for row in rows if [version for _, version in row["weight_versions"]] == [0]]
    off, tokens = largest(first, model, model)
    assert tokens > 20 and off < 1e-5
    assert largest(first, run.final_policy, model)[0] > 1e-2, "other weights are noticed"

    routing = Routing.of(read_hf_config(model))
    assert routing is not None and routing.layers == 3
    assert all(routing.decode(row["routed_experts"], len(row["tokens"])).any() for row in rows)
    before, after = (load_file(path / "model.safetensors") for path in (model, run.final_policy))
    assert before.keys() == after.keys()
    carried = [name for name in before if name.startswith("model.layers.4.")]
    assert carried and all(torch.equal(before[name], after[name]) for name in carried)
    moved = "model.layers.3.self_attn.kv_b_proj.weight"
    assert not torch.equal(before[moved], after[moved])
