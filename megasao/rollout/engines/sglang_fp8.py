"""Which models SGLang can serve in blocks of FP8, split over how many ranks.

A matrix that SGLang puts together from several, or cuts, has the scales of whole blocks only: a block must not have
numbers of two of its parts.
"""

from collections.abc import Iterator

from megasao.config.sglang import SGLangConfig
from megasao.families import HfConfig, family_of
from megasao.families.facts import expert_count, head_dim, is_moe_layer

_BLOCK = 128


def fp8_problem(config: SGLangConfig, hf_config: HfConfig) -> str | None:
    """Why SGLang would not load the model of a config.json in blocks of FP8 with these arguments; None if it does."""
    for what, size, ranks in _parts(config, hf_config):
        if size % (ranks * _BLOCK):
            over = f" over {ranks} ranks" if ranks > 1 else ""
            return (
                f"weights.dtype = fp8_block: SGLang cannot split {what} = {size} into blocks of {_BLOCK}{over}; use "
                "other tp_size or ep_size, or weights.dtype = same"
            )
    return None


def _parts(config: SGLangConfig, hf_config: HfConfig) -> Iterator[tuple[str, int, int]]:
    """Sizes that blocks must fill on each rank: a name, the whole size, and over how many ranks it is cut."""
    tensor, expert = config.number("tp_size"), config.number("ep_size")
    attention = tensor // config.number("dp_size") if config.server_args.get("enable_dp_attention") else tensor
    heads = hf_config["num_attention_heads"]
    if family_of(hf_config).attention == "sparse_latent":
        yield "q_lora_rank", hf_config["q_lora_rank"], 1
        if attention > 1:
            nope, value = hf_config["qk_nope_head_dim"], hf_config["v_head_dim"]
            yield "rows of q_b_proj", heads * (nope + hf_config["qk_rope_head_dim"]), attention
            yield "rows of kv_b_proj", heads * (nope + value), attention
            yield "columns of o_proj", heads * value, attention
    else:
        groups = hf_config["num_key_value_heads"]
        yield "num_attention_heads * head_dim", heads * head_dim(hf_config), attention
        yield "num_key_value_heads * head_dim", groups * head_dim(hf_config), min(attention, groups)
    layers = range(hf_config["num_hidden_layers"])
    if not all(is_moe_layer(hf_config, layer) for layer in layers):
        yield "intermediate_size", hf_config["intermediate_size"], tensor
    if expert_count(hf_config):
        width = hf_config["moe_intermediate_size"]
        yield "moe_intermediate_size", width, tensor // expert
        shared = hf_config.get("n_shared_experts")
        if shared and not config.server_args.get("moe_a2a_backend"):  # with one, every rank has them whole
            yield "moe_intermediate_size of shared experts", shared * width, tensor
