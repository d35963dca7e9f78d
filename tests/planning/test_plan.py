"""The plan: published numbers from the real model, shapes of real ranks, memory as measured, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from megasao.config import Config
from megasao.config.errors import ConfigError
from megasao.config.load import load_config
from megasao.config.training import TrainerConfig
from megasao.megatron.models import Role
from megasao.planning import Plan, make_plan
from megasao.planning.activations import Activations
from megasao.planning.memory import RoleMemory, stage_memory
from megasao.planning.report import describe_plan
from megasao.planning.tensors import model_tensors
from tests.megatron.tiny import make_config
from tests.megatron.tiny_families import write_tiny_family
from tests.megatron.world import run_world

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped configs name their architecture from the repository's root."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def glm() -> Plan:
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


def test_a_virtual_pipeline_is_not_planned() -> None:
    changes = ["parallel.ranks=8", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]
    with pytest.raises(ConfigError, match="plan with virtual_pipeline = 1"):
        make_plan(load_config(CONFIGS / "llama_3_2_3b.yaml", changes))


def test_the_report_says_it_all(glm: Plan) -> None:
    text = describe_plan(glm, load_config(CONFIGS / "glm_5_2_750b.yaml"))
    for part in (
        "743,377,000,704",
        "753,329,921,024",
        "41.251 B",
        "TP4 PP8 CP8",
        "distributed optimizer",
        "cannot be trained as it is: parallel.context: 8 is not supported",
        "16 (62-77)",
        "layers recomputed, 100% of the optimizer in host memory",
        "at the worst time: fits; 110.0 GiB of the host's memory a rank",
        "8 engines of 32",
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


def estimated(path: str, tokens: int, recompute: str) -> float:
    hf_config = architecture(path)
    config: Config = make_config(Path(path), {"ranks": 1})
    config = config.model_copy(update={"trainer": TrainerConfig(recompute=recompute)})
    row = Activations(hf_config, config, tokens)
    layers = range(hf_config["num_hidden_layers"])
    return row.kept(layers, last=True) + row.scratch(layers, last=True, head=True)
