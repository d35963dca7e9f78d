"""Settings of the whole suite."""

import os

# With more processes than cores, threads of one operation wait for each other: a test of 0.2 s took 96 s.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
