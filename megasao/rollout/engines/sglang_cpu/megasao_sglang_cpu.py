"""SGLang plugin for CPUs: deterministic sampling, the record of routed experts, FP8 (``megasao_sglang_fp8``).

``torch_native`` attention computes every request by itself and reads the prefix cache like any other backend, so it may
be used with seeded sampling and with the radix cache; SGLang only does not list it. The batch-invariant operators are
written for accelerators: on CPU the operators of torch stay, whose results depend on the batch by fp32 rounding only.

SGLang records the experts of every token itself; only the memory that it keeps them in is allocated for a device's
copies, which there are none of here.

A server's scheduler and detokenizer are forked from its first process instead of spawned, which imports all of SGLang
once instead of three times.
"""

import logging
import multiprocessing
import os
from typing import Any

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in each of its processes, before it reads its arguments."""
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    if quantization := os.environ.get("MEGASAO_SGLANG_QUANTIZATION"):
        change_server(quantization)


def change_server(quantization: str) -> None:
    """Where a server runs; whoever only asks about arguments does not need the imports that this brings."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", keep_torch_operators, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register", plain_memory, HookType.REPLACE
    )
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_processes, HookType.AFTER)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", plain_indices, HookType.AFTER)
    if quantization == "fp8":
        import megasao_sglang_fp8

        for target, replacement in megasao_sglang_fp8.hooks().items():
            HookRegistry.register(target, replacement, HookType.REPLACE)


def fork_processes(*_: object, **__: object) -> None:
    """The other processes of a server begin with what this one has imported: without, that is most of their start.

    Where there is no accelerator nothing speaks against it, as long as this process has one thread yet.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads == 1:
        multiprocessing.set_start_method("fork", force=True)
    else:
        logger.warning("%d threads run before the server's processes start: they are spawned, not forked", threads)


def keep_torch_operators(*_: object, **__: object) -> None:
    """Instead of registering operators for an accelerator that is not there."""


def plain_indices(found: Any, *_: object, **__: object) -> None:
    """Of a class that sends keys and values to another server: it would pin its lists of pages for an accelerator."""
    if getattr(found, "supports_host_tensor_indices", False):
        found.supports_host_tensor_indices = False


def plain_memory(dims: tuple[int, ...], dtype: Any, device: str, *_: object, **__: object) -> Any:
    """An empty tensor, instead of one whose pages are registered with an accelerator."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)
