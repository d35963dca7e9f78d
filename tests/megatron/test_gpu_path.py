"""What can be said without a GPU of the path that needs one: names are the same, and what is not there is refused."""

from pathlib import Path

import pytest
import torch

from megasao.config.load import load_config
from megasao.config.model import ModelConfig, ParallelConfig
from megasao.megatron.bridge.table import global_name
from megasao.megatron.models import make_transformer_config
from megasao.megatron.options import passed_on

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"

HF_CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("grouped", "one_by_one"),
    [
        ("mlp.experts.linear_fc1.weight3", "mlp.experts.local_experts.3.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight12", "mlp.experts.local_experts.12.linear_fc2.weight"),
    ],
)
def test_grouped_experts_have_the_names_of_single_ones(grouped: str, one_by_one: str) -> None:
    names = {
        global_name(f"decoder.layers.0.{name}", layer_offset=2, expert_offset=16) for name in (grouped, one_by_one)
    }
    [name] = names
    assert name.startswith("decoder.layers.2.") and f"local_experts.{int(one_by_one.split('.')[3]) + 16}." in name


@pytest.mark.parametrize("name", ["mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight", "mlp.router.weight"])
def test_other_names_stay(name: str) -> None:
    assert global_name(f"decoder.layers.1.{name}", layer_offset=0, expert_offset=8) == f"decoder.layers.1.{name}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_is_refused_or_off() -> None:
    model = ModelConfig(path="none")
    config = make_transformer_config(HF_CONFIG, model, ParallelConfig(ranks=2, expert=2))
    assert not config.moe_grouped_gemm and not config.gradient_accumulation_fusion
    with pytest.raises(ValueError, match="dispatcher = flex needs CUDA and the package deep_ep; use alltoall"):
        make_transformer_config(HF_CONFIG, model, ParallelConfig(ranks=2, expert=2, dispatcher="flex"))


def test_offloaded_optimizer_state_is_megatrons_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    config = load_config(LAPTOP, [f"megatron.optimizer.{name}={str(value).lower()}" for name, value in offload.items()])
    with pytest.raises(ValueError, match="optimizer_cpu_offload = True needs CUDA"):
        passed_on("optimizer", config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert passed_on("optimizer", config) == offload
