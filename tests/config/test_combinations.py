"""Impossible combinations are refused at load; their nearest possible neighbour is accepted."""

from pathlib import Path
from typing import Any

import pytest

from megasao.config.errors import ConfigError
from megasao.config.load import load_config
from megasao.config.model_check import check_model
from tests.checkpoints import write_checkpoint

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"
BASE = ["loop.steps=160", "sft.steps=800"]
TWO_SEGMENTS = ["environment.compaction.max_segments=2", "environment.compaction.summary_tokens=9"]
ROUTED = ["rollout.engine=sglang", "rollout.sglang.first_port=30000", "rollout.sglang.router=http://127.0.0.1:30100"]
APART = [*ROUTED, "rollout.sglang.servers=2", "rollout.sglang.prefill_servers=1"]
PREFILL = [*ROUTED, "rollout.sglang.prefill_servers=2"]

CASES = [
    (["loop.batch_size=1"], ["loop.batch_size=2"], "loop.batch_size", "critic cannot learn"),
    (["buffer.max_trajectories=63"], ["buffer.max_trajectories=64"], "loop.batch_size", "buffer.max_trajectories = 63"),
    (
        ["critic.warmup_steps=160"],
        ["critic.warmup_steps=159", "actor.optimizer.warmup_steps=0"],
        "critic.warmup_steps",
        "leave no step",
    ),
    (
        ["critic.optimizer.warmup_steps=160"],
        ["critic.optimizer.warmup_steps=159"],
        "critic.optimizer.warmup_steps",
        "peak",
    ),
    (
        ["actor.optimizer.warmup_steps=150"],
        ["actor.optimizer.warmup_steps=149"],
        "actor.optimizer.warmup_steps",
        "loop.steps - critic.warmup_steps = 150: the learning rate never reaches its peak",
    ),
    (
        ["actor.optimizer.warmup_steps=76", "actor.optimizer.decay_start=0.5"],
        ["actor.optimizer.warmup_steps=75", "actor.optimizer.decay_start=0.5"],
        "actor.optimizer.decay_start",
        "decay begins at step 75",
    ),
    (["sft.optimizer.warmup_steps=800"], ["sft.optimizer.warmup_steps=400"], "sft.optimizer.warmup_steps", "sft.steps"),
    (["sft.optimizer.warmup_steps=401"], ["sft.optimizer.warmup_steps=400"], "sft.optimizer.decay_start", "before the"),
    (
        ["environment.max_turn_tokens=111"],
        ["environment.max_turn_tokens=110"],
        "environment.max_turn_tokens",
        "episode",
    ),
    (
        [
            "environment.compaction.max_segments=4",
            "environment.compaction.summary_tokens=9",
            "trainer.token_budget=439",
        ],
        [
            "environment.compaction.max_segments=4",
            "environment.compaction.summary_tokens=9",
            "trainer.token_budget=440",
        ],
        "trainer.token_budget",
        "110 in 4 segments does not fit a packed row of 439 tokens; use a budget of at least 440",
    ),
    (
        ["environment.compaction.summary_tokens=56"],
        ["environment.compaction.summary_tokens=55"],
        "environment.compaction.summary_tokens",
        "more than half of environment.max_tokens = 110",
    ),
    (
        ["environment.compaction.summary_tokens=9", "environment.compaction.resume=go on"],
        ["environment.compaction.summary_tokens=9", "environment.compaction.resume=so {summary}"],
        "environment.compaction.resume",
        "expected {summary} in it",
    ),
    (
        ["environment.template_variables={tools: []}"],
        ["environment.template_variables={enable_thinking: false}"],
        "environment.template_variables.tools",
        "is set by megasao for every prompt",
    ),
    (
        ["evaluation.benchmarks=[gsm8k]", "benchmarks.max_tokens=111"],
        ["evaluation.benchmarks=[gsm8k]", "benchmarks.max_tokens=110"],
        "benchmarks.max_tokens",
        "more than the run's engines have room for",
    ),
    (
        ["evaluation.benchmarks=[gsm8k, gsm8k]", "benchmarks.max_tokens=110"],
        ["evaluation.benchmarks=[gsm8k, math500]", "benchmarks.max_tokens=110"],
        "evaluation.benchmarks",
        "the same name twice",
    ),
    (["trainer.token_budget=109"], ["trainer.token_budget=110"], "trainer.token_budget", "at least 110"),
    (["buffer.lease_timeout_s=59"], ["buffer.lease_timeout_s=60"], "buffer.lease_timeout_s", "episode_timeout_s"),
    (["rollout.weight_versions=never"], ["rollout.weight_versions=always"], "rollout.weight_versions", "use auto"),
    (["algorithm.entropy_bonus=-1"], ["algorithm.entropy_bonus=0.01"], "algorithm.entropy_bonus", "greater than"),
    (["loop.batch_timeout_s=59"], ["loop.batch_timeout_s=60"], "loop.batch_timeout_s", "episode_timeout_s"),
    (["transport.dead_after_s=3.9"], ["transport.dead_after_s=4"], "transport.dead_after_s", "heartbeat"),
    (["transport.host=0.0.0.0"], ["transport.host=0.0.0.0", "transport.curve=true"], "transport.host", "curve"),
    (["transport.host=10.0.0.1"], ["transport.host=127.0.0.2"], "transport.host", "curve"),
    (["transport.host=::1"], ["transport.host=localhost"], "transport.host", "IPv4"),
    (["transport.host='*'", "transport.curve=true"], ["transport.host=localhost"], "transport.host", "IPv4"),
    (
        ["transport.weights_timeout_s=60"],
        ["transport.weights_timeout_s=60", "parallel.timeout_s=180"],
        "transport.weights_timeout_s",
        "bound on a collective",
    ),
    (
        ["weights.directory=/shared"],
        ["weights.directory=/shared", "weights.transport=disk"],
        "weights.directory",
        "transport = disk",
    ),
    (
        ["weights.dtype=fp8_block"],
        ["weights.dtype=fp8_block", "rollout.engine=sglang"],
        "weights.dtype",
        "rollout.engine = embedded has no FP8",
    ),
    (
        ["weights.dtype=fp8_block", "rollout.engine=sglang", "weights.transport=stream"],
        ["weights.dtype=fp8_block", "rollout.engine=sglang", "weights.transport=disk"],
        "weights.dtype",
        "or set disk or distributed",
    ),
    (
        ["weights.dtype=fp8_block", "rollout.engine=sglang", "rollout.sglang.server_args={quantization: awq}"],
        ["weights.dtype=fp8_block", "rollout.engine=sglang", "rollout.sglang.server_args={quantization: fp8}"],
        "rollout.sglang.server_args.quantization",
        "does not go with weights.dtype = fp8_block",
    ),
    (
        ["weights.node_directory=shm", "weights.transport=distributed", "rollout.engine=sglang"],
        ["weights.node_directory=/shm", "weights.transport=distributed", "rollout.engine=sglang"],
        "weights.node_directory",
        "an absolute path",
    ),
    (
        ["weights.node_directory=/disk", "weights.transport=disk", "rollout.engine=sglang"],
        ["weights.node_directory=/disk", "weights.transport=distributed", "rollout.engine=sglang"],
        "weights.node_directory",
        "has no reader",
    ),
    (
        ["weights.carrier=gloo"],
        ["weights.carrier=gloo", "weights.transport=distributed"],
        "weights.carrier",
        "gloo carries weights.transport = distributed, and they travel by stream",
    ),
    (
        ["weights.transport=embedded", "rollout.engine=sglang"],
        ["weights.transport=embedded"],
        "weights.transport",
        "shares memory with the embedded engine",
    ),
    (["weights.bucket_bytes=1"], ["weights.bucket_bytes=4096"], "weights.bucket_bytes", "4096"),
    (["parallel.tensor=3"], ["parallel.tensor=2"], "parallel", "not a multiple"),
    (["parallel.expert=3"], ["parallel.expert=2"], "parallel", "not a multiple"),
    (["parallel.context=3"], ["parallel.context=2"], "parallel", "not a multiple"),
    (
        ["parallel.virtual_pipeline=2"],
        ["parallel.virtual_pipeline=2", "parallel.pipeline=2"],
        "parallel",
        "no meaning with pipeline = 1",
    ),
    (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layers=[1,3]"],
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        "parallel",
        "does not go with virtual_pipeline = 2",
    ),
    (
        ["parallel.pipeline=2", "parallel.pipeline_layers=[1,1,1]"],
        ["parallel.pipeline=2", "parallel.pipeline_layers=[1,2]"],
        "parallel",
        "one for each",
    ),
    (
        ["parallel.pipeline=2", "parallel.pipeline_layers=[2,0]"],
        ["parallel.pipeline=2", "parallel.pipeline_layers=[2,1]"],
        "parallel",
        "at least one layer",
    ),
    (["parallel.sequence=true"], ["parallel.sequence=true", "parallel.tensor=2"], "parallel", "no meaning"),
    (
        ["actor.router_replay=true", "trainer.recompute=selective", "megatron.model.recompute_modules=[moe]"],
        ["actor.router_replay=true", "trainer.recompute=selective", "megatron.model.recompute_modules=[core_attn]"],
        "megatron.model.recompute_modules",
        "without the row",
    ),
    (
        ["actor.router_replay=true", "rollout.engine=sglang", "rollout.sglang.server_args={pp_size: 2}"],
        ["actor.router_replay=true", "rollout.engine=sglang", "rollout.sglang.server_args={tp_size: 2}"],
        "rollout.sglang.server_args.pp_size",
        "last stage only",
    ),
    (
        ["buffer.payload=rollout", "loop.batch_timeout_s=190", "supervision.start_timeout_s=180"],
        ["buffer.payload=rollout", "loop.batch_timeout_s=300", "supervision.start_timeout_s=180"],
        "loop.batch_timeout_s",
        "may still come back",
    ),
    (
        ["buffer.payload=rollout", "transport.dead_after_s=100", "parallel.timeout_s=100", "parallel.ranks=2"],
        ["buffer.payload=rollout", "transport.dead_after_s=100", "parallel.timeout_s=101", "parallel.ranks=2"],
        "transport.dead_after_s",
        "raise that bound",
    ),
    (
        ["buffer.payload_directory=/disk"],
        ["buffer.payload_directory=/disk", "buffer.payload=rollout"],
        "buffer.payload_directory",
        "buffer.payload = controller",
    ),
    (
        ["buffer.payload_directory=disk", "buffer.payload=rollout"],
        ["buffer.payload_directory=/disk", "buffer.payload=rollout"],
        "buffer.payload_directory",
        "an absolute path",
    ),
    (
        ["actor.router_replay=true", "megatron.model.moe_router_fusion=true"],
        ["megatron.model.moe_router_fusion=true"],
        "megatron.model.moe_router_fusion",
        "cannot replay",
    ),
    (["rollout.temperature=0"], ["rollout.temperature=0.1"], "rollout.temperature", "greater than 0"),
    (
        ["rollout.sglang.server_args={tp_size: 2}"],
        ["rollout.sglang.server_args={tp_size: 2}", "rollout.engine=sglang"],
        "rollout.sglang.server_args",
        "rollout.engine = embedded",
    ),
    (
        ["rollout.engine=sglang", "rollout.sglang.server_args={port: 1234}"],
        ["rollout.engine=sglang", "rollout.sglang.first_port=1234"],
        "rollout.sglang.server_args.port",
        "set by megasao",
    ),
    (
        ["rollout.engine=sglang", "rollout.sglang.server_args={context_length: 125}"],
        ["rollout.engine=sglang", "rollout.sglang.server_args={context_length: 126}"],
        "rollout.sglang.server_args.context_length",
        "at least 126",
    ),
    (
        ["rollout.sglang.first_port=64999", "rollout.workers=300"],
        ["rollout.sglang.first_port=64999"],
        "rollout.sglang.first_port",
        "beyond 65535",
    ),
    (
        [*PREFILL, "rollout.sglang.first_port=65000", "rollout.sglang.servers=534"],
        [*PREFILL, "rollout.sglang.first_port=65000", "rollout.sglang.servers=533"],
        "rollout.sglang.first_port",
        "537 ports from 65000",
    ),
    (
        ["rollout.sglang.router=http://127.0.0.1:1", "rollout.sglang.first_port=30000"],
        [*ROUTED, "rollout.sglang.router=http://127.0.0.1:1"],
        "rollout.sglang.router",
        "rollout.engine = embedded",
    ),
    ([*ROUTED, "rollout.sglang.router=127.0.0.1:1"], ROUTED, "rollout.sglang.router", "http://HOST:PORT"),
    ([*ROUTED, "rollout.sglang.router=http://127.0.0.1:one"], ROUTED, "rollout.sglang.router", "http://HOST:PORT"),
    (
        [*ROUTED, "rollout.sglang.router=http://localhost:30001"],
        [*ROUTED, "rollout.sglang.router=http://localhost:30002"],
        "rollout.sglang.router",
        "port 30001 is one of 30000 to 30001",
    ),
    ([*ROUTED, "rollout.sglang.first_port=null"], ROUTED, "rollout.sglang.first_port", "must know its servers"),
    ([*ROUTED, "rollout.workers=2"], ROUTED, "rollout.workers", "servers of one worker"),
    ([*ROUTED, "rollout.sglang.pause=none"], ROUTED, "rollout.sglang.pause", "do not wait for an update"),
    (
        [*ROUTED, "rollout.sglang.servers=2", "rollout.sglang.prefill_servers=2"],
        [*ROUTED, "rollout.sglang.servers=3", "rollout.sglang.prefill_servers=2"],
        "rollout.sglang.prefill_servers",
        "no server that decodes",
    ),
    (
        ["rollout.engine=sglang", "rollout.sglang.servers=2", "rollout.sglang.prefill_servers=1"],
        [*ROUTED, "rollout.sglang.servers=2", "rollout.sglang.prefill_servers=1"],
        "rollout.sglang.prefill_servers",
        "set rollout.sglang.router",
    ),
    (
        [*APART, "rollout.sglang.server_args={disaggregation_transfer_backend: fake}"],
        [*APART, "rollout.sglang.server_args={disaggregation_transfer_backend: mooncake_tcp}"],
        "rollout.sglang.server_args.disaggregation_transfer_backend",
        "moves no keys and values",
    ),
    (
        ["algorithm.advantages.policy_lambda=1.1"],
        ["algorithm.advantages.policy_lambda=1"],
        "algorithm.advantages.policy_lambda",
        "less than or equal to 1",
    ),
    (
        ["plan.rollout_gpus=12"],
        ["plan.rollout_gpus=16"],
        "plan.rollout_gpus",
        "no whole number of engines of plan.engine_gpus = 8; use 8, say",
    ),
    (
        ["critic.parallel={ranks: 2}"],
        ["critic.parallel={ranks: 2}", "critic.placement=separate"],
        "critic.parallel",
        "set critic.placement to separate",
    ),
    (
        ["critic.token_budget=110"],
        ["critic.token_budget=110", "critic.placement=separate"],
        "critic.token_budget",
        "has no reader",
    ),
    (
        ["critic.token_budget=109", "critic.placement=separate"],
        ["critic.token_budget=110", "critic.placement=separate"],
        "critic.token_budget",
        "at least 110",
    ),
    (
        ["critic.token_budget=219", "critic.placement=separate", *TWO_SEGMENTS],
        ["critic.token_budget=220", "critic.placement=separate", *TWO_SEGMENTS],
        "critic.token_budget",
        "110 in 2 segments does not fit a row of 219 tokens; use a budget of at least 220",
    ),
]


@pytest.mark.parametrize(("wrong", "right", "path", "reason"), CASES, ids=[case[0][0] for case in CASES])
def test_combinations(wrong: list[str], right: list[str], path: str, reason: str) -> None:
    load_config(LAPTOP, BASE + right)
    with pytest.raises(ConfigError) as caught:
        load_config(LAPTOP, BASE + wrong)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert reason in problem.reason
    assert problem.where


def test_several_impossible_combinations_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(LAPTOP, ["loop.batch_size=1", "transport.host=0.0.0.0", "critic.warmup_steps=500"])
    assert {p.path for p in caught.value.problems} == {"loop.batch_size", "transport.host", "critic.warmup_steps"}


def test_weights_travel_by_disk_to_servers_and_in_buckets_to_the_embedded_engine() -> None:
    configs = LAPTOP.parent
    assert load_config(LAPTOP).weight_transport == "stream"
    assert load_config(LAPTOP, ["weights.transport=disk"]).weight_transport == "disk"
    assert load_config(configs / "laptop_sglang.yaml").weight_transport == "disk"
    assert load_config(configs / "laptop_sglang.yaml", ["weights.transport=stream"]).weight_transport == "stream"
    assert load_config(LAPTOP, ["weights.transport=distributed"]).weight_transport == "distributed"


# against the model's config.json


def model(tmp_path: Path, **changes: Any) -> str:
    write_checkpoint(tmp_path, **changes)
    return f"model.path={tmp_path}"


TP2 = ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=2")

SPARSE: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_experts": None,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_hidden_layers": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}
"""Layers 0, 1, 2 and 6 select; 3, 4, 5 and 7 share."""

MODEL_CASES: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["parallel.tensor=2", "parallel.expert_tensor=2"], "parallel.sequence"),
    ({}, ["parallel.tensor=2", "parallel.sequence=true"], "parallel.expert_tensor"),
    ({}, ["parallel.expert_tensor=2"], "parallel.expert_tensor"),
    ({}, ["parallel.pipeline=2", "parallel.pipeline_layers=[1,2]"], "parallel.pipeline_layers"),
    ({**SPARSE}, ["parallel.pipeline=2"], "parallel.pipeline"),
    ({**SPARSE}, ["parallel.pipeline=2", "parallel.pipeline_layers=[5,3]"], "parallel.pipeline_layers"),
    ({**SPARSE}, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"], "parallel.virtual_pipeline"),
    (
        {**SPARSE},
        ["parallel.context=2", "trainer.recompute=selective", "megatron.model.recompute_modules=[mla_up_proj]"],
        "megatron.model.recompute_modules",
    ),
    ({**SPARSE}, ["megatron.model.moe_router_bias_update_rate=0.1"], "megatron.model.moe_router_bias_update_rate"),
    ({**SPARSE, "index_topk": None}, [], "model.path"),
    ({**SPARSE, "norm_topk_prob": False}, [], "model.path"),
    ({"num_experts": "four"}, [], "model.path"),
    ({"num_hidden_layers": None}, [], "model.path"),
    ({"model_type": "gpt2"}, [], "model.path"),
    ({"num_key_value_heads": 1}, [*TP2], "parallel.tensor"),
    ({"num_hidden_layers": 3}, ["parallel.pipeline=2"], "parallel.pipeline"),
    (
        {"num_hidden_layers": 6},
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        "parallel.virtual_pipeline",
    ),
    ({"num_experts": 7}, ["parallel.expert=2"], "parallel.expert"),
    ({"moe_intermediate_size": 97}, [*TP2], "parallel.expert_tensor"),
    ({"num_experts": None}, ["parallel.expert=2"], "parallel.expert"),
    ({"num_experts": None}, ["actor.router_replay=true"], "actor.router_replay"),
    ({"num_experts": None, "intermediate_size": 97}, ["parallel.tensor=2"], "parallel.tensor"),
    ({"max_position_embeddings": 109}, [], "environment.max_tokens"),
]


@pytest.mark.parametrize(("changes", "overrides", "path"), MODEL_CASES)
def test_layouts_that_do_not_fit_the_model(
    tmp_path: Path, changes: dict[str, Any], overrides: list[str], path: str
) -> None:
    config = load_config(LAPTOP, [model(tmp_path, **changes), *overrides])
    with pytest.raises(ConfigError) as caught:
        check_model(config)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, []),
        ({}, [*TP2]),
        ({}, ["parallel.expert=2"]),
        ({}, ["parallel.pipeline=2"]),
        ({"tie_word_embeddings": True}, ["parallel.pipeline=2"]),
        ({"vocab_size": 33}, [*TP2]),
        ({}, ["parallel.context=2"]),
        ({}, ["megatron.model.moe_router_bias_update_rate=0.1"]),
        ({"num_hidden_layers": 4}, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
        ({"num_hidden_layers": 5}, ["parallel.pipeline=2", "parallel.pipeline_layers=[2,3]"]),
        ({**SPARSE}, ["parallel.pipeline=2", "parallel.pipeline_layers=[6,2]"]),
        ({**SPARSE}, ["parallel.context=2"]),
        ({**SPARSE}, ["trainer.recompute=selective", "megatron.model.recompute_modules=[mla_up_proj]"]),
    ],
)
def test_layouts_that_fit_the_model(tmp_path: Path, changes: dict[str, Any], overrides: list[str]) -> None:
    assert check_model(load_config(LAPTOP, [model(tmp_path, **changes), *overrides]))


CRITIC = ["critic.placement=separate", "critic.parallel.ranks=2"]


def test_the_critics_own_layout_fits_the_model(tmp_path: Path) -> None:
    """Its problems have its own path; those of the config as a whole are told once."""
    right = ["critic.parallel.tensor=2", "critic.parallel.sequence=true", "critic.parallel.expert_tensor=2"]
    assert check_model(load_config(LAPTOP, [model(tmp_path), *CRITIC, *right]))
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(LAPTOP, [model(tmp_path), *CRITIC, right[0], right[2]]))
    assert [problem.path for problem in caught.value.problems] == ["critic.parallel.sequence"]
    write_checkpoint(tmp_path, **{**SPARSE, "max_position_embeddings": 109})
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(LAPTOP, [f"model.path={tmp_path}", *CRITIC, "critic.parallel.context=2"]))
    assert [problem.path for problem in caught.value.problems] == ["environment.max_tokens"]


def test_what_the_critics_layout_alone_excludes_is_refused(tmp_path: Path) -> None:
    up_projection = ["trainer.recompute=selective", "megatron.model.recompute_modules=[mla_up_proj]"]
    config = [model(tmp_path, **SPARSE), *CRITIC, *up_projection]
    assert check_model(load_config(LAPTOP, config))
    with pytest.raises(ConfigError, match="in the critic's layout: mla_up_proj alone") as caught:
        check_model(load_config(LAPTOP, [*config, "critic.parallel.context=2"]))
    assert [problem.path for problem in caught.value.problems] == ["megatron.model.recompute_modules"]


def test_what_the_critics_ranks_read(tmp_path: Path) -> None:
    own = ["critic.parallel={ranks: 4, expert: 2}", "critic.token_budget=512", "trainer.recompute=full"]
    config = load_config(LAPTOP, ["critic.placement=separate", *own])
    assert config.critic_is_separate
    assert (config.of_critic.parallel.ranks, config.of_critic.parallel.expert) == (4, 2)
    assert (config.of_critic.trainer.token_budget, config.of_critic.trainer.recompute) == (512, "full")
    as_the_actor = load_config(LAPTOP, ["critic.placement=separate"])
    assert as_the_actor.of_critic == as_the_actor
    assert load_config(LAPTOP).of_critic is not None and not load_config(LAPTOP).critic_is_separate


def test_a_model_that_is_not_there_yet_is_not_an_error(tmp_path: Path) -> None:
    assert not check_model(load_config(LAPTOP, [f"model.path={tmp_path / 'absent'}"]))


def test_a_broken_checkpoint_directory(tmp_path: Path) -> None:
    config = load_config(LAPTOP, [model(tmp_path)])
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.json[\s\S]*safetensors"):
        check_model(config)
    write_checkpoint(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:9], b"not a header at all", whole + b"more"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            check_model(config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        check_model(config)
