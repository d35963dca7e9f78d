"""Every test of the ops runs twice: on the plain-torch reference and on the compiled operators."""

import os
import shutil
from collections.abc import Iterator

import pytest

from megasao.config.ops import OpsConfig
from megasao.ops.backend import configure
from megasao.ops.extension import load_extension


@pytest.fixture(scope="module", params=["reference", "fused"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of this test; a missing extension is an error where a compiler could have built it."""
    name: str = request.param
    if name == "fused" and load_extension().problem is not None:
        built = shutil.which("g++") is not None and os.environ.get("MEGASAO_BUILD") != "0"
        assert not built, f"{load_extension().problem}: run `make setup` (after `make clean` if need be)"
        pytest.skip("no C++ compiler here")
    configure(OpsConfig(backend=name))  # type: ignore[arg-type]
    yield name
    configure(OpsConfig())
