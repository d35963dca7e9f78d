"""Megatron's models, our modules and their gradients in float64: what float32 rounds can then be told from mistakes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from megasao.megatron import models
from megasao.megatron.optimizer import Optimizer
from megasao.training.batch import Batch


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Models that are built inside the block, and what they compute. Optimizers make no step: they want float32."""
    make, ddp, to_float32 = models.make_transformer_config, models.DistributedDataParallelConfig, torch.Tensor.float

    def make_wide(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        config.params_dtype = config.pipeline_dtype = torch.float64
        config.moe_router_dtype = "fp64"
        return config

    def wide_gradients(**kwargs: Any) -> Any:
        return ddp(**{**kwargs, "grad_reduce_in_fp32": False})

    def no_narrower(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float32(tensor)

    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(models, "make_transformer_config", make_wide),
            patch.object(models, "DistributedDataParallelConfig", wide_gradients),
            patch.object(torch.Tensor, "float", no_narrower),
            patch.object(Optimizer, "step", lambda self, lr: 0.0),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def widened(batch: Batch) -> Batch:
    """The same numbers in float64."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            return value.double()
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: wide(getattr(value, field.name)) for field in fields(value)})
        return value

    return replace(batch, rows=[wide(row) for row in batch.rows])
