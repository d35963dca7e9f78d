"""Blocks of FP8 on a CPU, in plain torch: SGLang loads and slices the weights, and here they are computed with.

SGLang's own CPU kernels need AMX, and reorder the weights for it. They multiply FP8 weights with activations as they
are, and so does this: a product of FP8 is that of its numbers times their scales, in the dtype of the activations.
Invariants, asserted by the tests:

- log-probabilities are those of the dequantised checkpoint;
- weights and scales stay as SGLang loaded them, so that it can load others into them.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_FP8 = "sglang.srt.layers.quantization.fp8"


def hooks() -> dict[str, Any]:
    """What replaces what in SGLang."""
    return {
        f"{_FP8}.Fp8Config.get_supported_act_dtypes": supported_dtypes,
        f"{_FP8}.Fp8LinearMethod.process_weights_after_loading": keep_weights,
        f"{_FP8}.Fp8LinearMethod.apply": apply_linear,
        f"{_FP8}.Fp8MoEMethod.process_weights_after_loading": keep_weights,
        f"{_FP8}.Fp8MoEMethod.apply": apply_experts,
        f"{_FP8}_utils.block_quant_to_tensor_quant": dequantized_and_one,
    }


def supported_dtypes(_: type) -> list[torch.dtype]:
    """Of activations: also float32, in which a server on a CPU computes."""
    return [torch.bfloat16, torch.half, torch.float32]


def keep_weights(self: Any, layer: torch.nn.Module) -> None:
    """Nothing is reordered. NotImplementedError for FP8 that is not in blocks."""
    if not self.block_quant:
        raise NotImplementedError("on a CPU FP8 is served in blocks only (megasao convert quantize makes them)")


def apply_linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times the weight [out, in]."""
    weight = dequantized(layer.weight, layer.weight_scale_inv, self.weight_block_size)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's own mixture in torch, over experts that are dequantised one after another."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    experts = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_Experts(layer.w13_weight, layer.w13_weight_scale_inv, self.weight_block_size, x.dtype),
        w2_weight=_Experts(layer.w2_weight, layer.w2_weight_scale_inv, self.weight_block_size, x.dtype),
    )
    output = moe_forward_native(experts, x, dispatch_output.topk_output, self.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


class _Experts:
    """Matrices by the number of an expert."""

    def __init__(self, weight: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype) -> None:
        self._weight, self._scale, self._block, self._dtype = weight, scale, block, dtype

    def __getitem__(self, expert: int) -> Tensor:
        return dequantized(self._weight[expert], self._scale[expert], self._block).to(self._dtype)


def dequantized_and_one(weight: Tensor, scale: Tensor, block: list[int]) -> tuple[Tensor, Tensor]:
    """For the matrix that latent attention absorbs: as on a GPU, not the second rounding that a CPU would get."""
    return dequantized(weight, scale, block).to(torch.get_default_dtype()), torch.ones(())


def dequantized(weight: Tensor, scale: Tensor, block: list[int]) -> Tensor:
    """float32 [rows, columns] of FP8 numbers and a scale for each block."""
    rows, columns = weight.shape
    by_row = scale.repeat_interleave(block[0], 0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]
