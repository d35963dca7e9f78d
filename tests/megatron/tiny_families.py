"""A tiny checkpoint of every family, written by transformers, with weights large enough that every mistake shows."""

from copy import deepcopy
from pathlib import Path
from typing import Any

VOCABULARY = 32
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SIGMOID = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "qwen3": {**COMMON, "tie_word_embeddings": True, "rope_parameters": ROPE},
    "qwen3_moe": {
        **COMMON,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_parameters": ROPE,
    },
    "glm4_moe": {
        **COMMON,
        **SIGMOID,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    },
    "glm_moe_dsa": {
        **COMMON,
        **SIGMOID,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 6,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "first_k_dense_replace": 3,
        # transformers has 1e-6 in the norms of the latents, whatever the config says.
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
    },
}
SETTINGS["glm_moe_dsa"]["head_dim"] = 8
SHORT_LATENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
}
"""Changes of glm_moe_dsa: four layers, the first dense, the first and the third with an indexer."""


def write_tiny_family(directory: Path, family: str, *, seed: int = 0, mtp: bool = True, **changes: Any) -> Path:
    """Write a random model of the family to ``directory``; ``mtp`` adds tensors that transformers does not know."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, **deepcopy({**SETTINGS[family], **changes})
    )  # it writes into what it is given
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name and "weight" in name:
                tensor.copy_(1.0 + 0.3 * torch.randn_like(tensor))
            elif name.endswith(("bias", "e_score_correction_bias")):
                tensor.copy_(0.3 * torch.randn_like(tensor))
            elif "inv_freq" not in name:
                tensor.copy_(tensor.shape[-1] ** -0.5 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    if mtp and (carried := mtp_shapes(directory)):
        tensors = load_file(directory / "model.safetensors")
        tensors.update({name: torch.randn(shape) for name, shape in carried.items()})
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def mtp_shapes(directory: Path) -> dict[str, list[int]]:
    """Shapes of a multi-token-prediction layer: those of the last decoder layer, an indexer's, and its own."""
    from safetensors import safe_open

    from megasao.config.architecture import read_hf_config
    from megasao.families.names import carried_names

    hf_config = read_hf_config(directory)
    hidden, layer = hf_config["hidden_size"], f"model.layers.{hf_config['num_hidden_layers']}."
    own = {f"{norm}.weight": [hidden] for norm in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = [hidden, 2 * hidden]
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    result = {}
    for name in carried_names(hf_config):
        part = name.removeprefix(layer)
        last, first = (f"model.layers.{number}.{part}" for number in (hf_config["num_hidden_layers"] - 1, 0))
        result[name] = own[part] if part in own else shapes[last if last in shapes else first]
    return result
