"""Publishing on disk from real trainer worlds: the bytes of `megatron-to-hf`, a bucket of memory, nothing half done."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megasao.config.architecture import read_hf_config
from megasao.config.weights import WeightsConfig
from megasao.families.names import carried_names
from megasao.planning.plan import published_shares
from megasao.planning.tensors import model_tensors
from megasao.storage.hf_directory import checkpoint_files
from megasao.weights.shared import ShareTensors, bucket_sum, read_manifest
from tests.conversion.support import convert, write_family
from tests.megatron.tiny import make_config
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

BUCKET = 8192
JOBS: dict[str, dict[str, Any]] = {
    "TP2 PP2 EP2": {
        "family": "glm4_moe",
        "parallel": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
    },
    "TP2 ETP2 DP2, bfloat16": {
        "family": "qwen3_moe",
        "parallel": {"ranks": 4, "tensor": 2, "sequence": True, "expert_tensor": 2},
        "model": {"dtype": "bfloat16"},
    },
    "TP2 PP2, tied": {"family": "llama", "parallel": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2}},
    "TP2 PP2 EP2, sparse": {
        "family": "glm_moe_dsa",
        "parallel": {
            "ranks": 4,
            "tensor": 2,
            "sequence": True,
            "pipeline": 2,
            "pipeline_layers": [6, 2],
            "expert": 2,
        },
    },
    "shards turned round": {
        "family": "llama",
        "parallel": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2},
        "mistake": "order",
    },
}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in checkpoint_files(directory) for name, t in load_file(file).items()}


def shares_of(out: Path) -> dict[str, torch.Tensor]:
    """What a receiver makes of the four ranks' memory, checksums compared."""
    shares = []
    for rank in range(4):
        data = np.frombuffer((out / f"{rank}.share").read_bytes(), np.uint8).copy()
        manifest = read_manifest((out / f"{rank}.manifest").read_bytes(), data.size)
        each = manifest.layout.bucket_bytes
        assert manifest.sums == [bucket_sum(data[at : at + each]) for at in range(0, data.size, each)]
        shares.append((manifest, data))
    return dict(ShareTensors(shares))


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose dtype, shape or bits differ."""
    wrong = ours.keys() ^ theirs.keys()
    for name in ours.keys() & theirs.keys():
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name]):
            wrong.add(name)
    return sorted(wrong)


def test_what_is_published_is_what_a_conversion_writes(tmp_path: Path) -> None:
    jobs, vocabulary = [], {"vocab_size": 33}  # padded to 34 rows under TP2
    for number, job in enumerate(JOBS.values()):
        out = tmp_path / str(number)
        dtype = job.get("model", {}).get("dtype", "float32")
        source = write_family(out / "hf", job["family"], dtype, **vocabulary)
        jobs.append({**job, "path": str(source), "out": str(out), "bucket_bytes": BUCKET})
    results = run_world(4, "tests.weights.disk_cases:publish", {"jobs": jobs})
    for index, (name, job) in enumerate(zip(JOBS, jobs, strict=True)):
        source, out = Path(job["path"]), Path(job["out"])
        by_rank = [result[index] for result in results]
        assert convert("megatron-to-hf", out / "checkpoint", out / "back", "--model", source) == 0
        given_out = shares_of(out)
        carried = carried_names(read_hf_config(source))  # of multi-token prediction: not trained, not published
        published = tensors(Path(by_rank[0]["directory"][0]))
        wrong = different(published, {key: t for key, t in tensors(out / "back").items() if key not in carried})
        if "mistake" in job:
            assert len(wrong) > 8, "the comparison sees shards in the wrong order"
            assert len(different(given_out, tensors(out / "back"))) > 8, "also where they are put together late"
            continue
        assert wrong == [], name
        assert different(given_out, published) == [], f"{name}, from the memory of the ranks"
        total = sum(t.nbytes for t in published.values())
        written = [each["written"] for each in by_rank]
        assert sum(written) == total, "every tensor is written once"
        # A bucket; and gloo's own thread may let go of the one before a moment after the call has returned.
        assert max(each["peak"] for each in by_rank) <= 2 * BUCKET, name
        assert max(each["gathered_peak"] for each in by_rank) > 10 * BUCKET, "the measure sees a gather"
        stages = job["parallel"].get("pipeline", 1)
        if stages == 1:
            assert max(written) < 1.2 * total / 4, "replicas share the work"
            assert max(file.stat().st_size for file in out.glob("*.share")) < 1.2 * total / 4, "also in memory"
        assert min(written) > 0
        planned = [load for stage in planned_shares(source, job) for load in stage]
        assert written == pytest.approx(planned, abs=vocabulary["vocab_size"] * 64 * 4), name


def planned_shares(source: Path, job: dict[str, Any]) -> list[list[int]]:
    hf_config, config = read_hf_config(source), make_config(source, job["parallel"], job.get("model"))
    config = config.model_copy(update={"weights": WeightsConfig(**job.get("weights", {}))})
    return published_shares(hf_config, config, model_tensors("actor", hf_config, config))


def test_a_rank_that_cannot_write_ends_the_publication_everywhere(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "llama")
    payload = {"path": str(source), "out": str(tmp_path), "parallel": {"ranks": 2, "tensor": 2, "sequence": True}}
    for error, left, after, late in run_world(2, "tests.weights.disk_cases:cannot_write", payload):
        assert "rank 1 could not write weights to" in error and left == [] and after == ["000001"]
        assert "rank 0 could not write weights to" in late, "also what rank 0 does alone"
