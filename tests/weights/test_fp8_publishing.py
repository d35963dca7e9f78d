"""Publishing in blocks of FP8: the bytes of `megatron-to-hf` and then `quantize`, wherever shards are cut.

No size is a multiple of 128, so that every block at a cut has numbers of two ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megasao.config.architecture import read_hf_config
from megasao.families.names import SCALE, carried_names, published_names
from megasao.storage.hf_directory import checkpoint_files
from tests.conversion.support import convert, write_family
from tests.megatron.world import run_world
from tests.weights.test_disk_publishing import planned_shares, shares_of

pytestmark = pytest.mark.world

BUCKET = 65536
SIZES = {"vocab_size": 33, "hidden_size": 200, "intermediate_size": 268, "moe_intermediate_size": 148, "head_dim": 36}
TP2_PP2_EP2 = {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}
JOBS: dict[str, dict[str, Any]] = {
    "TP2 PP2 EP2": {
        "family": "glm4_moe",
        "parallel": TP2_PP2_EP2,
        "sizes": {"num_hidden_layers": 2},
        "model": {"dtype": "bfloat16"},
    },
    "TP2 ETP2 DP2": {
        "family": "qwen3_moe",
        "parallel": {"ranks": 4, "tensor": 2, "sequence": True, "expert_tensor": 2},
        "sizes": {"num_hidden_layers": 2},
    },
    "TP2 PP2 EP2, sparse": {
        "family": "glm_moe_dsa",
        "parallel": {**TP2_PP2_EP2, "pipeline_layers": [6, 2]},
        "sizes": {"head_dim": 8, "q_lora_rank": 132, "kv_lora_rank": 140, "n_routed_experts": 4},
    },
    **{
        f"mistake: {mistake}": {
            "family": "llama",
            "parallel": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2},
            "sizes": {"num_hidden_layers": 2},
            "mistake": mistake,
        }
        for mistake in ("blocks", "alone")
    },
}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in checkpoint_files(directory) for name, t in load_file(file).items()}


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose dtype, shape or bytes differ."""
    wrong = ours.keys() ^ theirs.keys()
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not same or not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            wrong.add(name)
    return sorted(wrong)


def test_what_is_published_is_what_two_conversions_write(tmp_path: Path) -> None:
    jobs = []
    for number, job in enumerate(JOBS.values()):
        out = tmp_path / str(number)
        source = write_family(
            out / "hf", job["family"], job.get("model", {}).get("dtype", "float32"), **{**SIZES, **job["sizes"]}
        )
        weights = {"dtype": "fp8_block"}
        jobs.append({**job, "path": str(source), "out": str(out), "bucket_bytes": BUCKET, "weights": weights})
    results = run_world(4, "tests.weights.disk_cases:publish", {"jobs": jobs})
    for index, (name, job) in enumerate(zip(JOBS, jobs, strict=True)):
        source, out = Path(job["path"]), Path(job["out"])
        by_rank = [result[index] for result in results]
        assert convert("megatron-to-hf", out / "checkpoint", out / "back", "--model", source) == 0
        assert convert("quantize", out / "back", out / "fp8") == 0
        hf_config = read_hf_config(source)
        carried = carried_names(hf_config)  # of multi-token prediction: not trained, not published
        carried |= {name + SCALE for name in carried}
        expected = {key: t for key, t in tensors(out / "fp8").items() if key not in carried}
        assert expected.keys() == published_names(hf_config, "actor", fp8=True)
        published, given_out = tensors(Path(by_rank[0]["directory"][0])), shares_of(out)
        wrong = different(published, expected)
        if "mistake" in job:
            assert min(len(wrong), len(different(given_out, expected))) > 8, f"the comparison does not see {name}"
            continue
        assert wrong == [], name
        assert different(given_out, expected) == [], f"{name}, from the memory of the ranks"
        written = [each["written"] for each in by_rank]
        assert sum(written) == sum(t.nbytes for t in published.values()), "every tensor is written once"
        # A bucket; and gloo's own thread may let go of the one before a moment after the call has returned.
        assert max(each["peak"] for each in by_rank) <= 2 * BUCKET, name
        assert max(each["gathered_peak"] for each in by_rank) > 10 * BUCKET, "the measure sees a gather"
        planned = [load for stage in planned_shares(source, job) for load in stage]
        assert written == pytest.approx(planned, abs=SIZES["vocab_size"] * SIZES["hidden_size"] * 4), name


def test_what_fp8_cannot_hold_ends_the_publication_everywhere(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "llama", **{**SIZES, "num_hidden_layers": 2})
    payload = {"path": str(source), "out": str(tmp_path), "parallel": {"ranks": 2, "tensor": 2, "sequence": True}}
    for error, left, after in run_world(2, "tests.weights.disk_cases:not_finite", payload):
        assert "could not write weights to" in error and left == [] and after == ["000001"]
        assert "model.layers.1.mlp.down_proj.weight has numbers that are infinite or NaN" in error
