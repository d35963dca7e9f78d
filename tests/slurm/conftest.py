"""One real Slurm for all tests of this directory; skipped, with the reason, where it cannot be had."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster, why_not

NODES = 6


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Six nodes: for most jobs one for the controller, two for the trainer, one for rollouts, and spare ones."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    running = Cluster(tmp_path_factory.mktemp("slurm"), NODES)
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2 with few numbers, whose indexers select all of an episode: an SGLang server on a CPU serves no more."""
    return jobs.write_sparse_model(tmp_path_factory.mktemp("glm-5-2"))


@pytest.fixture(scope="session")
def steady_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without near-ties of routers: there two runs would part whose numbers are to be compared."""
    return jobs.write_steady_model(tmp_path_factory.mktemp("steady"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2 with few numbers, whose indexers select a quarter of an episode."""
    return jobs.write_model(tmp_path_factory.mktemp("glm"))
