"""SGLang plugin for CPUs: deterministic sampling, the record of routed experts, FP8 (``megasao_sglang_fp8``).

``torch_native`` attention computes every request by itself and reads the prefix cache like any other backend, so it may
be used with seeded sampling and with the radix cache; SGLang only does not list it. The batch-invariant operators are
written for accelerators: on CPU the operators of torch stay, whose results depend on the batch by fp32 rounding only.

SGLang records the experts of every token itself; only the memory that it keeps them in is allocated for a device's
copies, which there are none of here.
"""

import os
from typing import Any


def register() -> None:
    """Called by SGLang in each of its processes, before it reads its arguments."""
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", keep_torch_operators, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register", plain_memory, HookType.REPLACE
    )
    if os.environ.get("MEGASAO_SGLANG_QUANTIZATION") == "fp8":
        import megasao_sglang_fp8

        for target, replacement in megasao_sglang_fp8.hooks().items():
            HookRegistry.register(target, replacement, HookType.REPLACE)


def keep_torch_operators(*_: object, **__: object) -> None:
    """Instead of registering operators for an accelerator that is not there."""


def plain_memory(dims: tuple[int, ...], dtype: Any, device: str, *_: object, **__: object) -> Any:
    """An empty tensor, instead of one whose pages are registered with an accelerator."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)
