"""Every preset takes three real steps on Megatron models, and no two of them are the same algorithm."""

from pathlib import Path

import pytest

from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world
PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "algorithms").glob("*.yaml"))


def test_every_preset_takes_three_steps(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path)
    [results] = run_world(1, "tests.training.cases:preset_steps", {"path": str(path), "presets": PRESETS})
    assert sorted(results) == PRESETS and len(PRESETS) >= 12
    for name, metrics in results.items():
        assert metrics["actor/grad_norm"] > 0, name
        assert ("critic/loss" in metrics) == (
            (name.startswith("sao") and name != "sao_running_mean") or name == "vapo"
        ), name
        assert ("actor/ratio_mean" in metrics) == (name not in ("asympo", "spo", "naive", "gpg")), name
    norms = {name: metrics["actor/grad_norm"] for name, metrics in results.items()}
    assert len(set(norms.values())) == len(norms), "two presets did the same"
    assert abs(results["asympo"]["actor/loss"]) < 1e-6 < abs(results["naive"]["actor/loss"])


def test_an_objective_of_ones_own_trains_without_touching_the_trainer(tmp_path: Path) -> None:
    """A section and a function, known to nobody else: twice gpg's loss is twice gpg's loss and gradient."""
    path = write_tiny_checkpoint(tmp_path)
    settings = {"actor": {"optimizer": {"lr": 1e-3, "clip_grad": 0}}}
    [(gpg, mine)] = run_world(1, "tests.training.cases:own_objective", {"path": str(path), "settings": settings})
    assert mine["loss"] == pytest.approx(2 * gpg["loss"], rel=1e-6) and mine["loss"] != 0
    assert mine["grad_norm"] == pytest.approx(2 * gpg["grad_norm"], rel=1e-6)
    assert mine["positive_nll"] == gpg["positive_nll"]
