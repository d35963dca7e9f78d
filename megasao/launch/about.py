"""What is installed here and what would be used."""

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version

import megasao

PACKAGES = ("torch", "megatron-core", "transformers", "pyarrow", "pyzmq", "pydantic", "msgspec")


def about() -> dict[str, str]:
    """Facts by name, in the order to be shown."""
    facts = {"megasao": megasao.__version__, "python": platform.python_version()}
    facts |= {name: installed_version(name) for name in PACKAGES}
    return facts | _device()


def _device() -> dict[str, str]:
    import torch

    from megasao.ops.backend import describe

    present = torch.cuda.is_available()
    engine = importlib.util.find_spec("transformer_engine") is not None
    if present:
        cuda = f"{torch.cuda.get_device_name(0)} ({torch.cuda.device_count()} visible)"
    else:
        cuda = "not present: Megatron runs on the CPU, with gloo"
    missing = "" if engine or not present else ", which is not installed"
    return {
        "cuda": cuda,
        "transformer_impl": f"auto is {'transformer_engine' if present else 'local'}{missing}",
        "ops": describe(),
    }


def installed_version(package: str) -> str:
    """The version of a package; ``not installed`` without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
