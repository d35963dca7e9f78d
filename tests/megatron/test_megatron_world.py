"""Layouts, collectives, the CPU shim, and the test world itself."""

import sys
from pathlib import Path

import pytest
import torch

from tests.megatron.world import WorldFailure, run_world

pytestmark = pytest.mark.world


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"ranks": 2}, [3.0, 0.2]),
        ({"ranks": 2, "pipeline": 2}, [1.0, 0.1]),
        ({"ranks": 2, "tensor": 2}, [1.0, 0.1]),
    ],
    ids=["DP2", "PP2", "TP2"],
)
def test_data_sums_count_each_data_rank_once(checkpoint: Path, layout: dict, expected: list[float]) -> None:
    results = run_world(2, "tests.megatron.cases:collectives", {"path": str(checkpoint), "parallel": layout})
    for total, received, empty, _ in results:
        assert total == expected
        assert bytes.fromhex(received) == b"\x00payload"
        assert empty == ""


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"ranks": 1}, "the world has 2 processes"),
        ({"ranks": 2, "tensor": 2, "sequence": True}, "expert_tensor = 1 must equal parallel.tensor = 2"),
        ({"ranks": 2, "tensor": 2, "expert": 2}, "needs parallel.sequence = true"),
    ],
)
def test_layouts_that_cannot_work_are_refused(checkpoint: Path, layout: dict, message: str) -> None:
    payload = {"path": str(checkpoint), "parallel": layout}
    for result in run_world(2, "tests.megatron.cases:layout_errors", payload):
        assert message in result


def test_a_layout_that_is_cleared_leaves_no_threads_behind() -> None:
    """Each idle group has threads that poll: worlds that try many layouts would grind to a halt."""
    layouts = [{"ranks": 2}, {"ranks": 2, "pipeline": 2}] * 3
    for threads in run_world(2, "tests.megatron.cases:threads_over_layouts", {"layouts": layouts}):
        assert threads[-1] <= threads[1] + 3, threads


def test_transformer_engine_is_refused_where_it_cannot_be(checkpoint: Path) -> None:
    payload = {"path": str(checkpoint), "model": {"transformer_impl": "transformer_engine"}}
    [message] = run_world(1, "tests.megatron.cases:layout_errors", payload)
    assert "needs CUDA and the package transformer_engine" in message


def test_shim_refuses_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    from megasao.megatron import cpu

    zeros, tensor_type = torch.zeros, torch.Tensor.type
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AssertionError, match="out of the way"):
        cpu.install()
    assert torch.zeros is zeros
    assert torch.Tensor.type is tensor_type


def test_world_reports_the_traceback_of_the_failed_rank() -> None:
    with pytest.raises(WorldFailure, match="RuntimeError: deliberate"):
        run_world(2, "tests.megatron.cases:fail_on", {"rank": 1})


def test_world_names_the_rank_that_does_not_answer() -> None:
    with pytest.raises(WorldFailure, match="rank 1 did not answer"):
        run_world(2, "tests.megatron.cases:wait_forever", timeout_s=2.0)


def test_missing_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from megasao.megatron.runtime import initialize_world

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="RANK"):
        initialize_world(1.0)
    assert not torch.distributed.is_initialized()
    assert sys.modules["torch"] is torch
