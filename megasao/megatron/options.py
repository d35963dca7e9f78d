"""The section ``megatron`` of a config as arguments of Megatron-Core's dataclasses."""

import ast
from typing import Any

import torch

from megasao.config import Config
from megasao.config.megatron import DTYPES, NEED_CUDA, Kind, fields


def passed_on(kind: Kind, config: Config) -> dict[str, Any]:
    """Arguments for one of the dataclasses: dtypes as torch's; for the model, those of ``trainer.recompute`` too.

    Raises:
        ValueError: an option needs a GPU, and there is none.
    """
    options: dict[str, Any] = {}
    for name, value in getattr(config.megatron, kind).items():
        if name in NEED_CUDA and value and not torch.cuda.is_available():
            raise ValueError(f"megatron.{kind}.{name} = {value!r} needs CUDA, and there is none; leave it out")
        is_dtype = isinstance(value, str) and value in DTYPES and "torch.dtype" in ast.unparse(fields(kind)[name])
        options[name] = getattr(torch, value) if is_dtype else value
    return {**_recompute(config.trainer.recompute), **options} if kind == "model" else options


def _recompute(what: str) -> dict[str, Any]:
    if what == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if what == "selective" else {}
