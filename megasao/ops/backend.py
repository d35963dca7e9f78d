"""Which implementation of the ops runs: the compiled operators, or plain torch.

Invariants that the tests assert: ``auto`` uses the compiled operators exactly where they are there, and says once a
process if they are not; ``fused`` without them is an error; ``reference`` never calls them.
"""

import logging
from functools import cache

import torch

from megasao.config.ops import OpsConfig
from megasao.ops.extension import Extension, load_extension

logger = logging.getLogger(__name__)

_config = OpsConfig()


def configure(config: OpsConfig) -> None:
    """Set the backend of this process.

    Raises:
        ValueError: ``ops.backend`` is fused, and the compiled operators are not there.
    """
    global _config
    problem = load_extension().problem if config.backend == "fused" else None
    if problem is not None:
        raise ValueError(f"ops.backend: fused, but there are no compiled operators: {problem}; {_mend()}, or use auto")
    _config = config


def configured() -> OpsConfig:
    """The settings of this process; the defaults before ``configure``."""
    return _config


def use_fused(device: torch.device) -> bool:
    """Whether tensors on ``device`` go to the compiled operators.

    Raises:
        ValueError: ``ops.backend`` is fused, and the operators have no kernels for this kind of device.
    """
    if _config.backend == "reference":
        return False
    extension = load_extension()
    if extension.covers(device):
        return True
    if _config.backend == "fused":
        raise ValueError(f"ops.backend: fused, but there are no compiled operators for {device.type}; {_mend()}")
    _say_once(extension, device.type)
    return False


def describe() -> str:
    """What is compiled in, and what ``auto`` uses, for ``megasao info``."""
    extension = load_extension()
    if extension.problem is not None:
        return f"plain torch reference ({extension.problem})"
    cuda = f"CUDA for {extension.cuda}" if extension.cuda else "no CUDA kernels"
    return f"fused: CPU (runs {extension.cpu} here), {cuda}"


@cache
def _say_once(extension: Extension, device: str) -> None:
    reason = extension.problem or "they were built without CUDA kernels"
    logger.warning("compiled operators for %s are not there (%s): plain torch is used; %s", device, reason, _mend())


def _mend() -> str:
    return "install a C++ compiler, then `pip install --no-build-isolation -e .`"
