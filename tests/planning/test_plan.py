"""The plan: published numbers from the real model, shapes of real ranks, memory as measured, and refusals."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megasao.config import Config
from megasao.config.errors import ConfigError
from megasao.config.load import load_config
from megasao.config.plan import PlanConfig
from megasao.config.training import TrainerConfig
from megasao.megatron.models import Role
from megasao.planning import Plan, make_plan
from megasao.planning.memory import RoleMemory, stage_memory
from megasao.planning.report import describe_plan
from megasao.planning.schedule import most_kept
from megasao.planning.tensors import ModelTensor, model_tensors
from megasao.weights.plan import weight_plan
from tests.megatron.tiny import make_config
from tests.megatron.tiny_families import write_tiny_family
from tests.megatron.world import run_world

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
BIAS = "megatron.model.moe_router_bias_update_rate=0.1"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped configs name their architecture from the repository's root."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """A model is built once for all plans that differ in its layout, rows or optimizer: GLM-5.2 alone takes seconds."""
    found: dict[tuple[Role, str, str], list[ModelTensor]] = {}

    def remembered(role: Role, hf_config: dict[str, Any], config: Config) -> list[ModelTensor]:
        exclude: Any = {"parallel": True, "trainer": True, "environment": True, "megatron": {"optimizer"}}
        key = (role, json.dumps(hf_config, sort_keys=True), config.model_dump_json(exclude=exclude))
        if key not in found:
            found[key] = model_tensors(role, hf_config, config)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megasao.planning.plan.model_tensors", remembered)
        yield


@pytest.fixture(scope="module")
def glm(built_once: None) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return make_plan(load_config(CONFIGS / "glm_5_2_750b.yaml"))


def billions(numbers: tuple[int, ...]) -> list[float]:
    return [round(number / 1e9, 3) for number in numbers]


def test_glm_5_2_has_the_published_sizes(glm: Plan) -> None:
    assert glm.sizes.total == 743_377_000_704
    assert glm.sizes.with_mtp == 753_329_921_024
    assert glm.sizes.routed == 724_775_731_200
    assert billions(glm.sizes.active) == [41.251, 40.299, 39.347]


@pytest.mark.parametrize(
    ("run", "total", "with_mtp", "active"),
    [
        ("qwen3_30b_a3b", 30_532_122_624, 0, [3.353, 3.042, 2.731]),
        ("glm_4_7_355b", 352_797_814_784, 3_988_069_632, [33.632, 32.856, 32.080]),
        ("qwen3_4b", 4_022_468_096, 0, None),
        ("llama_3_2_3b", 3_212_749_824, 0, None),
    ],
)
def test_published_sizes(run: str, total: int, with_mtp: int, active: list[float] | None) -> None:
    sizes = make_plan(load_config(CONFIGS / f"{run}.yaml")).sizes
    assert (sizes.total, sizes.with_mtp - sizes.total) == (total, with_mtp)
    if active is None:
        assert sizes.active[0] == total and sizes.routed == 0
    else:
        assert billions(sizes.active) == active


def test_glm_5_2_on_256_gpus(glm: Plan) -> None:
    """The published split of layers: both models fit with Adam in host memory, and every parameter is somewhere."""
    assert [len(stage.layers) for stage in glm.stages] == [14, 8, 8, 8, 8, 8, 8, 16]
    assert glm.fits and all(memory.optimizer == 0 for stage in glm.stages for memory in stage.roles.values())
    here = make_plan(load_config(CONFIGS / "glm_5_2_750b.yaml", ["megatron.optimizer.optimizer_cpu_offload=false"]))
    assert not here.fits
    for stage, with_adam in zip(glm.stages, here.stages, strict=True):
        assert all(stage.roles[role].host == with_adam.roles[role].optimizer > 0 for role in ("actor", "critic"))
    assert glm.transfer is not None and glm.transfer.total == pytest.approx(2 * glm.sizes.total, rel=1e-6)
    # Everything is written by the stage that has it, and no rank has more than its part and one tensor (the embedding).
    assert [len(loads) for loads in glm.transfer.shares] == [32] * 8
    embedding = 2 * 154_880 * 6144
    assert all(max(loads) <= sum(loads) / 32 + embedding for loads in glm.transfer.shares)
    assert all(min(loads) > 0 for loads in glm.transfer.shares)
    # Experts are on 32 ranks of a stage once; each of 4 tensor-parallel ranks has a fourth of most else.
    fullest = max(stage.roles["actor"].parameters for stage in glm.stages)
    assert fullest == pytest.approx(glm.sizes.total / 256 * 16 / (78 / 8) * 1.3, rel=0.05)


def test_a_larger_layout_of_glm_5_2_has_room() -> None:
    plan = make_plan(load_config(CONFIGS / "glm_5_2_750b.yaml", [str(CONFIGS / "layouts" / "glm_5_2_750b_1280.yaml")]))
    assert plan.fits and {len(stage.layers) for stage in plan.stages} == {6, 8}
    assert plan.untrainable == ()


def test_an_even_split_of_glm_5_2_is_refused() -> None:
    config = load_config(CONFIGS / "glm_5_2_750b.yaml", ["parallel.pipeline_layers=[10,10,10,10,10,10,10,8]"])
    with pytest.raises(ConfigError) as caught:
        make_plan(config)
    reasons = [problem.reason for problem in caught.value.problems]
    assert len(reasons) == 3 and "starts on layer 20 (from 0)" in reasons[0] and "18 or 22" in reasons[0]
    with pytest.raises(ConfigError, match="78 layers cannot be split evenly"):
        make_plan(load_config(CONFIGS / "glm_5_2_750b.yaml", ["parallel.pipeline_layers=null"]))


def test_splits_of_rows_and_of_optimizer_state_are_counted() -> None:
    def stage(*changes: str) -> RoleMemory:
        shared = ["parallel.ranks=32", "parallel.tensor=1", "parallel.sequence=false", *changes]
        return make_plan(load_config(CONFIGS / "llama_3_2_3b.yaml", shared)).stages[0].roles["actor"]

    plain, context = stage(), stage("parallel.context=4")
    split, both = (stage("parallel.distributed_optimizer=true", *more) for more in ((), ("parallel.context=4",)))
    assert plain.optimizer == context.optimizer == pytest.approx(32 * split.optimizer)
    assert both.optimizer == split.optimizer and both.weights == plain.weights
    # Keys and values of the whole row are on every rank.
    assert plain.activations / 4 < context.activations < plain.activations / 2


def test_a_critic_in_a_world_of_its_own_has_its_own_stages() -> None:
    """There alone it needs what it needs beside the actor, in its own layout; and the actor's ranks are free of it."""
    name, own = "llama_3_2_3b", ["critic.placement=separate", "critic.parallel={ranks: 4, pipeline: 4}"]
    together, apart = (
        make_plan(load_config(CONFIGS / f"{name}.yaml")),
        make_plan(load_config(CONFIGS / f"{name}.yaml", own)),
    )
    assert not together.critic_stages and [len(stage.layers) for stage in apart.critic_stages] == [7] * 4
    assert [list(stage.roles) for stage in apart.stages] == [["actor"]] * len(together.stages)
    for shared, alone in zip(together.stages, apart.stages, strict=True):
        assert alone.roles["actor"] == shared.roles["actor"] and alone.peak < shared.peak
    as_the_actor = make_plan(load_config(CONFIGS / f"{name}.yaml", own[:1]))
    assert [stage.roles for stage in as_the_actor.critic_stages] == [
        {"critic": stage.roles["critic"]} for stage in together.stages
    ]
    text = describe_plan(apart, load_config(CONFIGS / f"{name}.yaml", own))
    assert "the critic, in a world of its own:\n4 ranks: TP1 PP4" in text and text.count("at the worst time") == 5
    tight = make_plan(load_config(CONFIGS / f"{name}.yaml", [*own, "critic.token_budget=200000"]))
    assert apart.fits and not tight.fits, "the critic's rows alone are too long"
    with pytest.raises(ConfigError, match=r"critic\.parallel\.pipeline"):
        make_plan(load_config(CONFIGS / f"{name}.yaml", [own[0], "critic.parallel={ranks: 3, pipeline: 3}"]))


def test_a_virtual_pipeline_is_planned() -> None:
    """Its chunks hold the same weights, and more is under way; chunks that start on a sharing layer are refused."""
    changes = ["parallel.ranks=8", "parallel.pipeline=2"]
    plain, interleaved = (
        make_plan(load_config(CONFIGS / "llama_3_2_3b.yaml", [*changes, f"parallel.virtual_pipeline={chunks}"]))
        for chunks in (1, 7)
    )
    assert interleaved.stages[1].chunks == [range(start, start + 2) for start in range(2, 28, 4)]
    assert sum(len(stage.layers) for stage in interleaved.stages) == 28
    for ours, theirs in zip(interleaved.stages, plain.stages, strict=True):
        assert ours.roles["actor"].weights == theirs.roles["actor"].weights
        assert ours.roles["actor"].activations > theirs.roles["actor"].activations
    assert interleaved.transfer == plain.transfer
    config = load_config(CONFIGS / "llama_3_2_3b.yaml", [*changes, "parallel.virtual_pipeline=7"])
    text = describe_plan(interleaved, config)
    assert "PP2 VPP7" in text and "14 (2-3, 6-7, 10-11," in text
    for chunks, reason in ((3, "6 model chunks"), (13, "starts on layer 3 (from 0)")):
        shared = ["parallel.pipeline=2", f"parallel.virtual_pipeline={chunks}", "parallel.pipeline_layers=null"]
        run = "llama_3_2_3b" if chunks == 3 else "glm_5_2_750b"
        with pytest.raises(ConfigError, match=re.escape(reason)):
            make_plan(load_config(CONFIGS / f"{run}.yaml", shared))


def test_in_fp8_products_take_a_byte_and_their_scales() -> None:
    """Qwen3-4B: everything but the embedding and norms is products, of whole blocks of 128 x 128."""
    changes = ["weights.dtype=fp8_block", "rollout.engine=sglang"]
    config = load_config(CONFIGS / "qwen3_4b.yaml", changes)
    plan = make_plan(config)
    kept = 151_936 * 2560 + 36 * (2 * 2560 + 2 * 128) + 2560
    products = plan.sizes.total - kept
    assert plan.transfer is not None and plan.transfer.total == 2 * kept + products + 4 * products // 128**2
    text = describe_plan(plan, config)
    assert "GB, in blocks of FP8" in text and "stream" not in text
    assert "stream" in describe_plan(plan, load_config(CONFIGS / "qwen3_4b.yaml"))


def test_what_cannot_be_trained_is_planned_and_said() -> None:
    config = load_config(CONFIGS / "integration" / "glm_5_2_750b.yaml", [BIAS])
    assert f"cannot be trained as it is: {BIAS.split('=')[0]}" in describe_plan(make_plan(config), config)


def test_seconds_follow_from_bytes_and_speeds() -> None:
    assumed = PlanConfig(
        rollout_gpus=32,
        engine_gpus=16,
        node_gpus=8,
        link_gb_per_s=2.0,
        storage_gb_per_s=10.0,
        checksum_gb_per_s=4.0,
        host_gb_per_s=3.0,
        fetch_gb_per_s=4.0,
        node_storage_gb_per_s=8.0,
    )
    gigabytes = [[30, 10], [20, 20]]
    plan = weight_plan([[each * 10**9 for each in stage] for stage in gigabytes], assumed, workers=3)
    stream, disk, distributed = plan.routes
    assert plan.total == 80 * 10**9
    assert stream.phases == {"gather": 25.0, "send": 120.0, "check": 20.0, "load": 32.0}
    assert disk.phases == {"write": 15.0, "check": 24.0, "load": 32.0}
    assert distributed.phases == {"copy": 10.0, "fetch": 60.0, "write": 10.0, "load": 10.0}, (
        "four nodes ask the fullest"
    )
    slower = weight_plan(plan.shares, assumed.model_copy(update={"fetch_gb_per_s": 1.0}), 3)
    assert slower.routes[2].phases["fetch"] == 80.0, "now what one node can take"
    faster = weight_plan(plan.shares, assumed.model_copy(update={"storage_gb_per_s": 1000.0}), 3)
    assert faster.routes[1].phases == {"write": 15.0, "check": 20.0, "load": 5.0}, "now links and checksums are slower"


def test_the_report_says_it_all(glm: Plan) -> None:
    assert glm.untrainable == ()
    text = describe_plan(glm, load_config(CONFIGS / "glm_5_2_750b.yaml", ["weights.transport=disk"]))
    for part in (
        "743,377,000,704",
        "753,329,921,024",
        "41.251 B",
        "TP4 PP8 CP8",
        "distributed optimizer",
        "16 (62-77)",
        "layers recomputed, 100% of the optimizer in host memory",
        "at the worst time: fits; 110.0 GiB of the host's memory a rank",
        "8 engines of 32",
        "stage 1: 32 ranks write 157.9 GB, 4.90 to 5.03 GB each",
        "100 GB/s of the shared storage",
        "disk (weights.transport): about",
        "distributed: about",
        "trainer rank 0 and every worker hold all of it",
    ):
        assert part in text, part


def test_a_model_that_is_not_at_hand_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture"):
        make_plan(load_config(CONFIGS / "laptop.yaml", [f"model.path={tmp_path}"]))


LAYOUT = {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2},
    "glm4_moe": LAYOUT,
    "glm_moe_dsa": LAYOUT | {"pipeline_layers": [6, 2]},
}


@pytest.mark.world
def test_ranks_have_what_the_plan_says(tmp_path: Path) -> None:
    jobs = [
        {"path": str(write_tiny_family(tmp_path / family, family)), "parallel": layout, "role": role}
        for family, layout in FAMILIES.items()
        for role in ("actor", "critic")
    ]
    results = run_world(4, "tests.megatron.family_cases:rank_elements", {"jobs": jobs})
    for index, job in enumerate(jobs):
        hf_config, config = architecture(job["path"]), make_config(Path(job["path"]), job["parallel"])
        role: Role = job["role"]
        tensors = model_tensors(role, hf_config, config)
        expected = [stage_memory(role, hf_config, config, tensors, stage).parameters for stage in range(2)]
        for stage, elements in (result[index] for result in results):
            assert elements == expected[stage], job


def architecture(path: str) -> dict[str, Any]:
    hf_config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return hf_config


LARGE: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"v_head_dim": 24}}
"""As wide as its keys, which GLM-5.2's values are too: the fused attention of torch needs that."""


@pytest.mark.world
def test_activations_are_as_measured(tmp_path: Path) -> None:
    """Peak of a training step at three sizes, within 15 %; twice the tokens would not pass. Also with recomputation."""
    sizes, families = (256, 1024, 2048), ("llama", "glm4_moe", "glm_moe_dsa")
    paths = {
        family: str(write_tiny_family(tmp_path / family, family, **LARGE.get(family, {}), max_position_embeddings=4096))
        for family in families
    }
    kinds = [(family, tokens, "none") for family in families for tokens in sizes]
    kinds += [(family, 2048, "full") for family in families]
    jobs = [{"path": paths[family], "tokens": tokens, "recompute": recompute} for family, tokens, recompute in kinds]
    [peaks] = run_world(1, "tests.megatron.family_cases:training_peaks", {"jobs": jobs})
    for job, peak in zip(jobs, peaks, strict=True):
        assert abs(estimated(**job) / peak - 1) < 0.15, job
        assert abs(estimated(**{**job, "tokens": 2 * job["tokens"]}) / peak - 1) > 0.5, job


def estimated(path: str, tokens: int, recompute: str, stage: int = 0, parallel: Any = None, rows: int = 1) -> float:
    """Bytes at the worst time, of enough rows."""
    config: Config = make_config(Path(path), parallel or {"ranks": 1})
    config = config.model_copy(update={"trainer": TrainerConfig(token_budget=tokens, recompute=recompute)})
    return stage_memory("actor", architecture(path), config, [], stage).working


@pytest.mark.world
def test_activations_of_split_rows_and_layers_are_as_measured(tmp_path: Path) -> None:
    """Within 15 % on the fullest rank of each stage, of rows under context parallelism and of eight in a pipeline."""
    paths = {
        family: str(write_tiny_family(tmp_path / family, family, **LARGE.get(family, {}), max_position_embeddings=4096))
        for family in ("glm4_moe", "glm_moe_dsa")
    }
    context, pipeline = {"ranks": 2, "context": 2}, {"ranks": 2, "pipeline": 2}
    interleaved = pipeline | {"virtual_pipeline": 2}
    kinds: list[tuple[str, Any, int, str, int]] = [
        ("glm4_moe", context, 2048, "none", 1),
        ("glm_moe_dsa", context, 1024, "none", 1),
        ("glm_moe_dsa", context, 2048, "none", 1),
        ("glm_moe_dsa", context, 2048, "full", 1),
        ("glm4_moe", pipeline, 512, "none", 8),
        ("glm4_moe", interleaved, 512, "none", 8),
    ]
    names = ("parallel", "tokens", "recompute", "rows")
    jobs = [{"path": paths[family], **dict(zip(names, kind, strict=True))} for family, *kind in kinds]
    by_rank = run_world(2, "tests.megatron.family_cases:training_peaks", {"jobs": jobs})
    for job, *peaks in zip(jobs, *by_rank, strict=True):
        stages = peaks if job["rows"] > 1 else [max(peaks)]
        for stage, peak in enumerate(stages):
            print(job["parallel"], job["tokens"], job["recompute"], stage, estimated(**job, stage=stage) / peak)
            assert abs(estimated(**job, stage=stage) / peak - 1) < 0.15, (job, stage)
            assert estimated(**{**job, "tokens": job["tokens"] // 2}, stage=stage) / peak < 0.7, (job, stage)
            if job["parallel"] == interleaved:
                plain = estimated(**{**job, "parallel": pipeline}, stage=stage)
                assert abs(plain / peak - 1) > 0.15, "the plain schedule keeps less"


@pytest.mark.parametrize(
    ("kept", "stages", "expected"),
    [
        ([1.0], 4, [4.0, 3.0, 2.0, 1.0]),
        ([1.0, 1.0], 2, [5.0, 3.0]),
        ([1.0, 1.0, 1.0], 4, [15.0, 13.0, 11.0, 9.0]),
        ([3.0, 1.0], 2, [13.0, 9.0]),
    ],
)
def test_what_a_stage_keeps_by_its_schedule(kept: list[float], stages: int, expected: list[float]) -> None:
    assert [most_kept(kept, stage, stages) for stage in range(stages)] == expected
