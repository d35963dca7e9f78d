"""Settings of the whole suite."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# With more processes than cores, threads of one operation wait for each other: a test of 0.2 s took 96 s.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# No example has a time of its own, and none is chosen by chance: a suite that passed passes again, on any machine.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

_OURS = "MEGASAO_"
_at_first = {name for name in os.environ if name.startswith(_OURS)}


@pytest.fixture(autouse=True, scope="module")
def _no_settings_are_left_behind() -> Iterator[None]:
    """A variable of ours that one file leaves would be read by the jobs and roles of every file after it."""
    yield
    left = {name for name in os.environ if name.startswith(_OURS)} - _at_first
    assert not left, f"this file, or one that was imported before it, has set {sorted(left)} for all files after it"
