"""Stands in for torchvision on a text-only CPU server. See the README beside it."""

from typing import Any, NoReturn

__version__ = "0.0.0"


def stub(module: str) -> Any:
    """A module's ``__getattr__``: every name is a function that raises when it is called."""

    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{module}.{name}: this server runs text models without torchvision")

        return missing

    return getattribute


__getattr__ = stub(__name__)
