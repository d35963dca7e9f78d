"""Model families: what a config.json means, and where its weights lie in Megatron. No torch.

One file is one family, named as its ``model_type`` and holding ``FAMILY``; adding a file adds a family. Everything
that differs between families is there: which settings of config.json are supported, Megatron's configuration, the kind
of attention, and the rules by which weights are loaded, exported, published, checkpointed and counted.

Invariants (tests assert them):

- the rules of a family name every parameter of its Megatron model and every tensor of its checkpoint, exactly once;
- they say the shape of each tensor as transformers makes it;
- the published numbers of tensors and parameters come out of them.
"""

import importlib
import pkgutil

from megasao.families.base import Family, HfConfig
from megasao.families.rules import Rule

__all__ = ["Family", "HfConfig", "Rule", "families", "family_of"]

_SHARED = {"base", "checks", "facts", "names", "routing", "rules", "shrink", "sizes"}


def families() -> list[str]:
    """The supported values of ``model_type``."""
    return sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if name not in _SHARED)


def family_of(hf_config: HfConfig) -> Family:
    """The family of a checkpoint's config.json.

    Raises:
        ValueError: its ``model_type`` is none of :func:`families`.
    """
    name = hf_config.get("model_type")
    if name not in families():
        known = " or ".join(map(repr, families()))
        raise ValueError(f"model_type = {name!r} is not supported; expected {known}")
    family: Family = importlib.import_module(f"{__name__}.{name}").FAMILY
    return family
