"""Loads the compiled operators ``torch.ops.megasao.*`` if they were built, and registers fakes and gradients.

Invariants that the tests assert:
- without the file, or with one that this torch cannot load, everything still works on the plain-torch reference;
- the operators pass ``torch.library.opcheck``; under ``torch.compile`` they leave no graph break.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasao.ops.reference import PPO_STATS, SIDES

FILE = Path(__file__).parents[1] / "_fused.abi3.so"


@dataclass(frozen=True)
class Extension:
    """What was found. ``problem`` is None where the operators can be used.

    Attributes:
        problem: why there are none.
        cpu: the instruction set that the CPU kernels use on this machine.
        cuda: architectures of the CUDA kernels, empty if there are none.
    """

    problem: str | None = None
    cpu: str = ""
    cuda: str = ""

    def covers(self, device: torch.device) -> bool:
        """Whether there are kernels for tensors on ``device``."""
        return self.problem is None and (device.type == "cpu" or (device.type == "cuda" and bool(self.cuda)))


@cache
def load_extension() -> Extension:
    """Load the operators (once a process) and say what they are."""
    if not FILE.is_file():
        return Extension(problem="they were not built when megasao was installed")
    try:
        torch.ops.load_library(str(FILE))
        library = ctypes.CDLL(str(FILE))
    except OSError as error:
        return Extension(problem=f"{FILE.name} cannot be loaded by torch {torch.__version__}: {error}")
    library.megasao_cpu_isa.restype = library.megasao_cuda_archs.restype = ctypes.c_char_p
    _register()
    return Extension(cpu=library.megasao_cpu_isa().decode(), cuda=library.megasao_cuda_archs().decode())


def _register() -> None:
    fakes: dict[str, Callable[..., Any]] = {
        "gae": _fake_gae,
        "dis": _fake_policy,
        "ppo_clip": _fake_policy,
        "response_sums": _fake_response_sums,
        "response_loss": _fake_response_loss,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"megasao::{name}", fake)
        torch.library.register_fake(f"megasao::{name}_out", _fake_out)
    for name in ("dis", "ppo_clip", "response_loss"):
        torch.library.register_autograd(f"megasao::{name}", _loss_backward, setup_context=_loss_context)


def _fake_gae(rewards: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(values)


def _fake_policy(logprobs: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return logprobs.new_empty(()), torch.empty_like(logprobs), logprobs.new_empty(len(PPO_STATS), dtype=torch.float64)


def _fake_response_sums(logprobs: Tensor, advantages: Tensor, action_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return logprobs.new_empty((4, cu_seqlens.numel() - 1), dtype=torch.float64)


def _fake_response_loss(logprobs: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return logprobs.new_empty(()), torch.empty_like(logprobs), logprobs.new_empty(len(SIDES), dtype=torch.float64)


def _fake_out(*arguments: Any) -> None:
    return None


def _loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, coefficient, stats = output
    ctx.mark_non_differentiable(coefficient, stats)
    ctx.save_for_backward(coefficient)
    ctx.others = len(inputs) - 1


def _loss_backward(ctx: Any, loss: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    """The coefficient is the gradient of the loss; 1 is the usual incoming gradient, and then nothing is computed."""
    (coefficient,) = ctx.saved_tensors
    plain = type(loss) is Tensor and loss.device.type == "cpu" and not torch.compiler.is_compiling()
    gradient = coefficient if plain and float(loss) == 1.0 else coefficient * loss
    return (gradient, *[None] * ctx.others)
