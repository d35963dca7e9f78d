"""Lets unmodified Megatron-Core run on CPU with gloo. The only place that patches anything.

Invariants (tests assert them):

- :func:`install` refuses where CUDA is present: there, nothing is patched.
- It is idempotent, and runs before the first import of ``megatron.core``.
- It replaces names; no file of Megatron-Core or torch is changed.

Each section says which assumption of Megatron-Core it answers.
"""

import contextlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

_installed = False

_CUDA_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
_MODULES_WITH_CUDA_FACTORIES = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.utils",
)


def install() -> None:
    """Patch torch and Megatron-Core for CPU; once per process, before ``megatron.core`` is imported."""
    global _installed
    assert not torch.cuda.is_available(), "the CPU shim must stay out of the way where CUDA is present"
    if _installed:
        return
    assert "megatron.core" not in sys.modules, "cpu.install() must run before the first import of megatron.core"
    _silence_expected_warnings()
    _replace_device_queries()
    _replace_tensor_methods()
    _replace_streams()
    _replace_triton_kernels()
    _import_without_compiler()
    _replace_host_copies()
    _replace_uneven_collectives()
    _replace_random_state()
    _redirect_factories()
    _disable_transformer_engine_gemm()
    _installed = True


# --- warnings ---------------------------------------------------------------------------------------------------------


def _silence_expected_warnings() -> None:
    """Modules of Megatron-Core say at import that Apex is absent, some long after ``install``: so it is on any CPU.
    Every configuration of a model says of its own default for CUDA graphs that it is deprecated.
    """
    warnings.filterwarnings("ignore", message="Apex is not installed", category=UserWarning)
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)


# --- the current device -----------------------------------------------------------------------------------------------


def _replace_device_queries() -> None:
    """Buffers are made on ``torch.cuda.current_device()``, and pipeline communication synchronises the device."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None


def _replace_tensor_methods() -> None:
    """``tensor.cuda()`` moves nothing here; the optimizer recognises parameters by ``torch.cuda.*`` type names."""
    type_of = torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if args or kwargs or not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
            return result
        return str(result).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]


# --- streams ----------------------------------------------------------------------------------------------------------


class _Stream:
    """The one stream that everything runs on here, also its own event: always up to date."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> "_Stream":
        """The event is this stream."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _replace_streams() -> None:
    """The token dispatcher copies its split sizes to the host on a side stream."""
    only = _Stream()
    torch.cuda.Stream = _Stream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda device=None: only  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]


def _replace_host_copies() -> None:
    """Split sizes become host arrays only where they are CUDA tensors; the collectives want arrays in any case."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


# --- Triton -----------------------------------------------------------------------------------------------------------


def _replace_triton_kernels() -> None:
    """Megatron-Core 0.19 imports one module of Triton kernels unasked; torch's CPU builds come without Triton."""
    if importlib.util.find_spec("triton") is None:
        kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
        kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
        sys.modules[kernels.__name__] = kernels


# --- compilation ------------------------------------------------------------------------------------------------------


def _import_without_compiler() -> None:
    """``jit_fuser`` is bound to ``torch.compile`` at import: compiling needs a C++ compiler, and minutes."""

    def identity(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else identity

    compile_ = torch.compile
    torch.compile = identity
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # absent Apex and TransformerEngine are the expected case here
            import megatron.core
            import megatron.core.jit
            import megatron.core.optimizer
            import megatron.core.pipeline_parallel.schedules  # noqa: F401
    finally:
        torch.compile = compile_


# --- collectives over pieces of unequal length ------------------------------------------------------------------------


def _replace_uneven_collectives() -> None:
    """With EP and ETP together the token dispatcher exchanges pieces of unequal length, which gloo refuses."""
    from megatron.core.tensor_parallel import mappings

    gather_even, scatter_even = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(piece: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather_even(piece, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = piece.new_zeros((max(sizes), *piece.shape[1:]))
        padded[: len(piece)] = piece
        everyone = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(everyone, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])

    def scatter(whole: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter_even(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


# --- random state -----------------------------------------------------------------------------------------------------


def _replace_random_state() -> None:
    """The model-parallel tracker forks the CUDA generator's state; here the CPU generator plays its part."""
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def seed(value: int) -> None:
        torch.random.default_generator.manual_seed(value)

    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = seed  # type: ignore[assignment]
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


# --- tensors made with device="cuda" ----------------------------------------------------------------------------------


class _CpuTorch(types.ModuleType):
    """``torch`` as a few Megatron modules see it: factories asked for a CUDA device use the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _CUDA_FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapped(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and str(device).startswith("cuda"):
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return wrapped


def _redirect_factories() -> None:
    """Scalars such as the loss scale are made with a literal ``device="cuda"``."""
    proxy = _CpuTorch()
    for name in _MODULES_WITH_CUDA_FACTORIES:
        sys.modules[name].torch = proxy  # type: ignore[attr-defined]


# --- TransformerEngine ------------------------------------------------------------------------------------------------


def _disable_transformer_engine_gemm() -> None:
    """Two modules take an import that succeeds without TransformerEngine for TransformerEngine.

    The router looks up ``te_general_gemm``, a name that is not defined then; latent attention asks whether a module is
    an instance of None.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
