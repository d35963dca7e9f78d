"""Settings of the whole suite."""

import os

from hypothesis import HealthCheck, settings

# With more processes than cores, threads of one operation wait for each other: a test of 0.2 s took 96 s.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# No example has a time of its own, and none is chosen by chance: a suite that passed passes again, on any machine.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
